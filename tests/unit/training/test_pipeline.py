"""The training command, from folders of files to a folder that serves."""

import csv
import json
import shutil
from pathlib import Path

import pytest
import torch

from app.errors import BadParameter, InsufficientMemory, LandmarkdError, StartupError
from app.inference.detector import Detector
from app.inference.load import load_checked
from app.io.volume import read_volume
from app.model import editing
from app.training.evaluate.model_card import REGIONS, write_section
from app.training.files import CHECKPOINT, CURVES, HISTORY, OUTCOMES, RECORD
from tests.support.training_data import (
    BLOBS,
    SMALL,
    TILES,
    landmarkd,
    make_affine,
    middle_of,
    points_of,
    write_data,
    write_points,
    write_specimen,
    write_specimens,
)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_specimens(tmp_path_factory.mktemp("data"), "one", "two", "three")


def run(data: Path, output: Path, *words: object) -> str:
    """Train without validation; returns the output."""
    return landmarkd(
        "train",
        data / "scans",
        data / "landmarks",
        "-o",
        output,
        *TILES,
        "--validate",
        "none",
        *words,
    )


@pytest.mark.parametrize("kind", [("--tile", "whole"), ("--tile", 16)])
def test_training_writes_a_folder_that_serves(
    data: Path, tmp_path: Path, kind: tuple[object, ...]
) -> None:
    folder = tmp_path / "mine"
    output = run(data, folder, "--steps", 2, "--validate", "two", *kind)
    model = load_checked(folder, torch.device("cpu"))
    assert [landmark.name for landmark in model.manifest.landmarks] == list(BLOBS)
    assert (model.shape is None) == (16 in kind)
    scan = (data / "scans" / "one.nii.gz").read_bytes()
    assert len(Detector(model).detect(read_volume(scan)).landmarks) == len(BLOBS)
    assert "step 2:" in output
    kept = json.loads((folder / OUTCOMES).read_text())["outcomes"]
    assert [(row["scan"], row["landmark"]) for row in kept] == [("two", name) for name in BLOBS]
    (row,) = csv.DictReader((folder / HISTORY).read_text().splitlines())
    assert (row["step"], row["not_found"]) == ("2", "5")
    assert not (folder / CURVES).exists(), "one row makes no curve"


def test_training_writes_into_the_current_folder(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    monkeypatch.chdir(folder)
    run(data, Path(), "--steps", 1)
    assert load_checked(folder, torch.device("cpu")).manifest.name == "mine"


def test_history_and_curves_are_kept_beside_the_model(data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    run(data, folder, "--steps", 51, "--validate", "two", "--tile", 16)
    rows = list(csv.DictReader((folder / HISTORY).read_text().splitlines()))
    assert [row["step"] for row in rows] == ["50", "51"]
    assert float(rows[1]["score_loss"]) > 0
    assert rows[1]["not_found"].isdigit()
    assert (folder / CURVES).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("window:-5,30.5", ("window", -5.0, 30.5)),
        ("percentile:0.02,99.99", ("percentile", 0.02, 99.99)),
    ],
)
def test_voxel_values_are_scaled_as_asked_for_in_training_and_service(
    data: Path, tmp_path: Path, rule: str, expected: tuple[str, float, float]
) -> None:
    run(data, tmp_path / "mine", "--intensity", rule)
    spec = load_checked(tmp_path / "mine", torch.device("cpu")).manifest.input.intensity
    assert (spec.method, spec.lower, spec.upper) == expected


def test_training_can_start_from_the_weights_of_a_model(data: Path, tmp_path: Path) -> None:
    run(data, tmp_path / "first", "--steps", 1)
    run(data, tmp_path / "second", "--steps", 1, "--start", tmp_path / "first")
    assert load_checked(tmp_path / "second", torch.device("cpu")).manifest.name == "second"


def test_training_is_resumed_with_the_weights_that_it_started_from(
    data: Path, tmp_path: Path
) -> None:
    """Another start, or none, went on unnoticed, where its record named the same scans."""
    mine, one, other = (tmp_path / name for name in ("mine", "one", "other"))
    for seed, start in enumerate((one, other)):
        run(data, start, "--steps", 1, "--seed", seed)
    run(data, mine, "--steps", 1, "--start", one)
    for words, got in ((("--start", other), "others"), ((), "none")):
        message = f"another training: .*--start: expected the weights that .* from, got {got}"
        with pytest.raises(StartupError, match=message):
            run(data, mine, "--steps", 1, *words)
    record = json.loads((mine / RECORD).read_text())
    run(data, mine, "--steps", 1, "--start", shutil.copytree(one, tmp_path / "copy" / "one"))
    del record["start"]  # As in records of before there was this key.
    (mine / RECORD).write_text(json.dumps(record))
    run(data, mine, "--steps", 1, "--start", other)


def test_new_weights_do_not_have_what_was_measured_of_the_old(data: Path, tmp_path: Path) -> None:
    run(data, tmp_path / "mine", "--steps", 1)
    with editing(tmp_path / "mine") as document:
        document["precision"] = {"bfloat16": 0.01}
        document["landmarks"][0].update({"region95_mm": 0.5, "presence_threshold": 0.4})
        document["voting"] |= {"region_margin_mm": 0.75, "region_spread_mm": 0.5}
        names = [landmark["name"] for landmark in document["landmarks"]]
        length = {"name": "length", "kind": "distance", "points": names[:2], "interval_scale": 0.7}
        document["measurements"] = [length]
    for key in (REGIONS, "crossvalidation", "crossvalidation of both networks", "learn"):
        write_section(tmp_path / "mine", key, "95 % of errors are below 0.5 mm")
    before = load_checked(tmp_path / "mine", torch.device("cpu")).manifest
    assert (before.precision.bfloat16, before.landmarks[0].region95_mm) == (0.01, 0.5)
    for path in (tmp_path / "mine" / CHECKPOINT, *(tmp_path / "mine").glob("*.safetensors")):
        path.unlink()
    run(data, tmp_path / "mine", "--steps", 1, "--seed", 2)
    after = load_checked(tmp_path / "mine", torch.device("cpu")).manifest
    assert (after.precision.bfloat16, after.landmarks[0].region95_mm) == (None, None)
    assert after.measurements[0].interval_scale == 1.0
    assert "0.5 mm" not in (tmp_path / "mine" / "README.md").read_text()
    assert (before.voting.region_margin_mm, after.voting.region_margin_mm) == (0.75, 0.0)
    assert (before.voting.region_spread_mm, after.voting.region_spread_mm) == (0.5, None)
    assert after.landmarks[0].presence_threshold == 0.4


def test_a_finished_model_is_not_replaced(data: Path, tmp_path: Path) -> None:
    """Neither of its networks, with or without folds; only what can be resumed goes on."""
    folder, files = tmp_path / "mine", (data / "scans", data / "landmarks")
    refine = ("refine", folder, *files, "--spacing", "1.0", *SMALL)
    run(data, folder, "--validate", "none")
    landmarkd(*refine)
    for network in (folder, folder / "refine"):
        (network / CHECKPOINT).unlink()
    weights = [(one / "weights.safetensors").read_bytes() for one in (folder, folder / "refine")]
    message = "expected a new folder, or one whose training can be resumed, got the finished model"
    for words in ([], ["--folds", 2]):
        with pytest.raises(StartupError, match=rf"{message} .*/mine: choose another folder, or"):
            run(data, folder, *words)
    with pytest.raises(StartupError, match=rf"{message} .*/mine/refine: choose another"):
        landmarkd(*refine)
    assert weights == [
        (one / "weights.safetensors").read_bytes() for one in (folder, folder / "refine")
    ]
    run(data, folder, "--check")
    shutil.rmtree(folder / "refine")
    landmarkd(*refine)
    load_checked(folder, torch.device("cpu"))
    assert "all 1 steps are done" in landmarkd(*refine)


@pytest.mark.parametrize("name", ["My_Model", "a b", "x" * 65])
def test_a_folder_that_no_model_may_be_named_after_is_refused_untrained(
    data: Path, tmp_path: Path, name: str
) -> None:
    with pytest.raises(BadParameter, match="-o: expected a folder whose name is that of a model"):
        run(data, tmp_path / name)
    assert not (tmp_path / name).exists()


@pytest.mark.parametrize("label", ["", "a\tb", "x" * 129])
def test_a_label_that_no_landmark_may_have_is_found_untrained(tmp_path: Path, label: str) -> None:
    data = write_data(tmp_path / "data", count=2)
    for seed in (1, 2):
        write_points(data, f"s{seed}", points_of(seed) | {label: middle_of(make_affine(seed))})
    with pytest.raises(StartupError, match="nothing was trained, because of the data"):
        run(data, tmp_path / "mine")


def test_scans_with_too_few_landmarks_for_a_pose_are_named(tmp_path: Path) -> None:
    """Of three in a line, as in a part of a spine, the pose about it was an arbitrary one."""
    data = write_data(tmp_path / "data", count=4)
    for seed, count in enumerate((6, 6, 2, 3)):
        points = points_of(seed)
        points["bregma"] = (points["nasion"] + 2 * points["lambda"]) / 3
        write_points(data, f"s{seed}", dict(list(points.items())[:count]))
    run(data, tmp_path / "mine", "--tile", "whole", "--validate", "none")
    with pytest.raises(BadParameter, match=r"at least 3 landmarks that .* fewer in s2, s3: "):
        landmarkd("refine", tmp_path / "mine", data / "scans", data / "landmarks", *SMALL)


def test_scans_none_of_which_has_enough_landmarks_for_a_mean_shape_are_refused(
    tmp_path: Path,
) -> None:
    data = write_data(tmp_path / "data", count=4)
    run(data, tmp_path / "mine", "--tile", "whole")
    for seed in range(4):
        points = list(points_of(seed).items())
        write_points(data, f"s{seed}", dict([points[seed], points[seed + 1]]))
    with pytest.raises(BadParameter, match="expected a scan with at least 4 landmarks"):
        landmarkd("refine", tmp_path / "mine", data / "scans", data / "landmarks", *SMALL)


def test_second_network_takes_missing_landmarks_as_the_first_one_does(
    data: Path, tmp_path: Path
) -> None:
    """One that is resumed goes on as it was started."""
    folder, files = tmp_path / "mine", (data / "scans", data / "landmarks")
    finer = ("refine", folder, *files, "--spacing", "1.0", *SMALL)
    run(data, folder, "--missing", "absent")
    landmarkd(*finer)
    path = folder / "refine" / RECORD
    text = path.read_text()
    assert '"missing": "absent"' in text
    path.write_text(text.replace('"missing": "absent"', '"missing": "unknown"'))
    assert "all 1 steps are done" in landmarkd(*finer)


def test_weights_that_do_not_fit_are_refused(data: Path, tmp_path: Path) -> None:
    run(data, tmp_path / "first", "--steps", 1)
    with pytest.raises(BadParameter, match="--start: expected weights that fit"):
        run(data, tmp_path / "second", "--start", tmp_path / "first", "--filters", "8,8,16")


def test_nothing_is_trained_on_wrong_data(tmp_path: Path) -> None:
    other = tmp_path / "data"
    write_specimen(other, "one", 1)
    path = other / "landmarks" / "one.csv"
    path.write_text(path.read_text() + "f,5000,0,0\n")
    with pytest.raises(StartupError, match="because of the data: 1 scan with 6 landmarks: 1 error"):
        run(other, tmp_path / "mine", "--steps", 1)
    assert not (tmp_path / "mine").exists()


def test_warnings_stop_a_training_only_if_that_is_asked_for(tmp_path: Path) -> None:
    other = tmp_path / "data"
    for seed in range(2):
        write_specimen(other, f"s{seed}", seed)
    (other / "scans" / "notes.txt").write_text("mine")
    with pytest.raises(StartupError, match="0 errors, 1 warning"):
        run(other, tmp_path / "mine", "--check", "--strict")
    assert "not used" in run(other, tmp_path / "mine", "--check")
    assert not (tmp_path / "mine").exists()


def test_unknown_scan_to_validate_on_is_named(data: Path, tmp_path: Path) -> None:
    with pytest.raises(BadParameter, match="none named four; there are one, three, two"):
        run(data, tmp_path / "mine", "--validate", "four")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--filters", "4,8"), "at least 3 multiples of 4, got"),
        (("--filters", "4,4,6"), "at least 3 multiples of 4, got"),
        (("--filters", "4,x"), "expected numbers such as"),
        (("--filters", "4,²"), "expected numbers such as"),
        (("--tile", "²"), "expected whole or a number of voxels"),
        (("--tile", "some"), "expected whole or a number of voxels, got some"),
        (("--tile", "20"), "expected a multiple of 8 voxels, got 20"),
        (("--filters", "4,4,4", "--tile", "8", "--batch", "1"), "--batch: expected 2 or more, as"),
        (("--tile", "16", "--field", "1.5"), "expected a network that sees scans whole"),
        (("--validate", "one,two,three"), "expected scans to be left to learn from"),
        (
            ("--validate", "one", "--train-only", "two,one"),
            "--train-only: expected none that are held out",
        ),
        (("--train-only", "four"), "--train-only: expected names of scans, found none named four"),
        (("--device", "abacus"), "expected a device of auto, cpu"),
        (("--intensity", "loud"), "expected percentile:LOWER,UPPER or window:LOWER,UPPER, got"),
        (("--intensity", "window:5"), "UPPER, got window:5"),
        (("--intensity", "window:5,1"), "UPPER, got window:5,1"),
        (("--intensity", "percentile:1,200"), "UPPER, got percentile:1,200"),
        (("--intensity", "zscore:0,1"), "UPPER, got zscore:0,1"),
        (("--spacing", "500"), "mine: input.spacing_mm.0: .* less than or equal to 100, got 500"),
        (
            ("--intensity", "window:900,3000"),
            "expected an intensity window that the values of each scan reach, got 900 to 3000, "
            "and none within in one, three, two: those of one are -",
        ),
    ],
)
def test_option_that_makes_no_training_is_refused(
    data: Path, tmp_path: Path, words: tuple[str, ...], message: str
) -> None:
    with pytest.raises(LandmarkdError, match=message):
        run(data, tmp_path / "mine", *words)
    assert not (tmp_path / "mine").exists()
    with pytest.raises(LandmarkdError):
        run(data, tmp_path / "mine", *words, "--check")


def test_a_folder_to_write_is_needed_unless_data_are_only_checked(data: Path) -> None:
    folders = (data / "scans", data / "landmarks")
    with pytest.raises(BadParameter, match="expected -o FOLDER"):
        landmarkd("train", *folders)
    output = landmarkd("train", *folders, "--check")
    assert "3 scans with 5 landmarks: 0 errors, 0 warnings" in output
    for option in ("--spacing", "--radius", "--tile", "--batch", "--validate"):
        assert option in output


@pytest.mark.parametrize("tile", ["16", "whole"])
def test_a_single_landmark_is_enough(tmp_path: Path, tile: str) -> None:
    data = write_data(tmp_path / "data", count=3)
    for seed in range(3):
        write_points(data, f"s{seed}", {"nasion": points_of(seed)["nasion"]})
    run(data, tmp_path / "mine", "--tile", tile)
    assert load_checked(tmp_path / "mine", torch.device("cpu")).shape is None
    with pytest.raises(BadParameter, match="--mirror: expected at least 4 landmarks"):
        run(data, tmp_path / "other", "--mirror")
    with pytest.raises(BadParameter, match="expected at least 4 landmarks"):
        landmarkd("refine", tmp_path / "mine", data / "scans", data / "landmarks")


def test_a_second_network_that_could_not_be_served_is_refused_before_it_is_trained(
    tmp_path: Path,
) -> None:
    """It shares the first one's window of voxel values, which not every rule has."""
    data = write_data(tmp_path / "data", count=3)
    run(data, tmp_path / "mine", "--tile", "whole")
    path = tmp_path / "mine" / "model.toml"
    lines = [line for line in path.read_text().splitlines() if line[:5] not in {"lower", "upper"}]
    path.write_text("\n".join(lines).replace("percentile", "zscore") + "\n")
    with pytest.raises(BadParameter, match=r"--intensity percentile or window.*, got zscore"):
        landmarkd("refine", tmp_path / "mine", data / "scans", data / "landmarks")
    assert not (tmp_path / "mine" / "refine").exists()


@pytest.mark.parametrize(
    ("words", "fast", "choice"),
    [
        (("--precision", "bfloat16"), (), "bfloat16 given, but cpu has no instructions for it"),
        (("--precision", "bfloat16"), ("bfloat16",), "bfloat16 given"),
        ((), ("bfloat16",), "float32 the default; in bfloat16 a step takes a third less time"),
        ((), (), "float32 the default"),
    ],
)
def test_table_says_whether_the_device_computes_the_precision(
    words: tuple[str, ...],
    fast: tuple[str, ...],
    choice: str,
    data: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A CPU without instructions for bfloat16 emulates it, which takes many times as long."""
    monkeypatch.setattr("app.training.fit.suggest.fast_precisions", lambda _device: fast)
    folders = (data / "scans", data / "landmarks")
    output = landmarkd("train", *folders, "--device", "cpu", "--check", *words)
    assert f"--precision {choice}" in " ".join(output.replace("│", " ").split())


def test_open_options_are_chosen_from_the_data(tmp_path: Path) -> None:
    """Small constellations in large scans are looked for in tiles, others in the whole scan."""
    data = write_data(tmp_path / "data")
    output = " ".join(landmarkd("train", data / "scans", data / "landmarks", "--check").split())
    assert "│ whole │" in output
    assert "1 mm │ that of the scans" in output
    for seed in range(6):
        middle = middle_of(make_affine(seed))
        points = {landmark: middle + (at - middle) / 8 for landmark, at in points_of(seed).items()}
        write_points(data, f"s{seed}", points)
    finer = ("--spacing", "0.2", "--check")
    output = " ".join(landmarkd("train", data / "scans", data / "landmarks", *finer).split())
    assert "│ --tile │ 64 │ the scans are 2.7 times as long" in output


@pytest.mark.parametrize("command", ["train", "refine"])
def test_training_that_does_not_fit_the_memory_says_so_and_what_helps(
    tmp_path: Path, command: str
) -> None:
    """Here one of so many channels that no address space holds its weights."""
    data, model = write_data(tmp_path / "data"), tmp_path / "mine"
    files = (data / "scans", data / "landmarks")
    if command == "refine":
        landmarkd("train", *files, "-o", model, *SMALL, "--validate", "none")
    words = ("train", *files, "-o", model) if command == "train" else ("refine", model, *files)
    message = r"needed 432000000000000 bytes more, .*; one of a smaller batch, a coarser"
    with pytest.raises(InsufficientMemory, match=message):
        landmarkd(*words, *SMALL, "--filters", "2000000,4,4")

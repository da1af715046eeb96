"""``landmarkd learn``: a better next version takes the place, any other does not."""

import json
import re
import shutil
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from numpy.testing import assert_allclose
from rich.console import Console
from safetensors.torch import load_file, save_file

from app import phantom
from app.errors import BadParameter, StartupError, Unauthorized
from app.inference.load import load_checked
from app.model import editing, hash_file, read_manifest, update_hashes, write_selfcheck
from app.phantom import write_phantoms
from app.training import learn as learning
from app.training.cli import learn as command
from app.training.data.specimens import SpecimenFiles
from app.training.evaluate.model_card import FIRST_ALONE, write_section
from app.training.files import RECORD
from app.training.learn import (
    LearnOptions,
    choose_held_out,
    hold_out,
    learn,
    options_like,
    whole_cases,
)
from app.training.record import read_record
from app.training.versions import exclusive, put_in_place
from tests.support.training_data import (
    interrupt_after,
    landmarkd,
    points_of,
    write_data,
    write_points,
)

MODELS = Path(__file__).resolve().parents[3] / "models"
PHANTOM, SPINES = MODELS / "phantom", MODELS / "lumbar-mri"
HEAD = "output_block.conv.conv.bias"
SHIFT = 1.5
"""Voxels of 2 mm by which the model of these tests is wrong."""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sixteen phantoms that one tile of the model holds each: usual ones take up to eight."""
    folder = tmp_path_factory.mktemp("store") / "phantom"
    folder.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(phantom, "AXIS_VOXELS", (36, 46))
        patch.setattr(phantom, "EXTENT_MM", (62.0, 68.0))
        patch.setattr(phantom, "MIN_DISTANCE_MM", 22.0)
        write_phantoms(folder, count=16, seed=9000)
    return folder


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "models" / "phantom"
    shutil.copytree(PHANTOM, folder)
    make_worse(folder)
    return folder


def make_worse(folder: Path) -> None:
    """Make the phantom's model err by 3 mm along the first axis of its grid."""
    weights = load_file(folder / "weights.safetensors")
    weights[HEAD][6:12] += SHIFT
    save_file(weights, folder / "weights.safetensors")
    path = folder / "model.toml"
    text = path.read_text(encoding="utf-8").partition("[selfcheck]")[0]
    check = '[selfcheck]\ninput = "noise:7"\nexpected = "selfcheck.safetensors"\n'
    path.write_text(text + check, encoding="utf-8")
    write_selfcheck(folder)


def options(model: Path, store: Path, steps: int, rate: float) -> LearnOptions:
    return LearnOptions(model, store, None, None, steps, rate, "cpu")


@pytest.mark.no_cover
def test_better_version_takes_the_place_and_the_one_before_comes_back(
    model: Path, store: Path
) -> None:
    before = hash_file(model / "weights.safetensors")
    write_section(model, FIRST_ALONE, "The mean error is 0.3 mm.")
    words = ("--from", store, "--steps", 40, "--rate", 1e-3, "--device", "cpu")
    said = landmarkd("learn", model, *words)
    assert re.search(r"On 5 held-out cases, version 1\.1\.0 is (2\.9|3\.0)\d\d mm off and", said)
    assert "version 1.1.1 is in place" in said
    loaded = load_checked(model, torch.device("cpu"))
    assert loaded.manifest.version == "1.1.1"
    assert "learned from 16 kept cases" in loaded.card
    assert "What else is said here of errors was measured of 1.1.0 or before." in loaded.card
    assert "The mean error is 0.3 mm." not in loaded.card
    record = read_record(model)
    assert (len(record["held_out"]), len(record["train"])) == (5, 11)
    assert "version 1.1.0 is in place again, 1.1.1 is not" in landmarkd("learn", model, "--back")
    assert hash_file(model / "weights.safetensors") == before


def test_version_that_is_no_better_is_not_put_in_place(model: Path, store: Path) -> None:
    before = hash_file(model / "model.toml")
    said = landmarkd("learn", model, "--from", store, "--steps", 1, "--rate", 0, "--device", "cpu")
    warning, _, rest = said.partition("step ")
    assert "phantom learns from 16 kept cases only, and forgets" in warning
    assert "no recipe.json names them" in warning
    assert rest
    assert "better by 0.000 mm, 95 % interval 0.000 to 0.000 mm" in said
    assert "version 1.1.0 stays" in said
    assert hash_file(model / "model.toml") == before


def test_too_few_cases_to_tell_are_refused_before_anything_is_trained(
    model: Path, tmp_path: Path
) -> None:
    write_phantoms(tmp_path / "few", count=3, seed=9000)
    with pytest.raises(BadParameter, match=r"at least 5 cases .* of 3 kept .* keep 11 more"):
        learn(options(model, tmp_path / "few", 1, 0), Console())
    with pytest.raises(BadParameter, match="--from: expected a model's folder in a store"):
        learn(options(model, tmp_path, 1, 0), Console())
    assert not (model.parent / ".phantom" / "next").exists()


def test_next_version_is_trained_with_all_random_changes_that_the_one_before_was(
    tmp_path: Path,
) -> None:
    """Blur and noise were left out: the next lumbar-mri learned from sharp images alone."""
    given = options_like(options(SPINES, tmp_path, 1, 0.0), tmp_path, tmp_path, tmp_path)
    record = read_record(SPINES)
    assert {"contrast", "degrade", "field", "reflect", "scale"} <= given.augmentation.keys()
    assert given.augmentation == record["recipe"]["augmentation"]


def test_service_without_its_key_is_refused_before_anything_is_trained(
    model: Path, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The version was trained and put in place first, and then: ``Illegal header value``."""
    monkeypatch.delenv("LANDMARKD_API_KEY", raising=False)
    message = "--url: expected the admin key of http://127.0.0.1:1 in LANDMARKD_API_KEY, found none"
    for words in (("--from", store), ("--back",)):
        with pytest.raises(BadParameter, match=message):
            landmarkd("learn", model, *words, "--url", "http://127.0.0.1:1")
    monkeypatch.setenv("LANDMARKD_API_KEY", "se\ncret")
    with pytest.raises(Unauthorized, match="expected an API key in one line"):
        landmarkd("learn", model, "--from", store, "--url", "http://127.0.0.1:1")
    assert not (model.parent / ".phantom").exists()


def test_cases_of_scans_that_were_trained_on_are_not_counted_among_those_to_judge_by(
    model: Path, store: Path
) -> None:
    """Of 20 scans, ``train`` holds out four; all were kept, and nothing said what was missing."""
    names = [files.name for files in whole_cases(store)]
    (model / RECORD).write_text(json.dumps({"train": names[4:], "held_out": names[:4]}))
    with pytest.raises(BadParameter, match=r"got 4: .* keep 2 more, of scans that it has not"):
        hold_out(options(model, store, 1, 0), whole_cases(store), [])


def test_second_learner_of_a_model_is_refused_before_anything_is_trained(
    model: Path, store: Path
) -> None:
    with exclusive(model), pytest.raises(StartupError, match="but another is at work"):
        learn(options(model, store, 1, 0), Console())
    assert not (model.parent / ".phantom" / "next").exists()


@pytest.mark.no_cover
def test_interrupted_learning_is_resumed_and_made_anew_only_where_it_would_be_another(
    model: Path, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next run deleted the checkpoint: hours of training on a CPU were lost to one Ctrl-C."""
    candidate = model.parent / ".phantom" / "next" / "phantom"

    def run(steps: int, interrupted_after: int | None = None) -> str:
        said = StringIO()
        with monkeypatch.context() as patch:
            if interrupted_after is not None:
                interrupt_after(interrupted_after, patch)
            compared = learn(options(model, store, steps, 1e-6), Console(file=said, width=500))
        assert (compared is None) == (interrupted_after is not None)
        return said.getvalue()

    run(3, interrupted_after=2)
    assert "resuming at step 2 of 3" in run(3)
    resumed = hash_file(candidate / "weights.safetensors")
    assert "resuming" not in run(3)
    assert hash_file(candidate / "weights.safetensors") == resumed
    run(3, interrupted_after=2)
    said = run(2, interrupted_after=1)
    assert "not resumed but made anew, as it was started with other options or cases: " in said
    assert "recipe.steps: expected 3, got 2" in said
    with editing(model) as document:
        document["description"] = "Of another kind."
    assert "resuming" not in run(2)
    assert read_manifest(candidate).description == "Of another kind."


@pytest.mark.no_cover
def test_version_that_was_taken_back_is_not_made_again_of_the_same_cases(
    model: Path, store: Path
) -> None:
    """A watch that was restarted put it in place once more, as if nobody had judged it."""
    learn(options(model, store, 1, 0), Console())
    put_in_place(model.parent / ".phantom" / "next" / "phantom", model)
    landmarkd("learn", model, "--back")
    taken_back = model.parent / ".phantom" / "before" / "phantom"
    with pytest.raises(BadParameter, match=f"keep more, or delete {taken_back}$"):
        learn(options(model, store, 1, 0), Console())
    record = read_record(taken_back)
    more = shutil.copytree(store, model.parent / "more" / "phantom")
    for kind in ("scans", "landmarks"):
        one = next((more / kind).glob(f"{record['held_out'][0]}.*"))
        one.rename(one.with_name(one.name.replace(".", "-frame3.", 1)))  # Judges, teaches nothing.
    with pytest.raises(BadParameter, match=f"keep more, or delete {taken_back}$"):
        learn(options(model, more, 1, 0), Console())
    assert learn(options(model, store, 2, 0), Console()) is not None


def test_a_case_that_the_model_does_not_answer_is_named_before_anything_is_trained(
    model: Path, store: Path
) -> None:
    with editing(model) as document:
        document["input"] |= {"tile_shape": "whole", "max_voxels": 512}
    write_selfcheck(model)
    message = r"held-out scans that \S+phantom answers, got phantom-\d+: .*\(512 voxels"
    with pytest.raises(BadParameter, match=message):
        learn(options(model, store, 1, 0), Console())
    assert not (model.parent / ".phantom" / "next" / "phantom" / "checkpoint.pt").exists()


@pytest.mark.no_cover
def test_watch_goes_on_after_a_case_was_deleted_while_it_learned(
    model: Path, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ended after the training, at the scan that was to judge it."""
    kept, train, done = tmp_path / "kept", learning.fine_tune, []
    shutil.copytree(store, kept)
    judge = hold_out(options(model, kept, 1, 0), whole_cases(kept), [])[0]

    def train_and_delete(*given: Any) -> bool:
        done.append(train(*given))
        for path in judge[1:]:
            path.unlink(missing_ok=True)
        return done[-1]

    monkeypatch.setattr(learning, "fine_tune", train_and_delete)
    monkeypatch.setattr(command, "WATCH_S", -1.0)  # It is waited for the next case: this raises.
    words = ("--from", kept, "--watch", "--steps", 1, "--rate", 0, "--device", "cpu")
    with pytest.raises(ValueError, match="non-negative"):
        landmarkd("learn", model, *words)
    assert done == [True, True]


@pytest.mark.no_cover
def test_second_network_learns_as_well(tmp_path: Path) -> None:
    data, model = write_data(tmp_path / "data", 18), tmp_path / "mine"
    small = ("--filters", "4,4,8", "--batch", 1, "--device", "cpu", "--steps", 1)
    where = (data / "scans", data / "landmarks")
    landmarkd("train", *where, "-o", model, *small, "--validate", "none")
    landmarkd("refine", model, *where, *small, "--validate", "none")
    second = (model / "refine").rename(model / "second")  # Names are free.
    for folder in (model, second):
        (folder / RECORD).unlink()  # It has not seen the scans of these names.
    with editing(second) as document:
        document["name"] = "second"
        document["input"]["upright"] = True  # Which says nothing of the poses that it sees.
        document["landmarks"][0]["region95_mm"] = 0.5
        document["voting"] |= {"region_margin_mm": 0.75, "region_spread_mm": 0.5}
        document["shape"]["region_scale_mm"] = 0.25
    with editing(model) as document:
        document["refine"]["folder"] = "second"
        update_hashes(model, document)
    poor = write_data(tmp_path / "poor", 18)
    for seed in range(18):
        write_points(poor, f"s{seed}", dict(list(points_of(seed).items())[:2]))
    with pytest.raises(BadParameter, match=r"3 landmarks that lie in no line, .* got none"):
        learn(options(model, poor, 3, 1e-2), Console())
    compared = learn(options(model, data, 3, 1e-2), Console())
    assert compared is not None
    assert compared.cases == 6
    candidate = tmp_path / ".mine" / ("before" if compared.is_better else "next") / "mine"
    assert read_record(candidate / "second")["recipe"]["augmentation"]["rotation_deg"] == 8.0
    for inner in (".", "second"):
        one, other = (load_file(at / inner / "weights.safetensors") for at in (model, candidate))
        assert any((one[name] != other[name]).any() for name in one)
        shapes = [load_file(at / inner / "shape.safetensors")["mean"] for at in (model, candidate)]
        assert_allclose(shapes[0], shapes[1])
    grids = [read_manifest(at / "second").input for at in (model, candidate)]
    assert grids[0].model_copy(update={"upright": False}) == grids[1]
    loaded = load_checked(candidate, torch.device("cpu")).refine
    assert loaded is not None
    assert [one.region95_mm for one in loaded.manifest.landmarks[:2]] == [0.5, None]
    voting = loaded.manifest.voting
    assert (voting.region_margin_mm, voting.region_spread_mm) == (0.75, 0.5)
    assert loaded.manifest.shape is not None
    assert loaded.manifest.shape.region_scale_mm == 0.25


def test_held_out_cases_stay_held_out_and_trained_ones_trained() -> None:
    names = [f"case-{number}" for number in range(30)]
    first = choose_held_out(names[:15], {})
    assert len(first) == 5
    record = {"held_out": first, "train": [name for name in names[:15] if name not in first]}
    assert choose_held_out(names[:15], record) == []
    more = choose_held_out(names, record)
    assert len(more) == 5
    assert set(more) <= set(names[15:])


def test_a_third_of_new_cases_is_held_out_and_the_others_are_learned_from() -> None:
    """The third was one of all: with 18 cases that were learned from, no new one was left."""
    names = [f"case-{number}" for number in range(27)]
    assert len(choose_held_out(names, {"train": names[:18]})) == 3


def test_a_third_of_cases_that_come_one_by_one_is_held_out_as_well() -> None:
    """A third of one was none: five judged all versions, however many were kept."""
    names = [f"case-{number}" for number in range(74)]
    held_out = choose_held_out(names[:14], {})
    for count in range(14, len(names)):
        trained = [name for name in names[:count] if name not in held_out]
        record = {"held_out": held_out, "train": trained}
        held_out = [*held_out, *choose_held_out(names[: count + 1], record)]
    assert 15 <= len(held_out) - 5 <= 25


def test_old_scans_are_held_out_only_if_the_model_has_not_seen_them(
    model: Path, store: Path, tmp_path: Path
) -> None:
    old = [SpecimenFiles(name, tmp_path, tmp_path) for name in ("seen", "recorded", "named")]
    (model / RECORD).write_text(json.dumps({"train": ["seen"], "held_out": ["recorded"]}))
    given = replace(options(model, store, 1, 0), hold_out=("named",))
    chosen = {files.name for files in hold_out(given, whole_cases(store), old)}
    assert len(chosen) == 7
    assert chosen & {"seen", "recorded", "named"} == {"recorded", "named"}
    with pytest.raises(BadParameter, match=r"--validate: expected scans that .*, got seen"):
        hold_out(replace(given, hold_out=("seen",)), whole_cases(store), old)
    with pytest.raises(BadParameter, match=r"--validate: expected names of .* none named nmaed"):
        hold_out(replace(given, hold_out=("named", "nmaed")), whole_cases(store), old)


def test_an_old_scan_that_is_kept_too_counts_once_and_is_held_out_only_if_it_was(
    model: Path, store: Path, tmp_path: Path
) -> None:
    """All of them were errors, "one scan under several names", and no such model could learn."""
    old = tmp_path / "old"
    for kind in ("scans", "landmarks"):
        (old / kind).mkdir(parents=True)
        for number in range(12):
            (path,) = (store / kind).glob(f"phantom-{9000 + number}.*")
            shutil.copy(path, old / kind / path.name.replace("phantom-9", "mine-"))
    names = [f"mine-{number:03}" for number in range(12)]
    record = {"train": names[4:], "held_out": names[:4]}
    (model / RECORD).write_text(json.dumps(record))
    given = replace(options(model, store, 1, 0), old=(old / "scans", old / "landmarks"))
    with pytest.raises(BadParameter, match=r"--validate: .* was not trained on, got phantom-9004"):
        learn(replace(given, hold_out=("mine-004",)), Console())
    said = StringIO()
    compared = learn(given, Console(file=said))
    assert compared is not None
    assert compared.cases == 5
    assert "12 scans of --with were corrected and kept: only that counts" in said.getvalue()
    learned = read_record(model.parent / ".phantom" / "next" / "phantom")
    held_out = {f"phantom-{9000 + number}" for number in range(4)}
    assert held_out <= set(learned["held_out"])
    assert {f"phantom-{9000 + number}" for number in range(4, 12)} <= set(learned["train"])
    assert set(names[:4]) <= set(learned["held_out"])


def test_frames_of_one_file_are_held_out_together_and_count_as_one_case() -> None:
    series = [f"{number:032x}-frame{frame}" for number in range(15) for frame in range(3)]
    first = choose_held_out(series, {})
    files = {name.partition("-frame")[0] for name in first}
    assert len(files) == 5
    assert len(first) == 15
    trained = [name for name in series if name not in first]
    record = {"held_out": first, "train": trained}
    more = [trained[0].replace("frame0", "frame7"), first[0].replace("frame0", "frame7")]
    assert choose_held_out([*series, *more], record) == more[1:]


def test_frames_of_too_few_files_are_refused(model: Path, store: Path, tmp_path: Path) -> None:
    few = tmp_path / "few" / "phantom"
    for kind in ("scans", "landmarks"):
        (few / kind).mkdir(parents=True)
        for path in (store / kind).iterdir():
            name, suffix = path.name.split(".", 1)
            number = int(name.partition("-")[2]) - 9000
            shutil.copy(path, few / kind / f"{number // 4:032x}-frame{number % 4}.{suffix}")
    with pytest.raises(BadParameter, match=r"at least 5 cases .*; got 1: one in 3 of 16 kept"):
        hold_out(options(model, few, 1, 0), whole_cases(few), [])

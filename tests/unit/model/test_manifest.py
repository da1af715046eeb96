"""The manifest: what it takes, and what it says about what it refuses."""

from pathlib import Path
from typing import Any

import pytest

from app.errors import ModelRefused
from app.model.files import hash_file, read_file, read_text
from app.model.manifest import Manifest, read_manifest
from tests.support.model_folders import manifest_table, write_manifest


def read(folder: Path, table: dict[str, Any]) -> Manifest:
    folder.mkdir(exist_ok=True)
    write_manifest(folder, table)
    return read_manifest(folder)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "toy"


def test_smallest_manifest_is_read_with_its_defaults(folder: Path) -> None:
    manifest = read(folder, manifest_table())
    assert manifest.input.tile_overlap == 0.25
    assert manifest.network.output_stride == 1
    assert manifest.network.arguments["norm"] == ["INSTANCE", {"affine": True}]
    assert manifest.shape is None
    assert manifest.landmarks[0].region95_mm is None
    assert manifest.channels == (3, 9)


def test_softmax_has_one_score_more_than_landmarks(folder: Path) -> None:
    table = manifest_table(landmarks=5)
    table["network"]["activation"] = "softmax"
    assert read(folder, table).channels == (6, 15)


def test_heatmaps_have_no_offsets(folder: Path) -> None:
    table = manifest_table(landmarks=5)
    table["network"] |= {"output": "heatmaps", "activation": "softmax"}
    assert read(folder, table).channels == (6, 0)


COORDINATES: dict[str, object] = {"output": "coordinates", "activation": None}
WITH_PRESENCE: dict[str, object] = {"output": "coordinates", "coordinate_extras": ["presence"]}

OUTPUTS: list[tuple[dict[str, object], str]] = [
    ({"output": "masks"}, "network.output: Input should be 'votes', 'heatmaps' or 'coordinates'"),
    ({"activation": None}, "activation sigmoid or softmax with output 'votes', got no activation"),
    ({"activation": "none"}, "activation sigmoid or softmax with output 'votes', got none"),
    ({"heatmap_peak": 1.0}, "heatmap_peak with output 'heatmaps' only, got 'votes'"),
    ({"output": "heatmaps", "offset_unit": "mm"}, "offset_unit with output 'votes' only"),
    ({"output": "heatmaps", "coordinate_unit": "mm"}, "coordinate_unit with output 'coordinates'"),
    ({"output": "heatmaps", "heatmap_peak": 1.0}, "no heatmap_peak with activation sigmoid"),
    ({"output": "heatmaps", "activation": "spatial_softmax"}, "expected heatmap_peak with"),
    (
        {"output": "heatmaps", "activation": "spatial_softmax", "heatmap_peak": 0.1},
        "expected input.tile_shape 'whole' with spatial_softmax",
    ),
    ({**COORDINATES, "activation": "sigmoid"}, "where coordinate_extras has presence, and no"),
    ({**WITH_PRESENCE, "activation": "softmax"}, "expected activation none or sigmoid where"),
    ({**COORDINATES, "output_stride": 2}, "expected output_stride 1 with coordinates, got 2"),
    ({**COORDINATES, "coordinate_extras": ["log_variance"] * 2}, "coordinate_extras once"),
    (COORDINATES, "voting.radius_mm: expected none with network.output 'coordinates'"),
]


@pytest.mark.parametrize(("changes", "message"), OUTPUTS)
def test_keys_of_another_output_are_refused_by_name(
    folder: Path, changes: dict[str, object], message: str
) -> None:
    table = manifest_table()
    merged = table["network"] | changes
    table["network"] = {key: value for key, value in merged.items() if value is not None}
    with pytest.raises(ModelRefused) as refusal:
        read(folder, table)
    assert message in str(refusal.value)


REFUSALS: list[tuple[str, str, object, str]] = [
    ("", "schema", 2, "schema: Input should be 1, got 2"),
    ("", "name", "other", "name: expected the folder's name, got 'other'"),
    ("", "name", "Toy", "name: String should match pattern"),
    ("", "sample", "javascript:alert(1)", "sample: String should match pattern"),
    ("input", "orientation", "RAL", "one letter of each of LR, PA, IS, got 'RAL'"),
    ("input", "orientation", "ras", "one letter of each of LR, PA, IS, got 'ras'"),
    ("input", "orientation", "RA", "input.orientation: String should have at least 3 characters"),
    ("input", "spacing_mm", [1.0, 2.0, 0.0], "input.spacing_mm.2: Input should be greater than 0"),
    ("input", "tile_shape", [32, 24], "input.tile_shape"),
    ("input", "tile_shape", "half", "input.tile_shape: Input should be 'whole', got 'half'"),
    ("input", "divisor", 16, "expected multiples of 16 (input.divisor and network.output_stride)"),
    ("input", "tile_overlap", "0.25", "input.tile_overlap: Input should be a valid number"),
    (
        "input",
        "tile_overlp",
        0.25,
        "input: unknown key 'tile_overlp': did you mean 'tile_overlap'",
    ),
    ("", "licence", "MIT", "toy: unknown key 'licence': did you mean 'license'?"),
    ("", "landmarks", [{"name": "a", "miror": "b"}], "landmarks.0: unknown key 'miror': did you"),
    ("voting", "xyz", 1, "voting: unknown key 'xyz': expected one of threshold, radius_mm"),
    ("network", "sha256", None, "Field required (written by `landmarkd check FOLDER --write`)"),
    ("input", "intensity", {"method": "window", "lower": 2.0, "upper": 1.0}, "lower < upper"),
    (
        "input",
        "intensity",
        {"method": "percentile", "lower": 0.0, "upper": 101.0},
        "percentiles in [0, 100]",
    ),
    ("input", "intensity", {"method": "percentile"}, "input.intensity: expected lower, upper with"),
    ("network", "program", "network.onnx", "exactly one of architecture and program"),
    ("network", "weights", None, "expected weights with architecture"),
    ("network", "weights", "../weights.safetensors", "network.weights: String should match"),
    ("network", "architecture", "os.system", "network.architecture: String should match"),
    ("network", "sha256", "00", "network.sha256: String should match pattern"),
    ("network", "output_stride", 3, "multiples of 3 (input.divisor and network.output_stride)"),
    ("voting", "threshold", 1.0, "voting.threshold: Input should be less than 1, got 1.0"),
    ("voting", "radius_mm", None, "voting.radius_mm: Field required"),
    ("voting", "radius_mm", 0.01, "voting.radius_mm: expected 1 mm, the shortest edge of"),
    ("selfcheck", "input", "zeros", "selfcheck.input: String should match pattern"),
    ("selfcheck", "input", "phantom:7", "expected key 'tolerance_mm' with input phantom"),
    ("selfcheck", "expected", None, "expected key 'expected'"),
    ("voting", "round_in", "voxels", "voting.round_in: expected network.output 'heatmaps'"),
    ("input", "tile_layout", "monai", "input.tile_layout: expected 'monai' with network.output"),
]


@pytest.mark.parametrize(("section", "key", "value", "message"), REFUSALS)
def test_broken_key_is_refused_by_name(
    folder: Path, section: str, key: str, value: object, message: str
) -> None:
    table = manifest_table()
    target = table[section] if section else table
    target[key] = value
    if value is None:
        del target[key]
    with pytest.raises(ModelRefused) as refusal:
        read(folder, table)
    assert message in str(refusal.value)
    assert str(refusal.value).startswith("toy: ")
    assert str(folder.parent) not in str(refusal.value)


def test_every_broken_key_is_named_at_once(folder: Path) -> None:
    table = manifest_table()
    table["voting"] |= {"threshold": 2.0, "radius_mm": -1.0}
    with pytest.raises(ModelRefused, match=r"voting.threshold: .*; voting.radius_mm: "):
        read(folder, table)


def test_smoothing_of_old_manifests_is_read_and_said_to_have_no_effect(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "landmarkd.model")
    table = manifest_table()
    read(folder, table)
    assert not caplog.messages
    table["voting"]["smooth_mm"] = 0.3
    read(folder, table)
    assert caplog.messages == ["toy: voting.smooth_mm has no effect on landmarks; remove it"]
    table["voting"]["smooth_mm"] = -0.3
    with pytest.raises(ModelRefused, match=r"voting.smooth_mm: "):
        read(folder, table)


def test_landmark_names_occur_once(folder: Path) -> None:
    table = manifest_table()
    table["landmarks"][1]["name"] = "1"
    with pytest.raises(ModelRefused, match="every landmark name once"):
        read(folder, table)


def test_landmark_names_hold_no_line_breaks(folder: Path) -> None:
    table = manifest_table()
    table["landmarks"][1]["name"] = "two\nlines"
    with pytest.raises(ModelRefused, match=r"landmarks.1.name: String should match"):
        read(folder, table)


@pytest.mark.parametrize(("first", "second"), [("2", "3"), ("2", ""), ("9", "")])
def test_mirrors_name_each_other(folder: Path, first: str, second: str) -> None:
    table = manifest_table()
    table["landmarks"][0]["mirror"] = first
    table["landmarks"][1]["mirror"] = second
    with pytest.raises(ModelRefused, match="mirror of landmark '1': expected a landmark whose"):
        read(folder, table)


def test_mirror_pairs_are_taken(folder: Path) -> None:
    table = manifest_table()
    table["landmarks"][0]["mirror"] = "2"
    table["landmarks"][1]["mirror"] = "1"
    assert read(folder, table).landmarks[0].mirror == "2"


@pytest.mark.parametrize(
    ("section", "changes", "message"),
    [
        (
            "input",
            {"intensity": {"method": "zscore"}},
            "expected input.intensity.method percentile",
        ),
        ("network", COORDINATES, "expected a section shape with network.output 'coordinates'"),
    ],
)
def test_first_of_two_networks_gives_a_window_and_a_pose(
    folder: Path, section: str, changes: dict[str, object], message: str
) -> None:
    table = manifest_table()
    table["refine"] = {"folder": "inner", "sha256": "0" * 64}
    assert read(folder, table).refine is not None
    merged = table[section] | changes
    table[section] = {key: value for key, value in merged.items() if value is not None}
    if section == "network":
        del table["voting"]["radius_mm"]
    with pytest.raises(ModelRefused, match=f"refine: {message}"):
        read(folder, table)


def test_whole_model_needs_room_for_one_block(folder: Path) -> None:
    table = manifest_table()
    table["input"] |= {"tile_shape": "whole", "divisor": 16, "max_voxels": 4000}
    with pytest.raises(ModelRefused, match=r"room for one block of 16\^3 voxels, got 4000"):
        read(folder, table)


def test_whole_model_steps_by_divisor_and_stride(folder: Path) -> None:
    table = manifest_table()
    table["input"] |= {"tile_shape": "whole", "divisor": 6}
    table["network"]["output_stride"] = 4
    assert read(folder, table).tile_step == 12


def test_program_takes_no_arguments(folder: Path) -> None:
    table = manifest_table()
    del table["network"]["architecture"], table["network"]["weights"]
    table["network"]["program"] = "network.onnx"
    with pytest.raises(ModelRefused, match="no arguments with program"):
        read(folder, table)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"schema = ", "model.toml is not TOML"),
        (b"schema = " + b"1" * 5000, "model.toml is not TOML: Exceeds the limit"),
        (b"schema = " + b"[" * 50_000, "model.toml is not TOML"),
        (b"\xff\xfe", "expected UTF-8"),
        (b"schema = 1979-05-27", "expected no dates or times"),
    ],
)
def test_file_that_is_no_manifest_is_refused(folder: Path, content: bytes, message: str) -> None:
    folder.mkdir()
    (folder / "model.toml").write_bytes(content)
    with pytest.raises(ModelRefused, match=message):
        read_manifest(folder)


def test_mark_of_an_editor_before_the_text_is_passed_over(folder: Path) -> None:
    expected = read(folder, manifest_table())
    path = folder / "model.toml"
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert read_manifest(folder) == expected


def test_missing_manifest_is_refused(folder: Path) -> None:
    folder.mkdir()
    with pytest.raises(ModelRefused, match=r"toy: model.toml: expected a file 'model.toml'"):
        read_manifest(folder)


def test_link_out_of_the_folder_is_refused(folder: Path) -> None:
    folder.mkdir()
    (folder.parent / "secret").write_text("secret")
    (folder / "weights").symlink_to(folder.parent / "secret")
    with pytest.raises(ModelRefused, match=r"toy: network.weights: .* 'weights' leaves it"):
        read_file(folder, "network.weights", "weights")


def test_hash_names_key_expected_and_found(folder: Path) -> None:
    folder.mkdir()
    path = folder / "weights"
    path.write_text("abc")
    found = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert hash_file(path) == found
    assert read_file(folder, "network.weights", "weights", found) == b"abc"
    with pytest.raises(ModelRefused) as refusal:
        read_file(folder, "network.weights", "weights", "0" * 64)
    assert str(refusal.value) == f"toy: network.sha256: expected {'0' * 64}, weights has {found}"
    assert read_text(folder, "weights") == "abc"


@pytest.mark.parametrize(
    ("measurement", "message"),
    [
        ({"kind": "distance", "points": ["1"]}, "expected 2 points for distance, got 1"),
        ({"kind": "distance", "points": ["1", "nose"]}, "names of landmarks, got 'nose'"),
        ({"kind": "area", "points": ["1", "2"]}, "measurements.0.kind"),
        ({"kind": "plane_angle", "points": ["1"] * 6, "plane": "axial"}, "expected no plane"),
    ],
)
def test_a_measurement_that_cannot_be_made_is_refused(
    folder: Path, measurement: dict[str, Any], message: str
) -> None:
    table = manifest_table()
    table["measurements"] = [{"name": "width", **measurement}]
    with pytest.raises(ModelRefused, match=message):
        read(folder, table)


def test_measurements_have_names_of_their_own(folder: Path) -> None:
    table = manifest_table()
    width = {"name": "width", "kind": "distance", "points": ["1", "2"]}
    table["measurements"] = [width]
    assert read(folder, table).measurements[0].unit == "mm"
    table["measurements"] = [width, width]
    with pytest.raises(ModelRefused, match="every name of a measurement once"):
        read(folder, table)


@pytest.mark.parametrize(("beyond", "seen_from"), [("9", "1"), ("1", "9"), ("1", "1")])
def test_surroundings_lie_beyond_landmarks_of_the_model(
    folder: Path, beyond: str, seen_from: str
) -> None:
    table = manifest_table()
    place = {"beyond": beyond, "seen_from": seen_from, "mm": 20.0}
    table["shape"] = {
        "mean": "shape.safetensors", "sha256": "0" * 64, "tolerance_mm": 2.0,
        "surroundings": [place],
    }  # fmt: skip
    with pytest.raises(ModelRefused, match="surroundings: expected two landmarks of the model"):
        read(folder, table)
    place |= {"beyond": "2", "seen_from": "1"}
    assert read(folder, table).shape is not None

"""The files of the module for 3D Slicer."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from LandmarkdLib.answers import PlacedPoint, correct, summarise

from tests.support.answers import make_answer

EXTENSION = Path(__file__).resolve().parents[3] / "clients" / "slicer"
MODULE = EXTENSION / "Landmarkd"
SCRIPTS = sorted(MODULE.rglob("*.py"))
SLICERS_PYTHON = (3, 9)


def test_the_module_can_be_imported_by_a_python_that_has_nothing_else() -> None:
    command = [sys.executable, "-I", "-S", "-c"]
    program = f"import sys; sys.path.append({str(MODULE)!r}); import Landmarkd; print(*sys.modules)"
    done = subprocess.run([*command, program], capture_output=True, text=True, check=True)
    assert {"numpy", "httpx", "app"}.isdisjoint(done.stdout.split())


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_slicers_python_can_read_the_scripts(path: Path) -> None:
    ast.parse(path.read_text(encoding="utf-8"), feature_version=SLICERS_PYTHON)


def test_all_scripts_are_installed() -> None:
    listed = re.findall(r"^    (\S+\.py)$", (MODULE / "CMakeLists.txt").read_text(), re.MULTILINE)
    names = [name.replace("${MODULE_NAME}", MODULE.name) for name in listed]
    assert sorted(MODULE / name for name in names) == SCRIPTS
    assert f"add_subdirectory({MODULE.name})" in (EXTENSION / "CMakeLists.txt").read_text()


def test_measurements_and_warnings_are_told_with_what_was_found() -> None:
    lordosis = {"name": "lordosis", "value": 38.4321, "unit": "deg", "interval95": [30.71, 46.1]}
    answer = {
        "landmarks": [
            {"status": "detected"},
            {"status": "low_confidence"},
            {"status": "not_found"},
        ],
        "measurements": [
            lordosis,
            {"name": "ratio", "value": 0.5, "unit": "", "interval95": None},
            lordosis | {"value": None},
        ],
        "warnings": ["the units are missing"],
    }
    assert summarise(answer).splitlines() == [
        "2 of 3 landmarks found, 1 of them doubtful",
        "lordosis: 38.43 deg (30.71 to 46.1)",
        "ratio: 0.5",
        "the units are missing",
    ]


def test_point_that_was_moved_by_a_voxel_of_half_a_micrometre_was_placed_by_a_person() -> None:
    answer = make_answer("ab", np.full((2, 3), 0.1)).model_dump(mode="json")
    affine = np.diag([5e-4, 5e-4, 5e-4, 1.0]).tolist()
    answer["volume"] |= {"spacing_mm": [5e-4] * 3, "affine": affine}
    points = [PlacedPoint("a", (0.1005, 0.1, 0.1)), PlacedPoint("b", (0.1, 0.1, 0.1))]
    placed, left = correct(answer, points)["landmarks"]
    assert (placed["decided_by"], placed["ras_mm"]) == ("person", [0.1005, 0.1, 0.1])
    assert left == answer["landmarks"][1]

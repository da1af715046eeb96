"""``landmarkd learn --with``: what of old scans cannot be told from kept cases."""

import json
from pathlib import Path

import pytest
from rich.console import Console

from app.errors import BadParameter
from app.training.files import RECORD
from app.training.learn import LearnOptions, learn, remember_held_out
from app.training.recipe import Recipe
from app.training.record import Record
from tests.support.training_data import (
    make_affine,
    points_of,
    write_data,
    write_points,
    write_scan,
)


def test_an_old_scan_with_the_name_of_another_kept_case_is_refused_by_name(tmp_path: Path) -> None:
    """Its file was said to exist, and that it could not be read or written."""
    model, kept, old = tmp_path / "mine", write_data(tmp_path / "kept", 2), tmp_path / "old"
    for folder in (model, old / "scans", old / "landmarks"):
        folder.mkdir(parents=True)
    write_scan(old / "scans" / "s1.nii.gz", 9, make_affine(9))
    write_points(old, "s1", points_of(9))
    given = LearnOptions(model, kept, (old / "scans", old / "landmarks"), None, 1, 0.0, "cpu")
    with pytest.raises(BadParameter, match=r"--with: .*, got other scans named s1: rename"):
        learn(given, Console())


def test_what_was_held_out_stays_so_while_it_is_not_at_hand(tmp_path: Path) -> None:
    """A version learned without --with names the old scans that no later one may be trained on."""
    (tmp_path / RECORD).write_text(json.dumps({"held_out": ["old", "kept", "trained"]}))
    record = Record(Recipe(1.0, 5.0), ("a",), ("trained", "new"), ("kept", "more"), mirror=False)
    assert remember_held_out(record, tmp_path).held_out == ("kept", "more", "old")
    assert remember_held_out(record, tmp_path / "none") == record

"""An interrupted training resumes where it was, with what it was started with."""

import copy
import errno
import json
import os
import shutil
import signal
import threading
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from typer.testing import CliRunner

from app.cli.main import app
from app.errors import BadParameter, NetworkFailed, StartupError
from app.inference.load import load_checked
from app.io.slicer import read_landmarks
from app.training.cli.train import INTERRUPTED
from app.training.files import RECORD, REFINE
from app.training.fit import loop
from app.training.fit.checkpoint import resume, save
from app.training.fit.history import read_history
from app.training.fit.loop import graceful_interrupt, optimiser_step
from app.training.fit.network import normalise_channels_first
from app.training.record import read_record
from tests.support.full_disk import limited_files
from tests.support.training_data import (
    SMALL,
    TILES,
    interrupt_after,
    landmarkd,
    write_points,
    write_specimens,
)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_specimens(tmp_path_factory.mktemp("data"), "one", "two", "three")


def run(data: Path, output: Path, *words: object) -> str:
    """Train without validation; returns the output."""
    return landmarkd("train", *inputs(data, output), *TILES, "--validate", "none", *words)


def inputs(data: Path, output: Path) -> tuple[object, ...]:
    return data / "scans", data / "landmarks", "-o", output


def test_training_that_is_done_changes_nothing_and_keeps_what_people_wrote(
    data: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "mine"
    run(data, folder, "--steps", 1)
    manifest = folder / "model.toml"
    described = manifest.read_text().replace('description = ""', 'description = "bones"')
    manifest.write_text(described)
    first = (folder / "weights.safetensors").read_bytes()
    assert "all 1 steps are done" in run(data, folder, "--steps", 1)
    assert (folder / "weights.safetensors").read_bytes() == first
    assert load_checked(folder, torch.device("cpu")).manifest.description == "bones"


@pytest.mark.no_cover
def test_interrupted_training_resumes_to_the_same_weights_as_an_uninterrupted_one(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the whole history in one table."""
    plain, broken = tmp_path / "plain", tmp_path / "broken"
    run(data, plain, "--steps", 5)
    words = ("train", data / "scans", data / "landmarks", "-o", broken, *TILES)
    command = [str(word) for word in (*words, "--validate", "none", "--steps", 5)]
    with monkeypatch.context() as patch:
        interrupt_after(2, patch)
        result = CliRunner().invoke(app, command)
    assert result.exit_code == INTERRUPTED
    assert "the same command resumes from here" in " ".join(result.output.split())
    checked = CliRunner().invoke(app, ["check", str(broken)])
    assert checked.exit_code == 1
    assert "stands at step 2 of 5 and writes the model at step 5" in checked.output
    assert "resuming at step 2 of 5" in landmarkd(*command)
    assert [moment.step for moment in read_history(broken, 5)] == [2, 5]
    weights = [load_file(folder / "weights.safetensors") for folder in (plain, broken)]
    for name, tensor in weights[0].items():
        assert torch.equal(weights[1][name], tensor), name


def test_an_interrupt_at_any_moment_of_a_step_is_saved(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One between two looks at it said that the training resumes from there, and saved nothing."""

    class Late(threading.Event):
        looks = 0

        def is_set(self) -> bool:
            self.looks += 1
            return self.looks > 1

    monkeypatch.setattr(loop, "graceful_interrupt", lambda: nullcontext(Late()))
    words = ("train", *inputs(data, tmp_path / "mine"), *TILES, "--steps", 5)
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == INTERRUPTED
    (last,) = read_history(tmp_path / "mine", 5)
    assert torch.load(tmp_path / "mine" / "checkpoint.pt")["step"] == last.step


def test_a_finished_training_whose_model_was_not_written_writes_it(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "mine"

    def fill_the_disk(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(loop, "write_model_folder", fill_the_disk)
        with pytest.raises(OSError, match="No space"):
            run(data, folder, "--steps", 1)
    assert not (folder / "model.toml").exists()
    assert "all 1 steps are done" in run(data, folder, "--steps", 1)
    assert load_checked(folder, torch.device("cpu")).manifest.name == "mine"


def test_a_checkpoint_that_the_disk_does_not_take_leaves_the_one_before_and_says_why(
    tmp_path: Path,
) -> None:
    """A limit on the size of files stands for a full disk: the system refuses to write more."""
    save(tmp_path, {"network": nn.Linear(2, 2)}, 1, exported=False)
    with limited_files(50_000), pytest.raises(OSError, match="File too large"):
        save(tmp_path, {"network": nn.Linear(200, 200)}, 2, exported=False)
    assert resume(tmp_path, {"network": nn.Linear(2, 2)}) == (1, False)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint.pt"]


def test_a_resumed_training_keeps_its_choices(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Options that are left open are those that the training was started with."""
    folder = tmp_path / "mine"
    words = (
        "train",
        data / "scans",
        data / "landmarks",
        "-o",
        folder,
        "--filters",
        "4,4,8",
        "--tile",
        16,
    )
    with monkeypatch.context() as patch:
        interrupt_after(1, patch)
        chosen = ("--steps", "2", "--validate", "two", "--spacing", "1.5", "--device", "cpu")
        rule = ("--intensity", "window:0,900", "--precision", "bfloat16")
        CliRunner().invoke(app, [str(word) for word in (*words, *chosen, *rule)])
    before = read_record(folder)
    landmarkd(*words, "--steps", 2, "--device", "cpu")
    assert read_record(folder) == before
    assert before["held_out"] == ["two"]


def test_training_that_was_begun_with_another_stride_is_resumed_with_it(
    data: Path, tmp_path: Path
) -> None:
    """No option names it any more."""
    folder = tmp_path / "mine"
    run(data, folder)
    text = (folder / RECORD).read_text()
    assert '"stride": 2' in text
    (folder / RECORD).write_text(text.replace('"stride": 2', '"stride": 1'))
    assert "all 1 steps are done" in run(data, folder)


@pytest.mark.no_cover
def test_checkpoint_of_another_training_is_refused_by_name(data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    run(data, folder, "--steps", 1, "--validate", "two")
    message = r"steps: expected 1, got 2.*choose another folder or delete .*mine$"
    with pytest.raises(StartupError, match=message):
        run(data, folder, "--steps", 2)
    with pytest.raises(StartupError, match="held_out: expected the same, got it without two"):
        run(data, folder, "--steps", 1, "--validate", "none")
    with pytest.raises(BadParameter, match=r"--train-only: expected none .* held out, got two"):
        landmarkd("train", *inputs(data, folder), *TILES, "--train-only", "two")
    finer = ("refine", folder, data / "scans", data / "landmarks", *SMALL, "--spacing", 1.0)
    landmarkd(*finer)
    for path, words in ((folder / REFINE, finer), (folder, ("train", *inputs(data, folder)))):
        (path / RECORD).write_text('{"held_out": []}')
        with pytest.raises(
            StartupError, match=rf"expected {path / RECORD} as .* got KeyError: 'recipe'"
        ):
            landmarkd(*words)
    shutil.rmtree(folder)
    run(data, folder, "--steps", 2)


def test_landmarks_that_were_corrected_are_not_taken_for_learned(
    data: Path, tmp_path: Path
) -> None:
    folder, changed = tmp_path / "mine", tmp_path / "changed"
    run(data, folder, "--steps", 1)
    shutil.copytree(data, changed)
    points = read_landmarks(changed / "landmarks" / "two.csv")
    (changed / "landmarks" / "two.csv").unlink()
    write_points(changed, "two", {name: np.array(point) + 0.5 for name, point in points.items()})
    with pytest.raises(StartupError, match=r"expected the same scans .*, got others of two"):
        run(changed, folder, "--steps", 1)
    assert "all 1 steps are done" in run(data, folder, "--steps", 1)


def test_a_landmark_that_was_marked_as_absent_since_is_not_taken_for_learned(
    data: Path, tmp_path: Path
) -> None:
    """Of one that a file does not list nothing was learned, not even that it is not there."""
    folder, changed = tmp_path / "mine", tmp_path / "changed"
    shutil.copytree(data, changed)
    file = changed / "landmarks" / "two.csv"
    points = {name: np.array(point) for name, point in read_landmarks(file).items()}
    file.unlink()
    unlisted = {name: point for name, point in points.items() if name != "e"}
    write_points(changed, "two", unlisted)
    run(changed, folder, "--steps", 1)
    write_points(changed, "two", points)
    marked = json.loads((changed / "landmarks" / "two.mrk.json").read_text())
    marked["markups"][0]["controlPoints"][-1]["positionStatus"] = "missing"
    (changed / "landmarks" / "two.mrk.json").write_text(json.dumps(marked))
    with pytest.raises(StartupError, match=r"expected the same scans .*, got others of two"):
        run(changed, folder, "--steps", 1)
    write_points(changed, "two", unlisted)
    assert "all 1 steps are done" in run(changed, folder, "--steps", 1)


def test_training_in_bfloat16_writes_finite_weights(data: Path, tmp_path: Path) -> None:
    for precision in ("float32", "bfloat16"):
        run(data, tmp_path / precision, "--steps", 2, "--precision", precision)
    exact = load_file(tmp_path / "float32" / "weights.safetensors")
    rounded = load_file(tmp_path / "bfloat16" / "weights.safetensors")
    assert any(not torch.equal(exact[name], rounded[name]) for name in exact)
    assert all(tensor.isfinite().all() for tensor in rounded.values())


@pytest.mark.no_cover
def test_a_held_out_scan_that_the_model_does_not_answer_is_named_and_ends_no_training(
    data: Path, tmp_path: Path
) -> None:
    """It ended each training at its first export, and each that was resumed at the next one."""
    words = (*SMALL, "--tile", "whole", "--spacing", 0.1, "--validate", "one")
    said = landmarkd("train", *inputs(data, tmp_path / "mine"), *words)
    assert "one: expected a scan that spans, padded, about 25 mm" in said
    assert "step 1: saved (no held-out scan was answered, so no error)" in said
    assert "all 1 steps are done" in landmarkd("train", *inputs(data, tmp_path / "mine"), *words)


def test_tiles_of_one_voxel_at_the_coarsest_level_are_trained_on(
    data: Path, tmp_path: Path
) -> None:
    """What one image takes was estimated from one, in which norms have one value in each group."""
    sizes = ("--filters", "4,4,4,4", "--tile", 16, "--spacing", 1.5, "--device", "cpu")
    words = (*sizes, "--steps", 1, "--validate", "none")
    said = landmarkd("train", *inputs(data, tmp_path / "mine"), *words)
    assert "step 1: " in said


def test_step_whose_gradients_are_not_finite_changes_no_weight() -> None:
    network = torch.nn.Linear(2, 1)
    optimiser = torch.optim.SGD(network.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimiser)
    for value, is_same in ((1.0, False), (torch.inf, True)):
        before = network.weight.detach().clone()
        network(torch.tensor([value, 1.0])).sum().backward()
        optimiser_step(network, optimiser, schedule)
        assert torch.equal(network.weight, before) == is_same


def test_training_that_diverged_says_so_and_writes_no_model(data: Path, tmp_path: Path) -> None:
    """Its weights no longer change, and would replace those that were written before."""
    message = r"diverged: expected finite .* the 50 steps up to 5\d of 60; .* --rate than 1e\+08"
    with pytest.raises(NetworkFailed, match=message):
        run(data, tmp_path / "mine", "--steps", 60, "--rate", 1e8)
    assert not (tmp_path / "mine" / "weights.safetensors").exists()


def test_second_interrupt_does_not_wait() -> None:
    """Whoever presses Ctrl-C twice means it."""
    # What a shell starts in the background is born deaf to it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with graceful_interrupt() as stop:
            os.kill(os.getpid(), signal.SIGINT)
            assert stop.wait(timeout=10)
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


def test_norms_with_channels_first_compute_the_same() -> None:
    plain = nn.Sequential(nn.Conv3d(1, 8, 3), nn.GroupNorm(4, 8), nn.Conv3d(8, 2, 3))
    changed = copy.deepcopy(plain)
    normalise_channels_first(changed)
    image = torch.randn(2, 1, 9, 9, 9).contiguous(memory_format=torch.channels_last_3d)
    for network in (plain, changed):
        network(image).square().sum().backward()
    torch.testing.assert_close(changed(image), plain(image))
    for one, other in zip(changed.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-4)

"""Precision: chosen by measurement, and only if the network answers in it as it should."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from app.compute.device import fast_precisions
from app.errors import ModelRefused
from app.inference.detector import Detector
from app.inference.load import check_again, load_checked
from app.model.loader import load_module
from app.model.manifest import Manifest, read_manifest
from app.model.network import Network
from app.model.precision import (
    check_agreement,
    choose_precision,
    compare_precisions,
    settle_precision,
    time_tile,
)
from app.model.selfcheck import check, make_noise, write_selfcheck
from tests.support.device_loops import scan
from tests.support.model_folders import TILE, make_model_folder
from tests.unit.model.test_selfcheck import Changed

CPU = torch.device("cpu")
FAST_HOST = bool(fast_precisions(CPU))


class Rounded(Changed):
    """Answers a network's answer in float32, and another one in any lower precision."""

    def forward(self, tiles: Tensor) -> Tensor:
        answer: Tensor = self.network(tiles)
        return answer if answer.dtype == torch.float32 else answer * self.factor


def sound(_name: str) -> bool:
    return True


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ({"float32": 1.0}, "float32"),
        ({"float32": 1.0, "bfloat16": 0.5, "float16": 0.6}, "bfloat16"),
        ({"float32": 1.0, "bfloat16": 0.6, "float16": 0.5}, "float16"),
        ({"float32": 1.0, "bfloat16": 0.96}, "float32"),
        ({"float32": 1.0, "bfloat16": 0.95}, "bfloat16"),
        ({"float32": 1.0, "bfloat16": 2.0, "float16": 3.0}, "float32"),
    ],
)
def test_fastest_precision_that_gains_something_is_chosen(
    seconds: dict[str, float], expected: str
) -> None:
    assert choose_precision(seconds, sound) == expected


def test_next_fastest_is_chosen_where_the_fastest_is_unsound() -> None:
    asked: list[str] = []

    def only_bfloat16(name: str) -> bool:
        asked.append(name)
        return name == "bfloat16"

    seconds = {"float32": 1.0, "bfloat16": 0.6, "float16": 0.5}
    assert choose_precision(seconds, only_bfloat16) == "bfloat16"
    assert asked == ["float16", "bfloat16"]


def test_float32_stays_where_nothing_lower_is_sound_and_slow_ones_are_not_even_tried() -> None:
    asked: list[str] = []

    def unsound(name: str) -> bool:
        asked.append(name)
        return False

    assert choose_precision({"float32": 1.0, "bfloat16": 0.5, "float16": 2.0}, unsound) == "float32"
    assert asked == ["bfloat16"]


@pytest.mark.skipif(FAST_HOST, reason="this CPU has a fast lower precision")
def test_nothing_is_measured_where_no_lower_precision_is_fast(tmp_path: Path) -> None:
    model = load_checked(make_model_folder(tmp_path), CPU, "auto")
    assert model.timings == ()
    assert model.network.precision == "float32"


def network_of(folder: Path, factor: float | None = None) -> tuple[Manifest, Network]:
    manifest = read_manifest(folder)
    module = load_module(folder, manifest)
    changed = module if factor is None else Rounded(module, factor)
    return manifest, Network(manifest, changed, CPU)


def test_measuring_times_every_precision_and_keeps_one_that_passes(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path)
    manifest, network = network_of(folder)
    verified: list[str] = []

    def verify(tried: Network) -> None:
        verified.append(tried.precision)
        check(folder, manifest, tried)

    chosen, timings = compare_precisions(manifest, network, ("bfloat16",), verify)
    assert [one.precision for one in timings] == ["float32", "bfloat16"]
    assert [one.precision for one in timings if one.chosen] == [chosen.precision]
    assert all(one.seconds > 0 for one in timings)
    # Whichever is faster on this machine: nothing lower serves without its self-check.
    assert chosen.precision == "float32" or chosen.precision in verified


def test_precision_that_the_network_cannot_compute_in_is_left_out(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path)
    manifest = read_manifest(folder)

    class Picky(nn.Module):
        def __init__(self, network: nn.Module) -> None:
            super().__init__()
            self.network = network

        def forward(self, tiles: Tensor) -> Tensor:
            answer: Tensor = self.network(tiles)
            if answer.dtype != torch.float32:
                raise ValueError("not implemented")
            return answer

    network = Network(manifest, Picky(load_module(folder, manifest)), CPU)
    chosen, timings = compare_precisions(manifest, network, ("bfloat16",), lambda _network: None)
    assert chosen.precision == "float32"
    assert [one.precision for one in timings] == ["float32"]


def test_answers_of_both_precisions_are_compared(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path)
    manifest, network = network_of(folder)
    check_agreement(manifest, network, network.computing_in(torch.bfloat16))
    for factor in (1.05, float("nan")):
        manifest, network = network_of(folder, factor)
        with pytest.raises(ModelRefused, match=r"expected scores within 0.02 of those in float32"):
            check_agreement(manifest, network, network.computing_in(torch.bfloat16))


def test_precision_that_is_set_and_fails_the_self_check_refuses_the_model(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path)
    manifest, network = network_of(folder, 1.05)

    def verify(tried: Network) -> None:
        check(folder, manifest, tried)

    settle_precision(manifest, network, "float32", verify)
    message = r"toy: precision: .* in bfloat16, which was asked for; got: toy: selfcheck: expected"
    with pytest.raises(ModelRefused, match=message):
        settle_precision(manifest, network, "bfloat16", verify)


def test_timing_counts_the_median_and_needs_no_batch(tmp_path: Path) -> None:
    manifest, network = network_of(make_model_folder(tmp_path))
    assert 0 < time_tile(network, make_noise(manifest, 3)[None]) < 10


def test_model_set_to_bfloat16_finds_its_landmarks_and_passes_its_check_again(
    tmp_path: Path,
) -> None:
    folder = make_model_folder(tmp_path, voting={"threshold": 0.45})
    exact = load_checked(folder, CPU)
    lower = load_checked(folder, CPU, "bfloat16")
    assert lower.network.precision == "bfloat16"
    assert lower.digest == exact.digest
    check_again(folder, lower)
    one, other = (Detector(model).detect(scan(1)) for model in (exact, lower))
    assert len(one.landmarks) == len(other.landmarks) == 3


def test_second_network_follows_the_precision_of_the_setting(tmp_path: Path) -> None:
    shape = {"mean": "shape.safetensors", "tolerance_mm": 2.0}
    folder = make_model_folder(tmp_path, "coarse", shape=shape)
    make_model_folder(folder, "fine", shape=shape, input={"tile_shape": list(TILE)})
    with (folder / "model.toml").open("a") as file:
        file.write('\n[refine]\nfolder = "fine"\n')
    write_selfcheck(folder)
    model = load_checked(folder, CPU, "bfloat16")
    assert model.refine is not None
    assert model.refine.network.precision == model.network.precision == "bfloat16"

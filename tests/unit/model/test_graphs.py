"""Passes on CUDA as graphs: the same bits, in memory of their own, whatever else goes on."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from app.compute import CopyStreams
from app.model import graphs
from app.model.graphs import USES, CudaGraphs

CUDA = torch.device("cuda", 0)
SHAPES = ((1, 1, 16, 24, 8), (3, 1, 8, 8, 8))

pytestmark = pytest.mark.gpu


class Counted(nn.Module):
    """A network that counts how often its Python code has run."""

    def __init__(self, look: Callable[[Tensor], Tensor] = Tensor.abs) -> None:
        super().__init__()
        torch.manual_seed(4)
        layers = nn.Sequential(
            nn.Conv3d(1, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv3d(8, 5, 2, 2)
        )
        self.layers = layers.to(CUDA, memory_format=torch.channels_last_3d)  # type: ignore[call-overload]
        self.look = look
        self.count = 0

    @torch.inference_mode()
    def forward(self, tiles: Tensor) -> Tensor:
        self.count += 1
        return self.look(self.layers(tiles))


def tiles_of(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)).to(CUDA)


def captured(network: Counted, shape: tuple[int, ...] = SHAPES[0]) -> Callable[[Tensor], Tensor]:
    """Capture a pass of a network."""
    passes = partial(CudaGraphs(), network)
    for seed in range(USES):
        passes(tiles_of(shape, seed))
    return passes


def test_graphs_give_what_the_kernels_do_one_by_one() -> None:
    network = Counted()
    passes = partial(CudaGraphs(), network)
    answers = []
    for seed in range(2 * USES):
        for shape in SHAPES:
            tiles = tiles_of(shape, seed)
            answers.append((passes(tiles), network.layers(tiles).abs().detach()))
    # Each of the first passes of a shape runs, and the last of them once more, to be captured.
    assert network.count == (USES + 1) * len(SHAPES)
    for answer, expected in answers:  # None was overwritten by a later one.
        assert torch.equal(answer, expected)
        assert answer.stride() == expected.stride()


def test_threads_that_share_a_network_have_their_own_answers() -> None:
    network = Counted()
    passes = captured(network)
    count = network.count

    def run(seed: int) -> bool:
        tiles = tiles_of(SHAPES[0], seed)
        return torch.equal(passes(tiles), network.layers(tiles).abs())

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(run, range(200)))
    assert network.count == count
    with torch.cuda.stream(torch.cuda.Stream(CUDA)):  # No graph is replayed on two streams at once.
        assert run(7)
    assert network.count == count + 1


def test_what_other_threads_do_meanwhile_is_theirs() -> None:
    """Torch gives one of 32 streams again and again, to captures and to host threads."""
    end, wrong = threading.Event(), []

    def upload() -> None:
        copies, seed = CopyStreams(CUDA), 0
        while not end.is_set():
            seed += 1
            with copies.use():
                values = tiles_of(SHAPES[0], seed)
                if float(values.mul(2).sum()) != float(tiles_of(SHAPES[0], seed).sum() * 2):
                    wrong.append(seed)

    threads = [threading.Thread(target=upload) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(40):
            network = Counted()
            passes = captured(network)
            tiles = tiles_of(SHAPES[0], 9)
            assert torch.equal(passes(tiles), network.layers(tiles).abs())
            assert network.count == USES + 1
    finally:
        end.set()
        for thread in threads:
            thread.join()
    assert not wrong


def test_a_network_that_looks_at_its_values_is_run_as_it_is() -> None:
    network = Counted(lambda answer: answer * float(answer.mean()))
    passes = captured(network)
    for seed in range(3):
        tiles = tiles_of(SHAPES[0], seed)
        before = network.count
        assert torch.equal(passes(tiles), network(tiles))
        assert network.count == before + 2
    # Memory that two streams have used is still let go of, and random numbers are still made.
    torch.cuda.synchronize()
    active = torch.cuda.memory_stats()["active_bytes.all.current"]
    for _ in range(20):
        values = torch.zeros(1 << 20, device=CUDA)
        values.record_stream(torch.cuda.Stream(CUDA))
        del values
    torch.cuda.synchronize()
    torch.zeros(1, device=CUDA)
    assert torch.cuda.memory_stats()["active_bytes.all.current"] <= active + (1 << 12)
    assert 0 <= float(torch.rand(1, device=CUDA)) < 1


def test_a_network_that_answers_by_chance_is_run_as_it_is() -> None:
    network = Counted(lambda answer: answer + torch.rand_like(answer))
    passes = captured(network)
    before = network.count
    passes(tiles_of(SHAPES[0], 1))
    assert network.count == before + 1


def test_all_graphs_are_let_go_of_where_shapes_are_too_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(graphs, "MAX_SHAPES", 2)
    network = Counted()
    first, second, third = ((n, 1, 8, 8, 8) for n in (1, 2, 3))
    passes = captured(network, first)
    for shape, runs in ((first, 0), (second, 1), (first, 0), (third, 1), (first, 1)):
        before = network.count
        passes(tiles_of(shape, 1))
        assert network.count == before + runs

"""Passes on CUDA as graphs: the same bits, of memory of their own, and whatever a network does."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn

from app.model import graphs
from app.model.graphs import MAX_FAILURES, Graphs

CUDA = torch.device("cuda", 0)
SHAPES = ((1, 1, 16, 24, 8), (3, 1, 8, 8, 8))


class Counted(nn.Module):
    """A network that counts how often its Python code has run."""

    def __init__(self, device: torch.device, look: Callable[[Tensor], Tensor] = Tensor.abs) -> None:
        super().__init__()
        torch.manual_seed(4)
        layers = nn.Sequential(
            nn.Conv3d(1, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv3d(8, 5, 2, 2)
        )
        self.layers = layers.to(device, memory_format=torch.channels_last_3d)  # type: ignore[call-overload]
        self.look = look
        self.count = 0

    @torch.inference_mode()
    def forward(self, tiles: Tensor) -> Tensor:
        self.count += 1
        return self.look(self.layers(tiles))


def tiles_of(shape: tuple[int, ...], seed: int, device: torch.device = CUDA) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.rand(shape, generator=random).to(device)


def test_passes_on_the_host_are_run_as_they_are() -> None:
    network = Counted(torch.device("cpu"))
    passes = Graphs(network)
    tiles = tiles_of(SHAPES[0], 1, torch.device("cpu"))
    for count in range(1, 5):
        assert torch.equal(passes(tiles), Counted(torch.device("cpu"))(tiles))
        assert network.count == count


@pytest.mark.gpu
def test_graphs_give_what_the_kernels_do_one_by_one() -> None:
    network = Counted(CUDA)
    passes = Graphs(network)
    answers = []
    for seed in range(6):
        for shape in SHAPES:
            tiles = tiles_of(shape, seed)
            answers.append((passes(tiles), network.layers(tiles).abs().detach()))
    # The first pass of a shape runs, and the second one runs and is captured.
    assert network.count == 3 * len(SHAPES)
    for answer, expected in answers:  # None was overwritten by a later one.
        assert torch.equal(answer, expected)
        assert answer.stride() == expected.stride()


@pytest.mark.gpu
def test_threads_that_share_a_network_have_their_own_answers() -> None:
    network = Counted(CUDA)
    passes = Graphs(network)
    for seed in (1, 2):
        passes(tiles_of(SHAPES[0], seed))

    def run(seed: int) -> bool:
        tiles = tiles_of(SHAPES[0], seed)
        return torch.equal(passes(tiles), network.layers(tiles).abs())

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(run, range(200)))
    assert network.count == 3
    with torch.cuda.stream(torch.cuda.Stream(CUDA)):  # No graph is replayed on two streams at once.
        assert run(7)
    assert network.count == 4


@pytest.mark.gpu
def test_a_network_that_looks_at_its_values_is_run_as_it_is() -> None:
    network = Counted(CUDA, lambda answer: answer * float(answer.mean()))
    passes = Graphs(network)
    for seed in range(3 * MAX_FAILURES):
        tiles = tiles_of(SHAPES[0], seed)
        assert torch.equal(passes(tiles), network(tiles))
    before = network.count
    passes(tiles_of(SHAPES[0], 1))
    assert network.count == before + 1
    # Memory that two streams have used is still let go of.
    torch.cuda.synchronize()
    allocated = torch.cuda.memory_allocated()
    for _ in range(20):
        values = torch.zeros(1 << 20, device=CUDA)
        values.record_stream(torch.cuda.Stream(CUDA))
        del values
    torch.cuda.synchronize()
    torch.zeros(1, device=CUDA)
    assert torch.cuda.memory_allocated() == allocated
    assert 0 <= float(torch.rand(1, device=CUDA)) < 1  # Random numbers are, too.


@pytest.mark.gpu
def test_a_network_that_answers_by_chance_is_run_as_it_is() -> None:
    network = Counted(CUDA, lambda answer: answer + torch.rand_like(answer))
    passes = Graphs(network)
    for seed in range(2 * MAX_FAILURES):
        passes(tiles_of(SHAPES[0], seed))
    before = network.count
    passes(tiles_of(SHAPES[0], 1))
    assert network.count == before + 1


@pytest.mark.gpu
def test_shapes_used_longest_ago_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "MAX_GRAPHS", 2)
    network = Counted(CUDA)
    passes = Graphs(network)
    first, second, third = ((n, 1, 8, 8, 8) for n in (1, 2, 3))
    for shape in (first, first, second, second, first, third):
        passes(tiles_of(shape, 1))
    before = network.count
    passes(tiles_of(first, 2))
    assert network.count == before
    passes(tiles_of(second, 2))
    assert network.count == before + 1
    passes.clear()
    passes(tiles_of(first, 3))
    assert network.count == before + 2

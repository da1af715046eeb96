"""Damaged files of every format but NIfTI: a valid volume or a named error, in bounded memory."""

import re
import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest

from app.errors import RequestError
from app.io.volume import check_header, read_volume
from tests.benchmarks.mutations import mutate
from tests.support.nifti_files import LARGE_ENOUGH, assert_fit_for_use, counting
from tests.support.scan_files import as_metaimage, as_nrrd

FEW, MANY = 300, 5000

MEMORY_BYTES = 8 << 20
"""At most, for files of a few kilobytes whatever they claim."""

FRAMES = np.stack([counting(), counting() + 1], axis=3)

NRRDS = (
    as_nrrd(),
    as_nrrd(counting(dtype="float32"), encoding="gzip", space="right-anterior-superior"),
    as_nrrd(counting(dtype="uint8"), endian="big"),
)
METAIMAGES = (
    as_metaimage(),
    as_metaimage(counting(dtype="float64"), zipped=True),
    as_metaimage(FRAMES),
)

FORMATS: dict[str, Callable[[int], bytes]] = {
    "nrrd": lambda seed: mutate(NRRDS, seed).content,
    "metaimage": lambda seed: mutate(METAIMAGES, seed).content,
}


def check_damaged(content: bytes, seed: int) -> None:
    try:
        check_header(content, LARGE_ENOUGH)
        volume = read_volume(content, LARGE_ENOUGH, frame=seed % 2 or None)
    except RequestError as error:
        said = str(error)
    else:
        assert_fit_for_use(volume)
        said = "expected nothing else, got it"
    assert re.match(r"expected .*, got ", said), seed


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    "seeds", [range(FEW), pytest.param(range(FEW, MANY), marks=pytest.mark.slow)], ids=len
)
def test_damage_gives_a_valid_volume_or_a_named_error(name: str, seeds: range) -> None:
    for seed in seeds:
        content = FORMATS[name](seed)
        tracemalloc.start()
        try:
            check_damaged(content, seed)
            assert tracemalloc.get_traced_memory()[1] < MEMORY_BYTES, seed
        finally:
            tracemalloc.stop()

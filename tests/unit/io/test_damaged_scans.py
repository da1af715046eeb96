"""Damaged files of all formats but NIfTI: a valid volume or a named error, in bounded memory."""

import re
import tracemalloc
import zipfile
from collections.abc import Callable

import numpy as np
import pytest
from pydicom.uid import ExplicitVRBigEndian, ImplicitVRLittleEndian, JPEG2000Lossless, RLELossless

from app.errors import RequestError
from app.io.volume import Selection, check_header, read_volume
from tests.benchmarks.mutations import mutate
from tests.support.dicom_files import (
    as_dicom,
    as_enhanced,
    compressed,
    jpeg2000,
    packed_bits,
    zipped,
)
from tests.support.nifti_files import LARGE_ENOUGH, assert_fit_for_use, counting
from tests.support.scan_files import as_metaimage, as_mgh, as_nrrd

FEW, PART, MANY = 250, 950, 5000

MEMORY_BYTES = 8 << 20
"""At most, for files of a few kilobytes whatever they claim."""

HEAD_BYTES = 1200
"""Of a DICOM file, before its pixels."""

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
MGHS = (as_mgh(), as_mgh(FRAMES), as_mgh(counting(dtype="float32"), zipped=True))

DICOM = as_dicom(counting(dtype="uint16"), RescaleSlope="2")
DICOMS = (
    *DICOM,
    as_enhanced(),
    *as_dicom(syntax=ImplicitVRLittleEndian)[:1],
    *as_dicom(syntax=ExplicitVRBigEndian)[:1],
    compressed(DICOM[0], JPEG2000Lossless, jpeg2000),
    compressed(DICOM[0], RLELossless, packed_bits),
)
ARCHIVES = (zipped(DICOM), zipped(DICOM, zipfile.ZIP_STORED))


def damaged_series(seed: int) -> bytes:
    """Damage one file of a series before it is packed, as only that goes past the checksums."""
    files = list(DICOM)
    files[seed % len(files)] = mutate(DICOMS, seed, head=HEAD_BYTES).content
    return zipped(files, zipfile.ZIP_STORED)


FORMATS: dict[str, Callable[[int], bytes]] = {
    "nrrd": lambda seed: mutate(NRRDS, seed).content,
    "metaimage": lambda seed: mutate(METAIMAGES, seed).content,
    "mgh": lambda seed: mutate(MGHS, seed).content,
    "dicom": lambda seed: mutate(DICOMS, seed, head=HEAD_BYTES).content,
    "dicom series": damaged_series,
    "zip": lambda seed: mutate(ARCHIVES, seed, head=len(ARCHIVES[0])).content,
}


def check_damaged(content: bytes, seed: int) -> None:
    try:
        check_header(content, LARGE_ENOUGH)
        volume = read_volume(content, LARGE_ENOUGH, selection=Selection(frame=seed % 2 or None))
    except RequestError as error:
        said = str(error)
    else:
        assert_fit_for_use(volume)
        said = "expected nothing else, got it"
    assert re.match(r"expected .*, got ", said), seed


@pytest.mark.no_cover
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    "seeds",
    [
        range(FEW),
        *(
            pytest.param(range(start, start + PART), marks=pytest.mark.slow)
            for start in range(FEW, MANY, PART)
        ),
    ],
    ids=str,
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

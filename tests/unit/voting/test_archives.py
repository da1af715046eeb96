"""Archives: what safetensors and npz files hold is read; what they could do is not done."""

import io
import json
import pickle
import struct
import tracemalloc
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from safetensors.torch import save

from app.errors import BadArrays, BrokenArchive, NotAnArchive, RequestError, TooLarge
from app.voting.archives import HEADER_BYTES, NAMES, count_array_bytes, read_archive
from tests.support.vote_archives import OBLIQUE, laid_out, make_output, npz, safetensors

MOST = 1 << 20
SMALL = np.arange(24, dtype=np.float32).reshape(2, 3, 4)


def npy(array: NDArray[np.generic], version: tuple[int, int] = (1, 0)) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array(file, array, version)
    return file.getvalue()


def zipped(*files: tuple[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as archive:
        for name, content in files:
            archive.writestr(name, content)
    return file.getvalue()


def headed(header: str) -> bytes:
    """Make an npz file of one array with this header and 96 bytes of numbers."""
    text = header.encode()
    content = b"\x93NUMPY\1\0" + struct.pack("<H", len(text)) + text + SMALL.tobytes()
    return zipped(("probs.npy", content))


def declaring(shape: str = "(2, 3, 4)", descr: str = "<f4") -> str:
    return f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}\n"


@pytest.mark.parametrize("compressed", [True, False])
@pytest.mark.parametrize("dtype", ["<f2", "<f4", "<f8", ">f2", ">f4", ">f8"])
def test_npz_is_read_as_numpy_reads_it(dtype: str, compressed: bool) -> None:
    array = SMALL.astype(dtype)
    archive = read_archive(npz({"scores": array}, compressed=compressed), MOST)
    assert archive.probs is archive.offsets is archive.affine is None
    assert archive.scores is not None
    native = array.astype(array.dtype.newbyteorder("="))
    assert torch.equal(archive.scores, torch.from_numpy(native))


def test_fortran_order_is_kept_as_strides() -> None:
    archive = read_archive(npz({"probs": np.asfortranarray(SMALL)}), MOST)
    assert archive.probs is not None
    assert archive.probs.stride() == (1, 2, 6)
    assert torch.equal(archive.probs, torch.from_numpy(SMALL))


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
def test_every_version_of_npy_is_read(version: tuple[int, int]) -> None:
    archive = read_archive(zipped(("probs.npy", npy(SMALL, version))), MOST)
    assert archive.probs is not None
    assert torch.equal(archive.probs, torch.from_numpy(SMALL))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_safetensors_is_read_in_every_type(dtype: torch.dtype) -> None:
    archive = read_archive(safetensors({"offsets": SMALL}, dtype), MOST)
    assert archive.offsets is not None
    assert torch.equal(archive.offsets, torch.from_numpy(SMALL).to(dtype))


@pytest.mark.parametrize("dtype", [np.float32, np.int64, np.uint16, np.uint64, np.int8])
def test_affine_may_be_whole_numbers(dtype: type[np.generic]) -> None:
    affine = np.diag([2, 3, 4, 1]).astype(dtype)
    archive = read_archive(npz({"affine": affine}), MOST)
    assert archive.affine is not None
    assert archive.affine.tolist() == affine.tolist()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (npz({"prob": SMALL}), "'prob': expected one of probs, scores, offsets, affine"),
        (npz({"probs": SMALL, "meta": SMALL}), "'meta': expected one of"),
        (safetensors({"logits": SMALL}), "'logits': expected one of"),
        (zipped(("../probs.npy", npy(SMALL))), "'../probs': expected one of"),
        (zipped(("/etc/probs.npy", npy(SMALL))), "'/etc/probs': expected one of"),
        (zipped(("probs/", b"")), "'probs/': expected one of"),
        (zipped(("probs.npy", npy(SMALL)), ("probs", npy(SMALL))), "'probs': expected it once"),
        (npz({"probs": SMALL.astype(np.int16)}), "'probs': expected numbers of .*, got int16"),
        (npz({"probs": SMALL.astype(np.longdouble)}), "'probs': .* got <f16"),
        (npz({"probs": SMALL.astype(complex)}), "'probs': .* got <c16"),
        (npz({"probs": np.array(["a", "b"])}), "'probs': .* got <U1"),
        (npz({"probs": SMALL.astype("M8[s]")}), r"'probs': .* got <M8\[s\]"),
        (npz({"probs": np.zeros(3, dtype=[("a", "<f4")])}), r"'probs': .* got \|V4"),
        (npz({"probs": SMALL[:0]}), r"'probs': .* none empty, got shape \[0, 3, 4\]"),
        (npz({"probs": SMALL.reshape([1] * 6 + [2, 3, 4])}), "'probs': expected at most 8 axes"),
        (safetensors({"probs": SMALL[:0]}), "'probs': .* none empty"),
        (save({"probs": torch.zeros(3, dtype=torch.int32)}), "'probs': .* got int32"),
        (save({"probs": torch.zeros(3, dtype=torch.bool)}), "'probs': .* got bool"),
        (save({"probs": torch.zeros(3, dtype=torch.float8_e5m2)}), "'probs': .* got F8_E5M2"),
        (headed(declaring(descr="<f1")), "'probs': .* not a valid dtype descriptor: '<f1'"),
        (headed(declaring(descr="|O")), r"'probs': .* got \|O"),
        (headed(declaring("__import__('os')")), "expected one plain array"),
        (headed("-" * 1000), "expected one plain array"),
        (headed(declaring() + declaring()), "expected one plain array"),
        (headed(declaring("(-2, 3)")), "none empty, got shape"),
        (headed("{'descr': '<f4', 'fortran_order': False, [1]: 2}"), "expected one plain array"),
        (headed("(" * 5000), "expected one plain array"),
    ],
)
def test_unreadable_array_is_named(content: bytes, words: str) -> None:
    with pytest.raises(BadArrays, match=words):
        read_archive(content, MOST)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (zipped(("probs.npy", npy(SMALL)), method=zipfile.ZIP_BZIP2), "got method 12"),
        (zipped(("probs.npy", npy(SMALL)[:-4])), "expected 96 bytes, .* holds 92"),
        (zipped(("probs.npy", npy(SMALL) + b"x")), "expected 96 bytes, .* holds 97"),
        (zipped(("probs.npy", b"not numpy" * 9)), "expected an .npy file"),
        (zipped(("probs.npy", b"")), "expected an .npy file"),
        (headed(declaring().ljust(HEADER_BYTES + 1)), "expected a header of at most"),
        (headed(declaring(f"({'9' * 4000}, {'9' * 4000})")), "expected a sound npz file"),
        (npz({"probs": SMALL})[:-30], "expected a sound npz file"),
        (b"PK\x03\x04", "expected a sound npz file"),
        (safetensors({"probs": SMALL})[:-1], "expected a sound safetensors file"),
        (struct.pack("<Q", 2) + b"{]", "expected a sound safetensors file"),
        (struct.pack("<Q", 1 << 60) + b"{}", "expected a header of at most"),
    ],
)
def test_broken_file_is_told_from_a_bad_array(content: bytes, words: str) -> None:
    with pytest.raises(BrokenArchive, match=words):
        read_archive(content, MOST)


@pytest.mark.parametrize("content", [b"", b"PK", b"\x1f\x8b\x08", b"\x93NUMPY\1\0", b"x" * 99])
def test_other_bytes_are_no_archive(content: bytes) -> None:
    with pytest.raises(NotAnArchive, match="expected a safetensors or npz file"):
        read_archive(content, MOST)


def test_encrypted_array_is_refused() -> None:
    content = bytearray(npz({"probs": SMALL}))
    for signature, flags in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        content[content.index(signature) + flags] |= 1
    with pytest.raises(BrokenArchive, match="'probs': expected plain data, got encrypted"):
        read_archive(bytes(content), MOST)


class Touch:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return Path.touch, (self.path,)


def test_pickle_is_refused_unread(tmp_path: Path) -> None:
    mark = tmp_path / "run"
    objects = np.empty(3, dtype=object)
    objects[:] = Touch(mark)
    pickled = headed(declaring("(3,)", "|O"))[: -len(SMALL.tobytes())] + pickle.dumps(Touch(mark))
    for content in (npz({"probs": objects}), pickled):
        with pytest.raises(RequestError, match="expected"):
            read_archive(content, MOST)
    assert not mark.exists()


def declared_bomb() -> bytes:
    """Declare and hold 64 MiB of zeros in 64 KiB."""
    return npz({"probs": np.zeros(1 << 24, dtype=np.float32)})


def silent_bomb() -> bytes:
    """Declare 96 bytes and hold 64 MiB."""
    return zipped(("probs.npy", npy(SMALL) + bytes(1 << 26)))


def empty_threat() -> bytes:
    """Declare 4 TB and hold 96 bytes."""
    return headed(declaring("(1000000, 1000000)"))


def lying_directory() -> bytes:
    """Declare a million bytes in the header and in the directory, and hold 96."""
    text = declaring("(250000,)")
    content = bytearray(headed(text))
    honest = struct.pack("<I", 10 + len(text) + 96)
    entry = content.rindex(b"PK\x01\x02")
    place = content.index(honest, entry)
    content[place : place + 4] = struct.pack("<I", 10 + len(text) + 1_000_000)
    return bytes(content)


def long_header() -> bytes:
    """Declare a header of 4 GB in an .npy file of version 2, which deflates well."""
    content = b"\x93NUMPY\2\0" + struct.pack("<I", (1 << 32) - 1) + bytes(1 << 25)
    return zipped(("probs.npy", content))


def many_arrays() -> bytes:
    """Hold four arrays of 0.4 MiB, of which two are allowed."""
    part = np.zeros(100_000, dtype=np.float32)
    return npz(dict.fromkeys(("probs", "scores", "offsets", "affine"), part))


def many_files() -> bytes:
    """List so many files that the list alone is large."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for number in range(500):
            archive.writestr(f"{number:020}", b"")
    return file.getvalue()


def of_safetensors() -> bytes:
    """Hold 2 MiB, of which one is allowed."""
    return safetensors({"probs": np.zeros(1 << 19, dtype=np.float32)})


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (declared_bomb, TooLarge),
        (silent_bomb, BrokenArchive),
        (empty_threat, BrokenArchive),
        (lying_directory, BrokenArchive),
        (long_header, BrokenArchive),
        (many_arrays, TooLarge),
        (many_files, BrokenArchive),
        (of_safetensors, TooLarge),
    ],
)
def test_bomb_is_refused_at_little_cost(
    make: Callable[[], bytes], error: type[RequestError]
) -> None:
    content = make()
    tracemalloc.start()
    try:
        with pytest.raises(error):
            read_archive(content, MOST)
        assert tracemalloc.get_traced_memory()[1] < 2 * MOST
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", ["affine", "probs"])
def test_array_of_small_numbers_takes_no_more_memory_than_it_declares(name: str) -> None:
    content = npz({name: np.zeros(MOST, np.uint8)})
    tracemalloc.start()
    try:
        with suppress(BadArrays):
            read_archive(content, MOST)
        assert tracemalloc.get_traced_memory()[1] < 3 * MOST  # As the service foresees.
    finally:
        tracemalloc.stop()


def claiming_few_files(content: bytes) -> bytes:
    """Have the end of a ZIP directory declare four files, however many it lists."""
    end = content.rindex(b"PK\5\6")
    return content[: end + 8] + struct.pack("<HH", 4, 4) + content[end + 12 :]


@pytest.mark.parametrize("content", [many_files(), claiming_few_files(many_files())])
def test_directory_of_many_files_is_refused_before_any_of_it_is_parsed(
    content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed = list[str]()
    monkeypatch.setattr(zipfile, "ZipInfo", parsed.append)
    for read in (count_array_bytes, lambda content: read_archive(content, MOST)):
        with pytest.raises(BrokenArchive, match="a directory of at most 4,096 bytes"):
            read(content)
    assert parsed == []


def test_arrays_are_counted_whatever_a_packer_notes_about_each() -> None:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name in NAMES:
            info = zipfile.ZipInfo(f"{name}.npy")
            # Times and owners, as zip and 7-Zip note them.
            info.extra = struct.pack("<HH", 0x7875, 60) + bytes(60)
            archive.writestr(info, npy(SMALL))
    assert count_array_bytes(file.getvalue()) == len(NAMES) * len(npy(SMALL))
    assert read_archive(file.getvalue(), MOST).affine is not None


def test_header_of_safetensors_that_lies_is_refused() -> None:
    """Also one whose arrays share their bytes: in memory, each would take its own."""
    for ends in ([92], [100], [1 << 62], [96, 96]):
        entries = [{"dtype": "F32", "shape": [2, 3, 4], "data_offsets": [0, end]} for end in ends]
        head = json.dumps(dict(zip(NAMES, entries, strict=False))).encode()
        with pytest.raises(BrokenArchive):
            read_archive(struct.pack("<Q", len(head)) + head + SMALL.tobytes(), MOST)


GOOD = [
    npz(laid_out(make_output("none"), "last", "axis") | {"affine": OBLIQUE}),
    npz(laid_out(make_output("softmax"), "first", "axis"), compressed=False),
    safetensors(laid_out(make_output("sigmoid"), "last", "axis"), torch.bfloat16),
]


@pytest.mark.filterwarnings("ignore:.*created on Python 2")
@given(
    content=st.sampled_from(GOOD),
    end=st.one_of(st.none(), st.integers(0, 8000)),
    flips=st.lists(st.tuples(st.integers(-400, 400), st.integers(1, 255)), max_size=3),
)
@settings(max_examples=300)
def test_no_damage_does_more_than_refuse(
    content: bytes, end: int | None, flips: list[tuple[int, int]]
) -> None:
    damaged = bytearray(content[:end])
    for place, bits in flips:  # Headers lie at the start, directories at the end.
        if len(damaged) >= 400:
            damaged[place % len(damaged)] ^= bits
    with suppress(RequestError):
        read_archive(bytes(damaged), MOST)

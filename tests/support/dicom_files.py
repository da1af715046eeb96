"""DICOM series in memory, written by pydicom, valid or broken on purpose."""

import io
import re
import struct
import zipfile
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pydicom
from PIL import Image
from pydicom.dataset import Dataset, FileMetaDataset
from pydicom.encaps import encapsulate
from pydicom.uid import (
    UID,
    CTImageStorage,
    EnhancedMRImageStorage,
    ExplicitVRBigEndian,
    ExplicitVRLittleEndian,
)

from app.geometry import LPS_FROM_RAS
from tests.support.nifti_files import ByteOrder, counting

SERIES = "1.2.826.0.1.3680043.8.498.1"
STUDY = "1.2.826.0.1.3680043.8.498.2"
FRAME_OF_REFERENCE = "1.2.826.0.1.3680043.8.498.3"
PATIENT = "DOE^JOHN"

PLACE = np.array(
    [
        [-1.2, 0.45, 0.0, 20.0],
        [0.0, 0.0, 2.5, -30.0],
        [0.9, 0.6, 0.0, 10.0],
        [0.0, 0.0, 0.0, 1.0],
    ]
)
"""Oblique, of three spacings, and right-handed in LPS: slices ascend along their normal."""


def as_dicom(
    array: np.ndarray | None = None,
    affine: np.ndarray = PLACE,
    *,
    syntax: str = ExplicitVRLittleEndian,
    **elements: Any,
) -> list[bytes]:
    """Write the images of a scan, one file each, with k along the files.

    Args:
        array: The voxels, (i j k), integers; a small int16 volume if None.
        affine: Voxel index -> mm, RAS.
        syntax: The transfer syntax, not a compressed one.
        elements: Elements to set otherwise, by keyword, in all files; None leaves one out.
    """
    array = counting() if array is None else array
    world = LPS_FROM_RAS @ affine
    files = []
    for k in range(array.shape[2]):
        dataset = _dataset(array.dtype, array.shape)
        directions = world[:3, :2] / np.linalg.norm(world[:3, :2], axis=0)
        dataset.ImageOrientationPatient = _decimals(directions.T)
        dataset.PixelSpacing = _decimals(np.linalg.norm(world[:3, :2], axis=0)[::-1])
        dataset.ImagePositionPatient = _decimals(world[:3, 3] + k * world[:3, 2])
        dataset.SliceThickness = _decimals(np.linalg.norm(world[:3, 2]))[0]
        dataset.InstanceNumber = (7 * k) % array.shape[2]
        dataset.SOPInstanceUID = f"{SERIES}.{k + 1}"
        stored = array[:, :, k].T.astype(array.dtype.newbyteorder(_order(syntax)))
        dataset.PixelData = np.ascontiguousarray(stored).tobytes()
        files.append(write(_changed(dataset, elements), syntax))
    return files


def as_enhanced(
    array: np.ndarray | None = None, affine: np.ndarray = PLACE, **elements: Any
) -> bytes:
    """Write a scan as one enhanced multi-frame file; arguments are those of ``as_dicom``."""
    array = counting() if array is None else array
    world = LPS_FROM_RAS @ affine
    dataset = _dataset(array.dtype, array.shape)
    dataset.SOPClassUID = EnhancedMRImageStorage
    dataset.NumberOfFrames = array.shape[2]
    measures, plane, values, shared = Dataset(), Dataset(), Dataset(), Dataset()
    measures.PixelSpacing = _decimals(np.linalg.norm(world[:3, :2], axis=0)[::-1])
    measures.SliceThickness = _decimals(np.linalg.norm(world[:3, 2]))[0]
    directions = world[:3, :2] / np.linalg.norm(world[:3, :2], axis=0)
    plane.ImageOrientationPatient = _decimals(directions.T)
    values.RescaleSlope, values.RescaleIntercept = 2, -5
    shared.PixelMeasuresSequence = [measures]
    shared.PlaneOrientationSequence = [plane]
    shared.PixelValueTransformationSequence = [values]
    dataset.SharedFunctionalGroupsSequence = [shared]
    frames = []
    for k in range(array.shape[2]):
        place, frame = Dataset(), Dataset()
        place.ImagePositionPatient = _decimals(world[:3, 3] + k * world[:3, 2])
        frame.PlanePositionSequence = [place]
        frames.append(frame)
    dataset.PerFrameFunctionalGroupsSequence = frames
    dataset.PixelData = np.ascontiguousarray(array.T).tobytes()
    return write(_changed(dataset, elements), ExplicitVRLittleEndian)


def zipped(
    files: Iterable[bytes], method: int = zipfile.ZIP_DEFLATED, name: str = "../image-{}.dcm"
) -> bytes:
    """Put files into a ZIP archive."""
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", method) as archive:
        for number, content in enumerate(files):
            archive.writestr(name.format(number), content)
    return target.getvalue()


def changed(file: bytes, **elements: Any) -> bytes:
    """Change elements of a file; None removes one."""
    dataset = pydicom.dcmread(io.BytesIO(file))
    return write(_changed(dataset, elements), dataset.file_meta.TransferSyntaxUID)


def jpeg2000(array: np.ndarray) -> bytes:
    """Compress an image of unsigned integers, without loss."""
    target = io.BytesIO()
    Image.fromarray(array.astype(np.uint16)).save(target, "JPEG2000", no_jp2=True)
    return target.getvalue()


def jp2(array: np.ndarray) -> bytes:
    """Compress an image as ``jpeg2000``, into a whole JP2 file."""
    target = io.BytesIO()
    Image.fromarray(array.astype(np.uint16)).save(target, "JPEG2000")
    return target.getvalue()


def lossless_jpeg(array: np.ndarray) -> bytes:
    """Compress an image of 16 bits as lossless JPEG (ISO 10918-1, H), predicted from the left."""
    rows, columns = array.shape
    left = np.empty((rows, columns), np.int64)
    left[:, 1:], left[1:, 0], left[0, 0] = array[:, :-1], array[:-1, 0], 1 << 15
    bits = ""
    for difference in ((array - left + (1 << 15)) % (1 << 16) - (1 << 15)).ravel().tolist():
        size = abs(difference).bit_length()
        value = difference if difference > 0 else difference + (1 << size) - 1
        bits += f"{size:05b}" + (f"{value:0{size}b}" if size % 16 else "")
    bits += "1" * (-len(bits) % 8)
    data = int(bits, 2).to_bytes(len(bits) // 8, "big").replace(b"\xff", b"\xff\0")
    # A code of five bits for each of 17 sizes.
    codes = struct.pack(">HHB16B17B", 0xFFC4, 36, 0, 0, 0, 0, 0, 17, *[0] * 11, *range(17))
    frame = struct.pack(">HHBHHB3B", 0xFFC3, 11, 16, rows, columns, 1, 1, 0x11, 0)
    scan = struct.pack(">HHB2B3B", 0xFFDA, 8, 1, 1, 0, 1, 0, 0)
    return b"\xff\xd8" + frame + codes + scan + data + b"\xff\xd9"


def packed_bits(array: np.ndarray) -> bytes:
    """Pack bits as they are, without runs: 128 bytes at most behind their number."""
    planes = [array.astype(">u2").view("u1").reshape(-1, 2)[:, byte].tobytes() for byte in (0, 1)]
    packed = [
        b"".join(bytes([len(part) - 1]) + part for part in re.findall(rb"(?s).{1,128}", plane))
        for plane in planes
    ]
    offsets = np.zeros(16, "<u4")
    offsets[:3] = 2, 64, 64 + len(packed[0])
    return offsets.tobytes() + b"".join(packed)


def compressed(file: bytes, syntax: str, encode: Callable[[np.ndarray], bytes]) -> bytes:
    """Compress the images of a file."""
    dataset = pydicom.dcmread(io.BytesIO(file))
    frames = dataset.pixel_array.reshape(-1, dataset.Rows, dataset.Columns)
    dataset.PixelData = encapsulate([encode(frame) for frame in frames])
    dataset["PixelData"].VR = "OB"
    return write(dataset, syntax)


def write(dataset: Dataset, syntax: str) -> bytes:
    """Write a file with its preamble."""
    target = io.BytesIO()
    meta = FileMetaDataset()
    meta.MediaStorageSOPClassUID = dataset.SOPClassUID
    meta.MediaStorageSOPInstanceUID = UID("1.2.3")
    meta.TransferSyntaxUID = UID(syntax)
    dataset.file_meta = meta
    dataset.preamble = bytes(128)
    pydicom.dcmwrite(target, dataset, enforce_file_format=True)
    return target.getvalue()


def _dataset(dtype: np.dtype[Any], shape: tuple[int, ...]) -> Dataset:
    dataset = Dataset()
    dataset.SOPClassUID = CTImageStorage
    dataset.Modality = "CT"
    dataset.PatientName = dataset.StudyDescription = dataset.SeriesDescription = PATIENT
    dataset.StudyInstanceUID, dataset.SeriesInstanceUID = STUDY, SERIES
    dataset.FrameOfReferenceUID = FRAME_OF_REFERENCE
    dataset.SOPInstanceUID = f"{SERIES}.1"
    dataset.Columns, dataset.Rows = shape[:2]
    dataset.SamplesPerPixel = 1
    dataset.PhotometricInterpretation = "MONOCHROME2"
    dataset.BitsAllocated = dataset.BitsStored = 8 * dtype.itemsize
    dataset.HighBit = 8 * dtype.itemsize - 1
    dataset.PixelRepresentation = int(dtype.kind == "i")
    # A sequence of undefined length with an image of its own, as some scanners write.
    icon = Dataset()
    icon.Rows = icon.Columns = 3
    icon.PixelSpacing = [9, 9]
    dataset.IconImageSequence = [icon]
    dataset["IconImageSequence"].is_undefined_length = True
    icon.is_undefined_length_sequence_item = True
    return dataset


def _order(syntax: str) -> ByteOrder:
    return ">" if syntax == ExplicitVRBigEndian else "<"


def _changed(dataset: Dataset, elements: dict[str, Any]) -> Dataset:
    for name, value in elements.items():
        if value is None:
            del dataset[name]
        else:
            setattr(dataset, name, value)
    return dataset


def _decimals(numbers: np.ndarray | np.floating[Any]) -> list[str]:
    """Write numbers as decimal strings, which have at most 16 characters."""
    return [pydicom.valuerep.format_number_as_ds(float(x)) for x in np.ravel(numbers)]


def crowded(elements: int) -> bytes:
    """Write a file of many elements, each of them empty, and no pixels."""
    syntax = f"{ExplicitVRLittleEndian}\0".encode()
    meta = b"\x02\0\x10\0UI" + len(syntax).to_bytes(2, "little") + syntax
    return bytes(128) + b"DICM" + meta + b"\x09\0\x10\0LO\0\0" * elements

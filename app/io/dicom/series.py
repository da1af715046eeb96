"""StoredFiles -> Series: the images of one scan among all of an upload, then their voxels."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from blake3 import blake3

from app.errors import BadGeometry, BadParameter, BrokenVolume, NotAVolume, TooLarge
from app.io.dicom.archive import StoredFile, count_entries, list_files
from app.io.dicom.image import Image, Plane, read_image
from app.io.dicom.pixels import read_frames
from app.io.dicom.stack import UNIT_TOLERANCE, stack_planes
from app.io.gzip_stream import Content
from app.io.header import Header

MAX_IMAGES: Final = 1 << 14
"""More than any limit of an axis is meant for; each takes a kilobyte while they are sorted."""

MAX_STEPS: Final = 1 << 22
"""To look at: elements before the pixels, and files. Of a thousand images, four thousand each."""

MAX_SERIES: Final = 64
"""More are no archive of a scan; each image is compared with all of them."""

LISTED: Final = 12
"""Series that an error names."""

ACROSS: Final = ("sagittal", "coronal", "axial")
"""Slices, by the axis that their normal is nearest to."""


@dataclass(slots=True)
class _Group:
    """Images that may be one scan."""

    series: str
    kind: str
    told: str
    planes: list[Plane] = field(default_factory=list)

    def takes(self, series: str, plane: Plane) -> bool:
        """Say whether an image is one of them."""
        first = self.planes[0]
        return (
            series == self.series
            and (plane.pixels.rows, plane.pixels.columns)
            == (first.pixels.rows, first.pixels.columns)
            and _is_near(plane.orientation, first.orientation, UNIT_TOLERANCE)
            and _is_near(plane.spacing, first.spacing, UNIT_TOLERANCE * first.spacing[0])
        )

    def describe(self) -> str:
        """Describe them by what tells groups of one series apart."""
        first = self.planes[0]
        count = len(self.planes)
        return (
            f"{count} {'image' if count == 1 else 'images'}, {self.kind}, "
            f"{first.pixels.columns} x {first.pixels.rows} of "
            f"{first.spacing[1]:.4g} x {first.spacing[0]:.4g} mm"
        )

    @np.errstate(all="ignore")  # Of what is no stack, any number may be given.
    def tell(self) -> str:
        """Describe them by all that people know series by, such as their anatomical planes."""
        first = self.planes[0]
        normal = np.cross(*np.reshape(first.orientation, (2, 3)))
        steps = np.diff(np.sort([np.dot(plane.position, normal) for plane in self.planes]))
        apart = steps[steps > UNIT_TOLERANCE * first.spacing[0]]  # Several may lie at one place.
        every = f" every {np.median(apart):.4g} mm" if apart.size else ""
        told = [self.told] if self.told else []
        lies = np.abs(normal)
        direction = ACROSS[int(lies.argmax())] if lies.max() > 0 else "in no plane"
        return ", ".join([*told, self.describe(), direction + every])


@dataclass(frozen=True, slots=True)
class Series:
    """One scan of an upload, of which no pixel has been read.

    Attributes:
        header: Its shape, type and affine.
        planes: Its images, in order.
        files: All files of the upload.
        images: What the files of the series say, by the index of the file.
    """

    header: Header
    planes: tuple[Plane, ...]
    files: Sequence[StoredFile]
    images: dict[int, Image]

    def read_voxels(self, check_cancelled: Callable[[], None]) -> tuple[np.ndarray, str]:
        """Read the voxels.

        Args:
            check_cancelled: Called for every MiB; raises once nobody waits for the scan any more.

        Returns:
            The bytes of the voxels, of the header's type, i fastest; and the BLAKE3 digest of
            the digests of the series' files and the frames that are used, hex, which depends
            neither on the order of the files, nor on how they are compressed.

        Raises:
            BrokenVolume: A file is truncated or corrupt.
            BadVoxels: Nothing here decodes the pixels.
        """
        i, j, k = self.header.shape
        voxels = np.empty((k, j, i), self.header.dtype)
        places = {(plane.file, plane.frame): at for at, plane in enumerate(self.planes)}
        scaled = _is_scaled_by_plane(self.planes)
        parts: list[bytes] = []
        for index, image in self.images.items():
            file, used = self.files[index], list[int]()
            stream = file.open(check_cancelled)
            with _naming(index, self.files):
                for frame, pixels in enumerate(read_frames(stream, image)):
                    at = places.get((index, frame))
                    if at is None:
                        continue
                    used.append(frame)
                    if scaled:
                        slope, intercept = self.planes[at].scale
                        with np.errstate(all="ignore"):  # Overflows are masked afterwards.
                            np.multiply(pixels, slope, out=voxels[at], casting="unsafe")
                            voxels[at] += intercept
                    else:
                        voxels[at] = pixels
                stream.skip(file.size - stream.position)
            # Of one file, several series may have different frames.
            parts.append(bytes.fromhex(stream.hexdigest()) + np.array(used, "<u4").tobytes())
        return voxels.reshape(-1).view(np.uint8), blake3(b"".join(sorted(parts))).hexdigest()


def find_series(
    content: Content,
    max_bytes: int,
    series: int | None = None,
    check_cancelled: Callable[[], None] = lambda: None,
) -> Series:
    """Find the scan in a DICOM file, or in a ZIP archive of such files.

    Args:
        content: All of it.
        max_bytes: Bytes of all its files together, once inflated.
        series: Which one if there are several, from 0, those of most images first.
        check_cancelled: Called now and then; raises once nobody waits for the scan any more.

    Returns:
        The scan; its affine is valid.

    Raises:
        NotAVolume: There is no image in it.
        BrokenVolume: A file, or the archive, is truncated, corrupt or encrypted.
        TooLarge: The archive declares more bytes than allowed, or has more files than any scan.
        BadGeometry: Several series and none chosen, or images that are no stack.
        BadVoxels: Colours, or pixels of another type than integers.
        BadParameter: There is no such series.
    """
    entries = count_entries(content)
    if entries > MAX_IMAGES:  # To look at the files of an archive takes long, whatever they are.
        raise TooLarge(f"expected at most {MAX_IMAGES:,} files of a scan, got {entries:,}")
    files = list_files(content, max_bytes)
    images = _read_images(files, _limit_steps(check_cancelled))
    group = _choose(_group(images), images, series)
    planes, affine, warnings = stack_planes(group.planes)
    warnings += _list_other_files(files, planes, chosen=series is not None)
    slope, intercept = (1.0, 0.0) if _is_scaled_by_plane(planes) else planes[0].scale
    shape = (planes[0].pixels.columns, planes[0].pixels.rows, len(planes))
    header = Header(
        shape=shape,
        frame_shape=(),
        dtype=_dtype(planes),
        offset=0,
        slope=slope,
        intercept=intercept,
        affine=affine,
        warnings=tuple(warnings),
    )
    return Series(header, planes, files, {plane.file: images[plane.file] for plane in planes})


def _list_other_files(
    files: Sequence[StoredFile], planes: Sequence[Plane], *, chosen: bool
) -> list[str]:
    """Warn of files that are no part of the scan: of other series, too, if none was chosen."""
    warnings = []
    empty = sum(not file.size for file in files)
    others = len(files) - empty - len({plane.file for plane in planes})
    if others and not chosen:
        warnings.append(f"ignored files beside those of the scan: {others:,}")
    if empty:
        warnings.append(f"empty files beside those of the scan: {empty:,}; was all of it copied?")
    return warnings


def _limit_steps(check_cancelled: Callable[[], None]) -> Callable[[], None]:
    """Refuse, with ``TooLarge``, what takes more steps than any scan, deadline or not."""
    steps = 0

    def check() -> None:
        nonlocal steps
        steps += 1
        if steps > MAX_STEPS:
            raise TooLarge(f"expected at most {MAX_STEPS:,} DICOM elements of a scan, got more")
        check_cancelled()

    return check


@contextmanager
def _naming(index: int, files: Sequence[StoredFile]) -> Iterator[None]:
    """Say in an error of one file of several which one it is, by its number from 1."""
    try:
        yield
    except (BrokenVolume, NotAVolume) as error:
        if len(files) == 1:
            raise
        place = f"in file {index + 1:,} of {len(files):,} in the archive"
        raise type(error)(f"{error}, {place}") from error


def _read_images(
    files: Sequence[StoredFile], check_cancelled: Callable[[], None]
) -> dict[int, Image]:
    """Read what all files say about their images, by the index of the file."""
    images: dict[int, Image] = {}
    count = 0
    for index, file in enumerate(files):
        check_cancelled()
        with _naming(index, files):
            image = read_image(file, index, check_cancelled)
        if image is not None:
            images[index] = image
            count += max(1, len(image.planes))
        if count > MAX_IMAGES:
            raise BadGeometry(f"expected at most {MAX_IMAGES:,} images, got more")
    if not images:
        raise NotAVolume(f"expected DICOM images, got none (files in all: {len(files):,})")
    return images


def _group(images: dict[int, Image]) -> list[_Group]:
    """Group all planes by series, size, orientation and spacing; those of most images first."""
    groups: list[_Group] = []
    for image in images.values():
        for plane in image.planes:
            group = next((one for one in groups if one.takes(image.uids.series, plane)), None)
            if group is None:
                group = _Group(image.uids.series, image.kind, image.told)
                groups.append(group)
            group.planes.append(plane)
        if len(groups) > MAX_SERIES:
            raise BadGeometry(f"expected at most {MAX_SERIES} series, got more")

    def rank(group: _Group) -> tuple[int, str, str, tuple[float, ...]]:
        first = group.planes[0]
        return -len(group.planes), group.series, group.describe(), first.orientation

    return sorted(groups, key=rank)


def _choose(groups: list[_Group], images: dict[int, Image], series: int | None) -> _Group:
    """Choose a group of planes; images that are no planes are passed over in other series only."""
    if not groups:
        raise next(image.problem for image in images.values() if image.problem)
    if series is None and len(groups) > 1:
        some = enumerate(groups[:LISTED])
        listed = [f"series {at}: {group.tell()}" for at, group in some]
        more = ["…"] if len(groups) > LISTED else []
        raise BadGeometry(
            f"expected one series, got {len(groups)} ({'; '.join(listed + more)}); "
            "choose a series, from 0"
        )
    check_series(series, len(groups))
    group = groups[series or 0]
    series_images = [image for image in images.values() if image.uids.series == group.series]
    problems = [image.problem for image in series_images if image.problem]
    if problems:
        raise type(problems[0])(
            f"{problems[0]}, in {len(problems)} of {len(series_images)} files of the series; leave "
            "out what is no slice of the scan"
        )
    return group


def check_series(series: int | None, count: int) -> None:
    """Check the number of a series.

    Raises:
        BadParameter: There are not as many.
    """
    if series is not None and not 0 <= series < count:
        raise BadParameter(f"expected series from 0 to {count - 1}, got {series}")


def _is_near(some: Sequence[float], others: Sequence[float], tolerance: float) -> bool:
    """Compare numbers, without NumPy's effort for few of them."""
    return all(abs(a - b) <= tolerance for a, b in zip(some, others, strict=True))


def _dtype(planes: Sequence[Plane]) -> np.dtype[np.generic]:
    """Choose the type of the voxels: that of the pixels unless it, or their scale, differs."""
    native = planes[0].pixels.dtype.newbyteorder("=")
    if not _is_scaled_by_plane(planes):
        return native
    return np.dtype("f8" if any(one.pixels.dtype.itemsize > 2 for one in planes) else "f4")


def _is_scaled_by_plane(planes: Sequence[Plane]) -> bool:
    first = planes[0]
    return any(
        plane.scale != first.scale
        or plane.pixels.dtype.newbyteorder("=") != first.pixels.dtype.newbyteorder("=")
        for plane in planes
    )

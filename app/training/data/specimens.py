"""Folders of scans and landmark files -> Specimens, ready to be augmented."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from app.compute import Voxels
from app.geometry import Affine, Points, spacing_of
from app.io import (
    SCAN_SUFFIXES,
    RasPoint,
    files_of,
    is_landmark_file,
    landmark_stem,
    list_shown,
    name_in_utf8,
    read_file,
    read_truth,
    read_volume,
    scan_stem,
)
from app.model import IntensitySpec
from app.preprocessing import (
    find_window,
    normalise_,
    resample,
    sample_at,
    smooth_for,
    width_of,
)
from app.training.options import Missing


class SpecimenFiles(NamedTuple):
    """The files of one specimen, whose name is that of the scan without suffixes."""

    name: str
    scan: Path
    landmarks: Path


@dataclass(frozen=True, slots=True)
class Specimen:
    """One scan with its landmarks.

    Attributes:
        voxels: Values scaled as the model expects them and smoothed for its spacing, but still at
            the scan's own resolution, float32; ``values_at`` limits them to the window.
        to_world: Voxel index -> mm, RAS.
        points: Landmarks in mm, RAS; NaN where the file has none.
        absent: Rows of those that are known not to be in the scan.
        middle: What images of it are centred on, in mm; None: the middle of the points that it has.
    """

    voxels: Voxels
    to_world: Affine
    points: Points
    absent: frozenset[int] = frozenset()
    middle: RasPoint | None = None

    def values_at(self, index: Float[Tensor, "*n 3"]) -> Float[Tensor, "*n"]:
        """Interpolate at fractional voxel indices, as a grid of the service would; 0 outside."""
        return sample_at(self.voxels, index).clamp_(0.0, 1.0)


@dataclass(frozen=True, slots=True)
class DataFiles:
    """The files of two folders, sorted by name.

    Attributes:
        scans: Scans by name.
        landmarks: Landmark files by name.
        duplicates: Names that two scans, or two landmark files, share.
        others: Files of another kind.
    """

    scans: Mapping[str, Path]
    landmarks: Mapping[str, Path]
    duplicates: tuple[str, ...]
    others: tuple[Path, ...]

    def pairs(self) -> list[SpecimenFiles]:
        """List every scan that has a landmark file, with it."""
        return [
            SpecimenFiles(name, scan, self.landmarks[name])
            for name, scan in self.scans.items()
            if name in self.landmarks
        ]


def list_files(scans: Path, landmarks: Path) -> DataFiles:
    """List the scans of one folder and the landmark files of another, or of the same."""
    found: tuple[dict[str, Path], dict[str, Path]] = ({}, {})
    duplicates, others = [], []
    for path in sorted({*list_shown(scans), *list_shown(landmarks)}):
        if path.parent == scans and path.name.endswith(SCAN_SUFFIXES):
            by_name, name = found[0], scan_stem(path.name)
        elif path.parent == landmarks and is_landmark_file(path):
            by_name, name = found[1], landmark_stem(path)
        elif path.is_file():
            others.append(path)
            continue
        else:
            continue
        name = name_in_utf8(name)  # Records, tables and reports cannot hold others.
        if name in by_name:
            duplicates.append(name)
        by_name[name] = path
    voxels = {file for scan in found[0].values() for file in files_of(scan)}
    others = [path for path in others if path not in voxels]
    return DataFiles(*found, tuple(duplicates), tuple(others))


def pair_files(scans: Path, landmarks: Path, only: Sequence[str] = ()) -> list[SpecimenFiles]:
    """Pair scans and landmark files by name, all or the named ones.

    Raises:
        ValueError: A folder is missing, a scan has no landmark file, several files have one name,
            or there is no scan of a name. A landmark file without a scan is ignored.
    """
    for folder in (scans, landmarks):
        if not folder.is_dir():
            raise ValueError(f"expected a folder, got {folder}")
    files = list_files(scans, landmarks)
    if files.duplicates:
        raise ValueError(f"expected one file of a name, got several named {files.duplicates[0]}")
    for name, scan in files.scans.items():
        if name not in files.landmarks:
            raise ValueError(f"expected a landmark file for {scan.name}, found none of that name")
    if not files.scans:
        raise ValueError(f"expected scans ({', '.join(SCAN_SUFFIXES)}), found none")
    unknown = set(only) - files.scans.keys()
    if unknown:
        raise ValueError(f"expected scans that are there, found none named {sorted(unknown)}")
    return [pair for pair in files.pairs() if not only or pair.name in only]


@contextmanager
def merged(cases: Iterable[SpecimenFiles]) -> Iterator[tuple[Path, Path]]:
    """Make folders of scans and of landmark files that link to those of several folders."""
    with TemporaryDirectory() as folder:
        folders = Path(folder, "scans"), Path(folder, "landmarks")
        for made in folders:
            made.mkdir()
        for files in cases:
            for made, path in zip(folders, (files.scan, files.landmarks), strict=True):
                (made / path.name).symlink_to(path.resolve())
        yield folders


def rows_of(points: Mapping[str, RasPoint | None], names: Sequence[str]) -> Points:
    """List the named landmarks in this order, in mm, RAS; NaN where there is none."""
    missing = np.full(3, np.nan)
    found = (points.get(name) for name in names)
    return np.stack([missing if point is None else point for point in found])


def load_specimen(
    files: SpecimenFiles,
    names: Sequence[str],
    spacing_mm: float,
    intensity: IntensitySpec,
    missing: Missing = "unknown",
    window_spacing_mm: float | None = None,
) -> Specimen:
    """Read a scan and its landmarks, which were checked, and prepare it for augmentation.

    Normalisation and smoothing are those of the service, and in its order, so that an augmented
    sample equals what the service would compute from such a scan. Percentiles are taken at the
    spacing of the model, or at that of the first network if this is for a second one.

    Args:
        files: The specimen.
        names: Landmarks in the order of the network's channels.
        spacing_mm: Of the model's grid, in mm of the subject.
        intensity: The model's rule.
        missing: How a landmark without a position counts of which nobody says that it is absent.
        window_spacing_mm: Of the first network's grid, if this is for a second one.
    """
    volume = read_volume(read_file(files.scan))
    truth = read_truth(files.landmarks)
    step = (window_spacing_mm or spacing_mm) / spacing_of(volume.affine)
    coarse, _ = resample(volume.voxels, step, torch.device("cpu"))
    window = find_window(coarse, intensity)
    if window is None or window_spacing_mm is not None:
        # As in make_posed_grid, which limits values to the window before it smooths them.
        values = normalise_(torch.from_numpy(volume.voxels.astype(np.float32)), intensity, window)
        values = smooth_for(values.numpy(), spacing_mm, volume.affine, torch.device("cpu"))
    else:
        # As in make_grid, which does so last: see values_at.
        values = smooth_for(volume.voxels, spacing_mm, volume.affine, torch.device("cpu"))
        values = values.sub_(window[0]).div_(width_of(window))
    judged = names if missing == "absent" else truth
    absent = (row for row, name in enumerate(names) if name in judged and truth.get(name) is None)
    return Specimen(values, volume.affine, rows_of(truth, names), frozenset(absent))

"""Brings landmark files that are in a frame of their own into the frame of their scan.

    python -m app.training.tools.find_poses SCANS LANDMARKS --model models/NAME -o OUT

Points that were placed in an atlas, or stored without their scan's frame, are right up to a rigid
motion. A first model finds them roughly. The motion that fits the given points to what it finds,
over many random poses of the scan, is far more accurate than any single point. Use the result for
training only: its error is the model's.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch
from jaxtyping import Float64
from rich.console import Console

from app.compute import choose_device
from app.errors import LandmarkdError
from app.geometry import Points, scaling, spacing_of, transform, translation
from app.inference import Detector, load_checked
from app.io import Volume, markups_json, read_landmarks, read_volume
from app.preprocessing import index_grid, sample_at
from app.shapes import MIN_LANDMARKS, Similarity, fit_similarity
from app.training.data.specimens import landmark_names, pair_files, rows_of
from app.training.fit.augment import random_rotation

POSES: Final = 8
"""Random poses of each scan; the errors of a network in them are nearly independent."""

FIRST_POSES: Final = 4
"""Poses of the whole scan, to find out where the points are."""

VIEW: Final = 1.05
"""Edge of the view around the points, in diagonals of their bounding box."""

SIGMA_MM: Final = 0.5
"""Scale of the robust weight: the influence of points further off decreases."""

ROUNDS: Final = 30

KnownPoints = Float64[np.ndarray, "points 3"]
PosedPoints = Float64[np.ndarray, "poses points 3"]


@dataclass(frozen=True, slots=True)
class FoundPose:
    """Where a specimen's points lie in its scan.

    Attributes:
        points: Landmarks in mm, RAS, in the frame of the scan.
        residual_mm: Median distance between them and what the model found.
        found: Share of the landmarks that the model found, over all poses.
    """

    points: Points
    residual_mm: float
    found: float


def find_pose(detector: Detector, volume: Volume, points: Points, poses: int) -> FoundPose:
    """Find the rigid motion that brings points into a scan.

    Args:
        detector: Of a model with the same landmarks, in the same order.
        volume: The scan.
        points: Its landmarks, in mm, in a frame that is right up to a rotation and a shift.
        poses: Number of random poses of the scan.

    Raises:
        ValueError: The model finds fewer than four landmarks.
    """
    rng = np.random.default_rng(0)
    extent = float(np.max(volume.voxels.shape * spacing_of(volume.affine)))
    centre = transform(volume.affine, (np.asarray(volume.voxels.shape) - 1) / 2)
    first = _fit(points, _detect_posed(detector, volume, (centre, extent), FIRST_POSES, rng))
    # Close up, the subject fills the image as in those that the model was trained on.
    known = points[np.isfinite(points).all(axis=1)]
    edge = VIEW * float(np.linalg.norm(np.ptp(known, axis=0)))
    centre = first.apply(known).mean(axis=0)
    found = _detect_posed(detector, volume, (centre, edge), poses, rng)
    motion = _fit(points, found)
    residual = np.linalg.norm(motion.apply(points) - found, axis=2)
    return FoundPose(
        motion.apply(points), float(np.nanmedian(residual)), float(np.isfinite(residual).mean())
    )


def _fit(points: Points, found: PosedPoints) -> Similarity:
    """Fit points to where they were found in all poses."""
    known = np.isfinite(found).all(axis=2) & np.isfinite(points).all(axis=1)
    if known.any(axis=0).sum() < MIN_LANDMARKS:
        raise ValueError("expected a model that finds at least four landmarks, found fewer")
    return fit_rigid(np.broadcast_to(points, found.shape)[known], found[known], SIGMA_MM)


def fit_rigid(source: KnownPoints, target: KnownPoints, sigma_mm: float) -> Similarity:
    """Fit rotation and translation by iteratively reweighted least squares (Geman and McClure).

    The scale of the weight starts at the spread of the errors and shrinks to ``sigma_mm``.
    """
    weight = np.ones(len(source))
    for step in range(ROUNDS):
        fit = fit_similarity(source, target, weight, scale_bounds=(1.0, 1.0))
        square = ((fit.apply(source) - target) ** 2).sum(axis=1)
        scale = max(sigma_mm, float(np.sqrt(np.median(square))) * (2.0 - step / ROUNDS))
        weight = 1 / (1 + square / scale**2) ** 2
    return fit


def _detect_posed(
    detector: Detector,
    volume: Volume,
    view: tuple[Float64[np.ndarray, " 3"], float],
    poses: int,
    rng: np.random.Generator,
) -> PosedPoints:
    """Rotate a scan at random, find its landmarks, and rotate them back.

    The view is given by its centre, in mm, RAS, and its edge, in mm.

    Returns:
        Positions in mm, RAS; NaN where one was not found.
    """
    voxels = torch.from_numpy(np.ascontiguousarray(volume.voxels)).float()
    centre, extent = view
    spacing = float(spacing_of(volume.affine).min())
    edge = round(extent / spacing)
    posed_affine = scaling([spacing] * 3)
    found = np.full((poses, len(detector.model.manifest.landmarks), 3), np.nan)
    for pose in range(poses):
        posed_centre = transform(posed_affine, (edge - 1) / 2 + rng.uniform(-1, 1, 3))
        to_world = translation(centre) @ random_rotation(180.0, rng) @ translation(-posed_centre)
        index = np.linalg.inv(volume.affine) @ to_world @ posed_affine
        image = sample_at(voxels, index_grid((edge, edge, edge), index))
        answer = detector.detect(Volume(image.numpy(), posed_affine))
        for column, landmark in enumerate(answer.landmarks):
            if landmark.ras_mm is not None:
                found[pose, column] = transform(to_world, landmark.ras_mm)
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="python -m app.training.tools.find_poses", description=__doc__
    )
    parser.add_argument("scans", type=Path)
    parser.add_argument("landmarks", type=Path)
    parser.add_argument("--model", type=Path, required=True, help="folder of a first model")
    parser.add_argument("-o", "--output", type=Path, required=True, help="folder to write to")
    parser.add_argument("--poses", type=int, default=POSES, help="random poses per scan")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda:N")
    options = parser.parse_args(arguments)
    try:
        specimens = pair_files(options.scans, options.landmarks)
        given = landmark_names(specimens)
        detector = Detector(load_checked(options.model, choose_device(options.device)))
    except (LandmarkdError, ValueError, OSError) as error:
        raise SystemExit(str(error)) from None
    names = [landmark.name for landmark in detector.model.manifest.landmarks]
    unknown = set(given) - set(names)
    if unknown:
        raise SystemExit(f"expected landmarks of the model, got also {sorted(unknown)}")
    console = Console(markup=False, emoji=False)  # Names may hold brackets.
    options.output.mkdir(parents=True, exist_ok=True)
    failures = []
    for files in specimens:
        try:
            volume = read_volume(files.scan.read_bytes())
            points = rows_of(read_landmarks(files.landmarks), names)
            pose = find_pose(detector, volume, points, options.poses)
        except (LandmarkdError, ValueError) as error:
            failures.append(f"{files.name}: {error}")
            continue
        moved = options.output / f"{files.name}.mrk.json"
        moved.write_text(markups_json(names, pose.points), encoding="utf-8")
        console.print(
            f"{files.name}: {pose.residual_mm:.3f} mm median, {100 * pose.found:.0f} % found"
        )
    if failures:
        raise SystemExit("\n".join(failures))


if __name__ == "__main__":
    main()

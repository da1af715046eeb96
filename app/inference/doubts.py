"""Landmarks of a scan -> the same, doubted where the scan is unlike what their model was made for.

A network answers for any scan. What it cannot tell is told by the shape of its subjects: that too
little of one is shown, that its voxels are not as large as the file says, or that structures which
look alike may have been taken for each other. Then no landmark is detected for sure, and warnings
say why.
"""

import math
from collections.abc import Sequence
from typing import Final

import numpy as np

from app.geometry import Points, distance_inside, spacing_of, thickness_of, transform
from app.inference.refinement import any_detected, find_agreeing, find_pose, with_low_confidence
from app.io import Volume
from app.model import LoadedModel, Shape, ShapeSpec
from app.preprocessing import crop, find_blank
from app.shapes import measure_stretch, measure_twist
from app.voting import Landmark, Point, positions_of

SHOWN_MM: Final = 6.0
"""Voxels this near to a place must differ for a scan to show it: along each axis, two voxels of the
grid on which the first network of ``lumbar-mri`` counts levels, the only model with
surroundings."""

MIN_CLEAR: Final = 0.7
"""Least share of the landmarks which a scan should show that the first network must detect for
look-alikes to be told apart. Of 40 spines of ``lumbar-mri`` it detects more of nearly all, also in
other contrasts, cut off and up to 25 degrees oblique. Of such that are turned further, or whose
affine takes the front for the back, it takes many for one level further along, and mostly detects
less; the second network detects what it is shown all the same."""


def check_plausibility(
    landmarks: tuple[Landmark, ...],
    first: tuple[Landmark, ...],
    volume: Volume,
    doubts: Sequence[str],
    model: LoadedModel,
) -> tuple[tuple[Landmark, ...], tuple[str, ...]]:
    """Doubt all landmarks if the scan does not tell them from look-alikes, or is unlike all.

    Args:
        landmarks: What was found, in the order of the shape.
        first: What the first network has found: what the second one sees is all in the pose of
            what the first one has chosen.
        volume: The scan.
        doubts: What passes have shown that makes it doubtful which landmark is which.
        model: The model of the first network; without a mean shape, no landmark is doubted here.

    Returns:
        The landmarks, and what the answer should say besides.
    """
    remarks: tuple[str, ...] = ()
    if any(one.ras_mm is not None for one in landmarks):
        remarks = _find_doubts(landmarks, first, volume, doubts, model)
    checked = landmarks
    if remarks:
        checked = tuple(
            one if one.ras_mm is None else with_low_confidence(one) for one in landmarks
        )
    # What is doubted was perhaps seen by the second network alone, as in noise.
    seen = landmarks if any_detected(first) else checked
    if not any_detected(seen):
        remarks = (
            f"No landmark is detected. The model is for: {model.manifest.description}. Does "
            "the scan show them, in the size and the orientation that the file says?",
            *remarks,
        )
    return checked, remarks


def _find_doubts(
    landmarks: tuple[Landmark, ...],
    first: tuple[Landmark, ...],
    volume: Volume,
    doubts: Sequence[str],
    model: LoadedModel,
) -> tuple[str, ...]:
    shape, spec = model.shape, model.manifest.shape
    if shape is None or spec is None:
        return ()
    if spec.surroundings:
        doubts = [
            *doubts,
            *_missing_surroundings(landmarks, shape, spec, volume),
            *_unclear(first, shape, volume),
        ]
    if rival := first[0].rival:
        doubts = [
            *doubts,
            f"another arrangement of them, {rival.distance_mm:.3g} mm away, has "
            f"{100 * rival.share:.0f} % as many votes",
        ]
    which = f"Which landmark is which is doubtful: {'; and '.join(doubts)}."
    all_of_them = (*doubt_extent(volume, spec), *doubt_proportions(landmarks, shape, spec))
    positions = (f"All positions are doubtful: {doubt}" for doubt in all_of_them)
    return (which, *positions) if doubts else tuple(positions)


def _missing_surroundings(
    landmarks: tuple[Landmark, ...], shape: Shape, spec: ShapeSpec, volume: Volume
) -> list[str]:
    """Say what a scan should show of the model's surroundings, if it shows none."""
    if shows_any(shape.surroundings, landmarks, shape, volume):
        return []
    places = " nor ".join(f"{one.mm:g} mm beyond {one.beyond}" for one in spec.surroundings)
    return [
        "they look alike and are told apart by what surrounds them, and the scan shows "
        f"neither what lies {places}"
    ]


def _unclear(first: tuple[Landmark, ...], shape: Shape, volume: Volume) -> list[str]:
    """Say if the first network, which tells look-alikes apart, detects too few of them."""
    detected, shown = count_clear(first, shape, volume)
    if detected >= MIN_CLEAR * shown:
        return []
    return [
        f"at first sight of the whole scan {detected} of {shown} that it should show are "
        "detected, as if the patient did not lie as the file says"
    ]


def doubt_extent(volume: Volume, spec: ShapeSpec) -> tuple[str, ...]:
    """Say if a scan shows too thin a slab of a subject, the blank field around it not counted.

    Args:
        volume: The scan.
        spec: What the manifest says of the shape of its subjects, such as its limits.
    """
    if spec.min_extent_mm is None:
        return ()
    shown, _ = crop(volume.voxels, find_blank(volume.voxels))
    extent_mm = float((thickness_of(volume.affine) * shown.shape).min())
    if extent_mm >= spec.min_extent_mm:
        return ()
    return (
        f"the scan is {extent_mm:.3g} mm thick, expected at least {spec.min_extent_mm:g} mm; does "
        "it show the subject from side to side, and are its slices as far apart as the file says?",
    )


def doubt_proportions(
    landmarks: Sequence[Landmark], shape: Shape, spec: ShapeSpec
) -> tuple[str, ...]:
    """Say if a subject is too large, too small or too long for its model, or turned too far.

    Args:
        landmarks: What was found, in the order of the shape.
        shape: Mean shape, and how far a landmark may be from it to count.
        spec: What the manifest says of that shape, such as its limits.
    """
    if spec.max_stretch is None and spec.max_twist_deg is None:
        return ()  # Of most models; to fit the shape takes as long as to find a pose.
    agree = find_agreeing(landmarks, shape)
    if agree is None:
        return ()
    # Of a stretched subject, those agree that show it least; all that are detected show it.
    shown = agree | (shape.known & [landmark.status == "detected" for landmark in landmarks])
    subject = shape.mean[shown], positions_of(landmarks)[shown]
    doubts = []
    sizes = measure_stretch(*subject, shape.tolerance_mm)
    furthest = max(sizes, key=lambda size: abs(math.log(max(size, 1e-9))), default=1.0)
    most = spec.max_stretch or math.inf
    if not 1 / most <= furthest <= most:
        doubts.append(
            f"along one axis the subject is {furthest:.2f} times as large as usual, expected "
            f"{1 / most:.2f} to {most:g}; are the voxels as large as the file says?"
        )
    turned = measure_twist(*subject)
    # Landmarks that spread along one axis alone, as in a cut scan, do not tell of a twist about it.
    if spec.max_twist_deg is not None and len(sizes) > 1 and turned > spec.max_twist_deg:
        doubts.append(
            f"about its long axis the subject is turned by {turned:.0f} degrees, expected at most "
            f"{spec.max_twist_deg:g}; does it lie as the file says?"
        )
    return tuple(doubts)


def shows_any(places: Points, landmarks: Sequence[Landmark], shape: Shape, volume: Volume) -> bool:
    """Return whether a scan shows any of some places.

    A place is shown if it lies between the centres of the outermost voxels, and those within
    ``SHOWN_MM`` of it do not all have one value: blank voxels of a scan that was masked or padded
    show nothing.

    Args:
        places: In the frame of the mean shape.
        landmarks: What was found, in the order of the shape.
        shape: Mean shape, and how far a landmark may be from it to count.
        volume: The scan.

    Returns:
        Whether any is shown; False if the landmarks agree on no pose.
    """
    pose = find_pose(landmarks, shape)
    if pose is None:
        return False
    centres = transform(np.linalg.inv(volume.affine) @ pose.to_world, places)
    inside = ((centres >= 0) & (centres <= np.array(volume.voxels.shape) - 1)).all(axis=1)
    reach = SHOWN_MM / spacing_of(volume.affine)
    near = (_box(volume.voxels, centre, reach) for centre in centres[inside])
    return any(box.max() > box.min() for box in near)  # Their difference may overflow.


def count_clear(landmarks: Sequence[Landmark], shape: Shape, volume: Volume) -> tuple[int, int]:
    """Count the landmarks that a scan should show, and how many of them are detected.

    Args:
        landmarks: What was found, in the order of the shape.
        shape: Mean shape, and how far a landmark may be from it to count.
        volume: The scan.

    Returns:
        How many are detected, and how many lie in the scan by the pose of all; none of all if the
        landmarks agree on no pose.
    """
    pose = find_pose(landmarks, shape)
    if pose is None:
        return 0, len(landmarks)
    expected = transform(pose.to_world, shape.mean)
    shown = distance_inside(expected, volume.affine, volume.voxels.shape) >= 0.0
    detected = np.array([landmark.status == "detected" for landmark in landmarks])
    return int((detected & shown).sum()), int(shown.sum())


def compare_upside_down(
    upright: Sequence[Landmark], upside_down: Sequence[Landmark]
) -> tuple[str, ...]:
    """Say if more votes fit together where the first network sees a scan upside down."""
    mass, other = _sum_mass(upright), _sum_mass(upside_down)
    if other <= mass:
        return ()
    many = f"{100 * other / mass:.0f} % as many" if mass else "more"
    return (f"upside down, the scan has {many} votes; does it lie as the file says?",)


def _sum_mass(landmarks: Sequence[Landmark]) -> float:
    """Add up the mass of the landmarks that agree with the fitted shape; 0 if none was fitted."""
    fitted = (one for one in landmarks if one.from_shape_mm is not None)
    return sum(one.mass for one in fitted if one.expected_ras_mm is None)


def _box(voxels: np.ndarray, centre: Point, reach: Point) -> np.ndarray:
    """View what lies within a reach of a position along each axis: one voxel to each side at least.

    Args:
        voxels: Of a scan.
        centre: Position within it, voxels.
        reach: Along each axis, voxels.
    """
    first = np.floor(np.minimum(centre - reach, centre - 1)).clip(0).astype(int)
    last = np.ceil(np.maximum(centre + reach, centre + 1)).astype(int)
    return voxels[tuple(slice(a, b + 1) for a, b in zip(first, last, strict=True))]

"""Modes -> Landmarks: where they are, whether they are there, and how sure that is.

Presence
--------
``mass`` is the vote weight within reach (0.6 of the voting radius) of an estimate, divided by the
number of field voxels within the voting radius of it that lie in the volume; ``coherence`` is the
share of the landmark's whole vote weight that lies within reach. A landmark that is there has a
mass near the network's mean probability, whether or not the border cuts its sphere.

The answer is the heaviest mode. If the model has a shape that at least four landmarks can be fitted
to, it is the mode nearest to where the fitted shape expects it (within the shape's tolerance); that
mode *agrees*. In order, with t the landmark's presence threshold:

- ``not_found``: there is no mode, or its mass is under a quarter of t.
- ``out_of_field``: the answer lies outside the volume, has a mass of at least t, and is *believed*.
- ``not_found``: it lies outside the volume otherwise; or the shape was fitted, expects it
  elsewhere, and its mass is under t.
- ``detected``: its mass is at least t, and it is believed.
- ``low_confidence``: everything else.

An answer is believed if it agrees with the fitted shape; where no shape has a say (the model has
none, or it does not know this landmark) if its coherence is at least a half. Where a shape has a
say and could not be fitted, nothing is believed: all landmarks together made no sense. Nor is
anything if the fitted shape expects twice as many landmarks in the scan as agree with it: some
modes of any scan fit by chance, and what is cut away is expected elsewhere.

Confidence is ``min(m^2 / (m^2 + t^2), c)``, with mass m and coherence c, so 0.5 at the presence
threshold and never more than the share of votes that agree. c is 1 for an answer that agrees with
the shape, which settles what the votes left open; an answer that the shape does not support has
half the confidence, and half again where nothing is believed of a fitted shape; so detected means
at least 0.5 and low_confidence with a shape means less.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

import numpy as np
from jaxtyping import Bool, Float64

from app.geometry import transform
from app.model import LandmarkSpec
from app.voting.constellation import LEAST_LANDMARKS, Constellation, Shape, fit_constellation
from app.voting.modes import Modes, find_modes, votes_of_scan
from app.voting.readout import GridFrame, Readout
from app.voting.votes import Votes

FAINT: Final = 0.25
"""A mode with less than this share of the presence threshold is no candidate and no answer."""

COHERENT: Final = 0.5
"""Least coherence of an answer that no shape supports: most votes are for this mode."""

SHOWN: Final = 0.5
"""Least share of the landmarks expected in the scan that agree with the shape, for it to be seen.
In halves of unseen mouse skulls that were posed rightly it was at least 0.8."""

MODES: Final = 4
"""Modes per landmark where the model's shape does not say how many."""

Status = Literal["detected", "low_confidence", "not_found", "out_of_field"]
Point = Float64[np.ndarray, " 3"]


@dataclass(frozen=True, slots=True)
class Candidate:
    """One mode of a landmark's votes.

    Attributes:
        ijk: In voxels of the uploaded array.
        ras_mm: In mm, RAS.
        mass: As of a landmark.
    """

    ijk: Point
    ras_mm: Point
    mass: float


@dataclass(frozen=True, slots=True)
class Landmark:
    """One landmark of one scan. What cannot be known is None; a missing landmark has no place.

    Attributes:
        name: As in the manifest.
        description: As in the manifest.
        status: Whether it was found.
        ijk: In voxels of the uploaded array; None unless detected or low_confidence.
        ras_mm: In mm, RAS; likewise.
        confidence: In [0, 1]: 0.5 at the presence threshold, monotone in mass and coherence.
        mass: See 'Presence' in ``app.voting.landmarks``; of the heaviest mode where there is no
            answer.
        coherence: Share of the landmark's vote weight that lies within reach; likewise.
        spread_mm: Root mean square distance of the votes within reach from the estimate. Spread,
            not an error bar.
        region95_mm: Radius that held 95 % of held-out errors; None if the model is uncalibrated.
        disagreement_mm: Distance between the estimate and the centroid of the probabilities.
        expected_ras_mm: Where the fitted constellation expects it, when that differs from the
            answer by more than its tolerance or no mode agrees; None otherwise.
        candidates: Modes inside the volume that are not faint, the answer first, then by mass;
            empty where there is no answer.
    """

    name: str
    description: str
    status: Status
    ijk: Point | None
    ras_mm: Point | None
    confidence: float
    mass: float
    coherence: float
    spread_mm: float | None
    region95_mm: float | None
    disagreement_mm: float | None
    expected_ras_mm: Point | None
    candidates: tuple[Candidate, ...]


@dataclass(frozen=True, slots=True)
class _Verdict:
    """What all landmarks together say about one of them.

    Attributes:
        mode: The mode that answers; -1 if there is none.
        has_say: Whether the model's shape knows this landmark.
        expected_mm: Where the fitted shape expects it; None without a fit.
        agrees: Whether the mode is where the shape expects it.
        shown: Whether enough landmarks of those that the scan should show agree.
    """

    mode: int
    has_say: bool
    expected_mm: Point | None
    agrees: bool
    shown: bool


@dataclass(frozen=True, slots=True)
class _Places:
    """Where all modes are, and how they look there.

    Attributes:
        ijk: In voxels of the uploaded array.
        ras_mm: In mm, RAS.
        inside: Whether the place lies in the volume.
        spread_mm: As of a landmark.
        disagreement_mm: As of a landmark.
    """

    ijk: Float64[np.ndarray, "landmarks modes 3"]
    ras_mm: Float64[np.ndarray, "landmarks modes 3"]
    inside: Bool[np.ndarray, "landmarks modes"]
    spread_mm: Float64[np.ndarray, "landmarks modes"]
    disagreement_mm: Float64[np.ndarray, "landmarks modes"]


def locate(
    votes: Votes,
    readout: Readout,
    frame: GridFrame,
    specs: Sequence[LandmarkSpec],
    shape: Shape | None = None,
) -> tuple[Landmark, ...]:
    """Read the landmarks of a scan from its votes.

    Args:
        votes: All votes of all tiles of the scan, in any order.
        readout: The grid that they point into, and the voting radius.
        frame: Where that grid lies.
        specs: Name and presence threshold of every landmark.
        shape: The landmarks' mean constellation, in the order of ``specs``; None if unknown.

    Returns:
        One landmark per spec, in their order.
    """
    votes = votes_of_scan(votes, readout)
    count = shape.modes if shape else MODES
    modes = find_modes(votes, readout, count)
    places = _place(modes, readout, frame)
    verdicts = _judge(modes, places, specs, shape)
    if not _are_shown(verdicts, readout, frame):
        verdicts = [replace(verdict, shown=False) for verdict in verdicts]
    return tuple(
        _describe(spec, modes, places, index, verdict)
        for index, (spec, verdict) in enumerate(zip(specs, verdicts, strict=True))
    )


def confidence_of(mass: float, coherence: float, threshold: float) -> float:
    """Say how sure a landmark's presence is, in [0, 1]; see 'Presence'."""
    if mass <= 0.0:
        return 0.0
    doubt = threshold / mass
    return min(1 / (1 + doubt * doubt), coherence)


def _place(modes: Modes, readout: Readout, frame: GridFrame) -> _Places:
    """Say where all modes are."""
    from_source = (modes.position - modes.source) * np.array(readout.spacing_mm)
    return _Places(
        ijk=transform(frame.to_volume, modes.position),
        ras_mm=transform(frame.to_world, modes.position),
        inside=readout.holds(modes.position),
        spread_mm=np.sqrt(np.trace(modes.covariance_mm2, axis1=2, axis2=3)),
        disagreement_mm=np.linalg.norm(from_source, axis=2),
    )


def _judge(
    modes: Modes, places: _Places, specs: Sequence[LandmarkSpec], shape: Shape | None
) -> list[_Verdict]:
    """Choose the mode of every landmark: the one that fits the shape, else the heaviest."""
    heaviest = np.where(modes.weight[:, 0] > 0, 0, -1)
    if shape is None or shape.knows().sum() < LEAST_LANDMARKS:
        return [_Verdict(int(mode), False, None, False, True) for mode in heaviest]
    thresholds = np.array([spec.presence_threshold for spec in specs])
    strength = np.minimum(modes.mass / np.maximum(thresholds, 1e-6)[:, None], 1.0)
    fit = fit_constellation(places.ras_mm, strength, shape)
    return [
        _verdict(int(mode), bool(knows), fit, c)
        for c, (mode, knows) in enumerate(zip(heaviest, shape.knows(), strict=True))
    ]


def _verdict(heaviest: int, knows: bool, fit: Constellation | None, index: int) -> _Verdict:
    if not knows or fit is None:
        return _Verdict(heaviest, knows, None, False, True)
    choice = int(fit.choice[index])
    mode = choice if choice >= 0 else heaviest
    return _Verdict(mode, True, fit.expected_mm[index], choice >= 0, True)


def _are_shown(verdicts: Sequence[_Verdict], readout: Readout, frame: GridFrame) -> bool:
    """Say whether enough landmarks agree of those that the fitted shape expects in the scan."""
    expected = [verdict.expected_mm for verdict in verdicts if verdict.expected_mm is not None]
    if not expected:
        return True
    due = readout.holds(transform(np.linalg.inv(frame.to_world), np.stack(expected)))
    agree = np.array([verdict.agrees for verdict in verdicts if verdict.expected_mm is not None])
    return bool((agree & due).sum() >= SHOWN * due.sum())


def _describe(
    spec: LandmarkSpec, modes: Modes, places: _Places, index: int, verdict: _Verdict
) -> Landmark:
    """Say everything about one landmark."""
    answer = (index, verdict.mode)
    exists = verdict.mode >= 0
    mass = float(modes.mass[answer]) if exists else 0.0
    coherence = float(modes.coherence[answer]) if exists else 0.0
    status = _status(spec, verdict, mass, coherence, inside=bool(places.inside[answer]))
    placed = status in ("detected", "low_confidence")
    confidence = confidence_of(mass, 1.0 if verdict.agrees else coherence, spec.presence_threshold)
    if verdict.has_say:
        # Each doubt halves it, so that what agrees keeps its lead where nothing is believed.
        confidence /= (1 if verdict.agrees else 2) * (1 if verdict.shown else 2)
    return Landmark(
        name=spec.name,
        description=spec.description,
        status=status,
        ijk=places.ijk[answer] if placed else None,
        ras_mm=places.ras_mm[answer] if placed else None,
        confidence=confidence,
        mass=mass,
        coherence=coherence,
        spread_mm=float(places.spread_mm[answer]) if placed else None,
        region95_mm=spec.region95_mm if status == "detected" else None,
        disagreement_mm=float(places.disagreement_mm[answer]) if placed else None,
        expected_ras_mm=None if placed and verdict.agrees else verdict.expected_mm,
        candidates=_candidates(spec, modes, places, index, verdict.mode) if placed else (),
    )


def _status(
    spec: LandmarkSpec, verdict: _Verdict, mass: float, coherence: float, *, inside: bool
) -> Status:
    """Apply the rules of 'Presence'."""
    strong = mass >= spec.presence_threshold
    agrees = verdict.agrees and verdict.shown
    believed = agrees if verdict.has_say else coherence >= COHERENT
    if verdict.mode < 0 or mass < FAINT * spec.presence_threshold:
        return "not_found"
    if not inside:
        return "out_of_field" if strong and believed else "not_found"
    if strong and believed:
        return "detected"
    elsewhere = verdict.expected_mm is not None and not verdict.agrees
    return "not_found" if elsewhere and not strong else "low_confidence"


def _candidates(
    spec: LandmarkSpec, modes: Modes, places: _Places, index: int, answer: int
) -> tuple[Candidate, ...]:
    """List the modes that may be the landmark, the answer first, then by mass."""
    mass = modes.mass[index]
    order = sorted(range(len(mass)), key=lambda mode: (mode != answer, -mass[mode]))
    return tuple(
        Candidate(places.ijk[index, mode], places.ras_mm[index, mode], float(mass[mode]))
        for mode in order
        if places.inside[index, mode] and mass[mode] >= max(FAINT * spec.presence_threshold, 1e-9)
    )

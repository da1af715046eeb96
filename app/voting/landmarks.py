"""Modes -> Landmarks: where they are, whether they are present, and how sure that is.

Presence
--------
``mass`` is the vote weight within reach (0.6 of the voting radius) of an estimate, divided by the
number of field voxels that could have voted for it: those within the voting radius that lie in the
volume. Where a landmark is present, its mass is near the network's mean probability, whether or not
the border cuts its sphere. ``coherence`` is the share of the landmark's whole vote weight that lies
within reach.

The voxels of a heatmap vote for themselves: its reach is 1.25 times the radius, and mass 1 is
that of a Gaussian which has fallen to the threshold there. Where a network answers coordinates, a
landmark has one mode, whose mass is the presence that the network answers, or 1.

The answer is the heaviest mode. If the model has a shape that at least four landmarks can be fitted
to, it is the mode nearest to the position that the fitted shape expects, within the shape's
tolerance: that mode *agrees*. With t the landmark's presence threshold, the first rule that
applies:

- ``not_found``: there is no mode, or its mass is under a quarter of t.
- ``out_of_field``: the answer lies outside the volume, has a mass of at least t, and is
  *supported*.
- ``not_found``: it lies outside the volume otherwise; or the shape was fitted, expects it
  elsewhere, and its mass is under t.
- ``detected``: its mass is at least t, and it is supported.
- ``low_confidence``: everything else.

An answer is supported if it agrees with the fitted shape or, for a landmark that is in no shape, if
its coherence is at least a half. Where the model has a shape but it could not be fitted, no
landmark of the shape is supported; nor is any if the fit is implausible: some modes of any scan fit
by chance. It is where fewer landmarks agree with it, in the scan and with at least a quarter of t,
than half of those that it expects there; or than five, or a fifth of the shape's where that is
less.

Confidence is ``min(m^2 / (m^2 + t^2), c)``, with mass m and coherence c: 0.5 at the presence
threshold, and never more than the share of votes that agree. c is 1 for an answer that agrees with
the shape. Confidence is halved for an answer of the shape that does not agree with it, and halved
again if the fit is implausible: so detected means at least 0.5, and low_confidence with a shape
means less.

Where the shape also fits modes elsewhere with nearly as much mass, landmarks have a *rival*, unless
the fit is implausible: beside so few modes, the false ones of what was cut away are many. A rival
changes no status here; ``app.inference.doubts`` doubts them all once both networks have run.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from jaxtyping import Bool, Float64

from app.errors import BadParameter
from app.geometry import Points, transform
from app.io import Status
from app.model import LandmarkSpec, Shape
from app.shapes import MIN_LANDMARKS
from app.voting.constellation import (
    Constellation,
    Rival,
    Shows,
    find_rival,
    fit_constellation,
)
from app.voting.modes import Modes, drop_padding, find_modes
from app.voting.readout import GridFrame, Readout
from app.voting.votes import Votes

MIN_RELATIVE_MASS: Final = 0.25
"""A mode with less than this share of the presence threshold is no candidate and no answer."""

MIN_COHERENCE: Final = 0.5
"""Least coherence of an answer that no shape supports: most votes are for this mode."""

MIN_SHOWN: Final = 0.5
"""Landmarks that must be found where a fit expects them for it to be plausible, over those that it
expects in the scan. In halves of unseen mouse skulls that were posed rightly it was at least
0.8."""

MIN_FOUND: Final = 5
"""Landmarks that must be so, however few it expects. In slabs of mouse skulls, of 45 landmarks,
whatever was found agreed on some pose by fours, up to 20 mm off, and by fives or more on the right
one."""

MIN_SHARE: Final = 0.2
"""With this share of a shape's landmarks, fewer are enough: of few, fewer agree by chance."""

DEFAULT_MODES: Final = 4
"""Modes per landmark where the model's shape does not say how many."""

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
    """One landmark of one scan. What cannot be known is None; an absent landmark has no position.

    Attributes:
        name: As in the manifest.
        description: As in the manifest.
        status: Whether it was found.
        ijk: In voxels of the uploaded array; None unless detected or low_confidence.
        ras_mm: In mm, RAS; likewise.
        confidence: In [0, 1]: 0.5 at the presence threshold, monotone in mass and coherence.
        mass: See 'Presence' in ``app.voting.landmarks``; of the heaviest mode if nothing was found.
        coherence: Share of the landmark's vote weight that lies within reach; likewise.
        spread_mm: Root mean square distance of the votes within reach from the estimate. Spread,
            not an error bar. Of heatmaps, their width; of coordinates, as the network's variance
            says, None without.
        region95_mm: Radius that held 95 % of held-out errors; see ``app.inference.regions``. None
            if the model is not calibrated, or not for landmarks this near to the scan's border.
        from_shape_mm: Distance from where the fitted shape expects it; None if it does not.
        disagreement_mm: Distance between the estimate and the centroid of the probabilities; None
            where the network answers coordinates.
        expected_ras_mm: Where the fitted shape expects it, if that differs from the answer by more
            than the tolerance or no mode agrees; None otherwise.
        candidates: Modes inside the volume that are candidates by their mass, the answer first,
            then by mass; empty where there is no answer.
        rival: Another arrangement of all landmarks that has nearly as many votes; None: none.
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
    rival: Rival | None = None
    from_shape_mm: float | None = None


@dataclass(frozen=True, slots=True)
class _Choice:
    """The mode chosen for a landmark, and what the shape says about it.

    Attributes:
        mode: The mode; -1 if there is none.
        in_shape: Whether the landmark is in the model's shape.
        expected_mm: Where the fitted shape expects it; None without a fit.
        agrees: Whether the mode is where the shape expects it.
        plausible: Whether enough landmarks agree with the fit.
    """

    mode: int
    in_shape: bool = False
    expected_mm: Point | None = None
    agrees: bool = False
    plausible: bool = True


@dataclass(frozen=True, slots=True)
class _Positions:
    """Where all modes are, and how their votes scatter.

    Attributes:
        ijk: In voxels of the uploaded array.
        ras_mm: In mm, RAS.
        inside: Whether the position lies in the volume.
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
    """Find the landmarks of a scan in its votes.

    Args:
        votes: All votes of all tiles of the scan, in any order.
        readout: The grid that they point into, and the voting radius.
        frame: Where that grid lies.
        specs: Name and presence threshold of every landmark.
        shape: The landmarks' mean constellation, in the order of ``specs``; None if unknown.

    Returns:
        One landmark per spec, in their order.

    Raises:
        BadParameter: Votes, read-out and specs are not of the same number of landmarks.
    """
    if len(specs) != readout.landmarks:
        raise BadParameter(
            f"expected specs for {readout.landmarks} landmarks, as are read out, got {len(specs)}"
        )
    votes = drop_padding(votes.cpu(), readout)
    modes = find_modes(votes, readout, shape.modes if shape else DEFAULT_MODES)
    positions = _position(modes, readout, frame)
    from_world = np.linalg.inv(frame.to_world)

    def shows(points_mm: Points) -> Bool[np.ndarray, "*n"]:
        return readout.contains(transform(from_world, points_mm))

    choices, rival = _choose_modes(modes, positions, specs, shape, shows)
    if not _is_plausible(choices, modes, positions, specs, shows):
        choices, rival = [replace(choice, plausible=False) for choice in choices], None
    return tuple(
        _describe(spec, modes, positions, index, choice, rival)
        for index, (spec, choice) in enumerate(zip(specs, choices, strict=True))
    )


def positions_of(landmarks: Sequence[Landmark]) -> Points:
    """List where landmarks are, in mm, RAS; NaN where they have no position."""
    missing = np.full(3, np.nan)
    positions = [missing if one.ras_mm is None else one.ras_mm for one in landmarks]
    return np.array(positions, dtype=np.float64).reshape(-1, 3)


def confidence_of(mass: float, coherence: float, threshold: float) -> float:
    """Compute how sure a landmark's presence is, in [0, 1]; see 'Presence'."""
    if mass <= 0.0:
        return 0.0
    doubt = threshold / mass
    return min(1 / (1 + doubt * doubt), coherence)


def _position(modes: Modes, readout: Readout, frame: GridFrame) -> _Positions:
    """Map all modes to the volume and to the world."""
    from_source = (modes.position - modes.source) * np.array(readout.spacing_mm)
    spread = np.sqrt(np.trace(modes.covariance_mm2, axis1=2, axis2=3))
    disagreement = np.linalg.norm(from_source, axis=2)
    if readout.votes_each is not None:  # Of networks that answer coordinates.
        disagreement = np.full_like(disagreement, np.nan)
    if readout.votes_each == 1:
        spread = np.full_like(spread, np.nan)
    return _Positions(
        ijk=transform(frame.to_volume, modes.position),
        ras_mm=transform(frame.to_world, modes.position),
        inside=readout.contains(modes.position),
        spread_mm=spread,
        disagreement_mm=disagreement,
    )


def _choose_modes(
    modes: Modes,
    positions: _Positions,
    specs: Sequence[LandmarkSpec],
    shape: Shape | None,
    shows: Shows,
) -> tuple[list[_Choice], Rival | None]:
    """Choose the mode of every landmark: the one that fits the shape, else the heaviest.

    Returns:
        The choices, and what rivals them.
    """
    heaviest = np.where(modes.weight[:, 0] > 0, 0, -1)
    if shape is None or shape.known.sum() < MIN_LANDMARKS:
        return [_Choice(int(mode)) for mode in heaviest], None
    thresholds = np.array([spec.presence_threshold for spec in specs])
    strength = np.minimum(modes.mass / np.maximum(thresholds, 1e-6)[:, None], 1.0)
    fit = fit_constellation(positions.ras_mm, strength, shape, shows)
    choices = [
        _choose_mode(int(mode), bool(in_shape), fit, index)
        for index, (mode, in_shape) in enumerate(zip(heaviest, shape.known, strict=True))
    ]
    return choices, find_rival(fit, positions.ras_mm, modes.mass, shape) if fit else None


def _choose_mode(heaviest: int, in_shape: bool, fit: Constellation | None, index: int) -> _Choice:
    if not in_shape or fit is None:
        return _Choice(heaviest, in_shape)
    choice = int(fit.choice[index])
    agrees = choice >= 0
    return _Choice(choice if agrees else heaviest, True, fit.expected_mm[index], agrees)


def _is_plausible(
    choices: Sequence[_Choice],
    modes: Modes,
    positions: _Positions,
    specs: Sequence[LandmarkSpec],
    shows: Shows,
) -> bool:
    """Test whether enough landmarks in the scan agree with the fitted shape; see 'Presence'."""
    expected = [choice.expected_mm for choice in choices if choice.expected_mm is not None]
    if not expected:
        return True
    answers = np.arange(len(choices)), np.array([choice.mode for choice in choices])
    least = MIN_RELATIVE_MASS * np.array([spec.presence_threshold for spec in specs])
    agrees = np.array([choice.agrees for choice in choices])
    found = agrees & positions.inside[answers] & (modes.mass[answers] >= least)
    least_found = min(MIN_FOUND, MIN_SHARE * len(expected))
    return bool(found.sum() >= max(MIN_SHOWN * shows(np.stack(expected)).sum(), least_found))


def _describe(
    spec: LandmarkSpec,
    modes: Modes,
    positions: _Positions,
    index: int,
    choice: _Choice,
    rival: Rival | None,
) -> Landmark:
    """Derive everything known about one landmark."""
    answer = (index, choice.mode)
    # Where there is no mode, both are 0.
    mass, coherence = float(modes.mass[answer]), float(modes.coherence[answer])
    status = _status(spec, choice, mass, coherence, inside=bool(positions.inside[answer]))
    found = status in ("detected", "low_confidence")
    confidence = confidence_of(mass, 1.0 if choice.agrees else coherence, spec.presence_threshold)
    if choice.in_shape:
        # Halved for each doubt, so that what agrees stays ahead even if nothing is supported.
        confidence /= (1 if choice.agrees else 2) * (1 if choice.plausible else 2)
    ras_mm = positions.ras_mm[answer] if found else None
    off_mm = None
    if ras_mm is not None and choice.expected_mm is not None:
        away = ras_mm - choice.expected_mm
        off_mm = math.sqrt(away @ away)
    return Landmark(
        name=spec.name,
        description=spec.description,
        status=status,
        ijk=positions.ijk[answer] if found else None,
        ras_mm=ras_mm,
        confidence=confidence,
        mass=mass,
        coherence=coherence,
        spread_mm=_known(positions.spread_mm[answer]) if found else None,
        region95_mm=spec.region95_mm if status == "detected" else None,
        disagreement_mm=_known(positions.disagreement_mm[answer]) if found else None,
        expected_ras_mm=None if found and choice.agrees else choice.expected_mm,
        candidates=_candidates(spec, modes, positions, answer) if found else (),
        rival=rival,
        from_shape_mm=off_mm,
    )


def _known(number: float) -> float | None:
    return None if math.isnan(number) else float(number)


def _status(
    spec: LandmarkSpec, choice: _Choice, mass: float, coherence: float, *, inside: bool
) -> Status:
    """Apply the rules of 'Presence'."""
    present = mass >= spec.presence_threshold
    agrees = choice.agrees and choice.plausible
    supported = agrees if choice.in_shape else coherence >= MIN_COHERENCE
    if choice.mode < 0 or mass < MIN_RELATIVE_MASS * spec.presence_threshold:
        return "not_found"
    if not inside:
        return "out_of_field" if present and supported else "not_found"
    if present and supported:
        return "detected"
    elsewhere = choice.expected_mm is not None and not choice.agrees
    return "not_found" if elsewhere and not present else "low_confidence"


def _candidates(
    spec: LandmarkSpec, modes: Modes, positions: _Positions, answer: tuple[int, int]
) -> tuple[Candidate, ...]:
    """List the modes that may be the landmark, the answer first, then by mass."""
    landmark, chosen = answer
    mass, inside = modes.mass[landmark].tolist(), positions.inside[landmark].tolist()
    least = max(MIN_RELATIVE_MASS * spec.presence_threshold, 1e-9)
    candidates = [mode for mode in range(len(mass)) if inside[mode] and mass[mode] >= least]
    candidates.sort(key=lambda mode: (mode != chosen, -mass[mode]))
    return tuple(
        Candidate(positions.ijk[landmark, mode], positions.ras_mm[landmark, mode], mass[mode])
        for mode in candidates
    )

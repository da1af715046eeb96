"""Modes -> similarities of the mean shape, compiled: the loops of ``app.voting.constellation``.

Fits are affines, (fits 4 4), mean shape -> scan. They are those of ``app.shapes.fit_similarity``,
with a rotation that is found as a quaternion, which small loops can: B. K. P. Horn, "Closed-form
solution of absolute orientation using unit quaternions", J. Opt. Soc. Am. A 4 (1987).
"""

from typing import Final

import numpy as np

from app.compute import numba_jit

SWEEPS: Final = 30
"""Most sweeps of Jacobi's method, which converges in some four."""

ROUNDING: Final = 1e-15
"""Off-diagonal numbers this small, as a share of the largest, are 0: rounding may keep them from
getting smaller."""


@numba_jit
def fit_subsets(mean, cloud, landmark, mode, weight, bounds):
    """Fit the mean shape to a mode each of some landmarks, several times.

    Args:
        mean: The mean shape, (landmarks 3).
        cloud: All modes, (landmarks modes 3).
        landmark: The landmarks of each fit, (fits subset).
        mode: Which mode of each of them, (fits subset).
        weight: How much each of them counts, (fits subset).
        bounds: Least and greatest scale.
    """
    fits = np.zeros((len(landmark), 4, 4))
    fits[:, 3, 3] = 1.0
    count = landmark.shape[1]
    source, target = np.empty((count, 3)), np.empty((count, 3))
    for fit in range(len(fits)):
        for index in range(count):
            one = landmark[fit, index]
            for axis in range(3):
                source[index, axis] = mean[one, axis]
                target[index, axis] = cloud[one, mode[fit, index], axis]
        _fit(source, target, weight[fit], bounds, fits[fit])
    return fits


@numba_jit
def refine(fits, mean, cloud, weight, widths, bounds):
    """Refit each fit to the modes nearest to it, reselecting them as it moves.

    Args:
        fits: As of ``fit_subsets``; they are changed.
        mean: The mean shape, (landmarks 3).
        cloud: All modes, (landmarks modes 3).
        weight: How much each mode counts, (landmarks modes).
        widths: Width of the Geman-McClure weight in each step, in mm.
        bounds: Least and greatest scale.
    """
    target, robust = np.empty(mean.shape), np.empty(len(mean))
    for fit in range(len(fits)):
        for width in widths:
            for landmark in range(len(mean)):
                near, least = 0, np.inf
                for mode in range(cloud.shape[1]):
                    square = _square_distance(fits[fit], mean[landmark], cloud[landmark, mode])
                    if square < least:
                        near, least = mode, square
                for axis in range(3):
                    target[landmark, axis] = cloud[landmark, near, axis]
                robust[landmark] = weight[landmark, near] / (1 + least / width**2) ** 2
            _fit(mean, target, robust, bounds, fits[fit])


@numba_jit
def score(fits, mean, cloud, weight, width):
    """Sum the weight of the modes that agree with each fit, less the further they are off.

    Args:
        fits: As of ``fit_subsets``.
        mean: The mean shape, (landmarks 3).
        cloud: All modes, (landmarks modes 3).
        weight: How much each mode counts, (landmarks modes).
        width: Width of the Geman-McClure weight, in mm.
    """
    scores = np.zeros(len(fits))
    for fit in range(len(fits)):
        for landmark in range(len(mean)):
            most = 0.0
            for mode in range(cloud.shape[1]):
                square = _square_distance(fits[fit], mean[landmark], cloud[landmark, mode])
                most = max(most, weight[landmark, mode] / (1 + square / width**2) ** 2)
            scores[fit] += most
    return scores


@numba_jit
def _square_distance(fit, point, target):
    total = 0.0
    for axis in range(3):
        a, b, c, first = fit[axis]
        total += (a * point[0] + b * point[1] + c * point[2] + first - target[axis]) ** 2
    return total


@numba_jit
def _fit(source, target, weight, bounds, to_target):
    """Fit the similarity that maps source to target with the least weighted square error."""
    share = weight / weight.sum()
    source_mean, target_mean = np.zeros(3), np.zeros(3)
    # Number by number, as expressions of arrays allocate some.
    for point in range(len(share)):
        for a in range(3):
            source_mean[a] += share[point] * source[point, a]
            target_mean[a] += share[point] * target[point, a]
    covariance, variance = np.zeros((3, 3)), 0.0
    for point in range(len(share)):
        for a in range(3):
            centred = share[point] * (source[point, a] - source_mean[a])
            variance += centred * (source[point, a] - source_mean[a])
            for b in range(3):
                covariance[a, b] += centred * (target[point, b] - target_mean[b])
    rotation, agreement = _rotate(covariance)
    scale = min(max(agreement / max(variance, 1e-12), bounds[0]), bounds[1])
    for a in range(3):
        to_target[a, 3] = target_mean[a]
        for b in range(3):
            to_target[a, b] = scale * rotation[a, b]
            to_target[a, 3] -= scale * rotation[a, b] * source_mean[b]


@numba_jit
def _rotate(s):
    """Find the rotation R with the largest trace of ``R s``, and that trace: Horn's section 4."""
    n = np.empty((4, 4))
    n[0, 0] = s[0, 0] + s[1, 1] + s[2, 2]
    for a in range(3):
        b, c = (a + 1) % 3, (a + 2) % 3
        n[0, a + 1] = n[a + 1, 0] = s[b, c] - s[c, b]
        n[a + 1, a + 1] = s[a, a] - s[b, b] - s[c, c]
        n[a + 1, b + 1] = n[b + 1, a + 1] = s[a, b] + s[b, a]
    vectors = _diagonalise(n)
    largest = np.argmax(np.diag(n))
    w, x, y, z = vectors[:, largest]
    rotation = np.array(
        [
            [w * w + x * x - y * y - z * z, 2 * (x * y - w * z), 2 * (x * z + w * y)],
            [2 * (x * y + w * z), w * w - x * x + y * y - z * z, 2 * (y * z - w * x)],
            [2 * (x * z - w * y), 2 * (y * z + w * x), w * w - x * x - y * y + z * z],
        ]
    )
    return rotation, n[largest, largest]


@numba_jit
def _diagonalise(matrix):
    """Make a symmetric matrix diagonal, in place, by Jacobi's rotations; gives its eigenvectors."""
    size = len(matrix)
    vectors = np.eye(size)
    for _ in range(SWEEPS):
        most = most_off = 0.0
        for p in range(size):
            for q in range(size):
                most = max(most, abs(matrix[p, q]))
                if p != q:
                    most_off = max(most_off, abs(matrix[p, q]))
        if most_off <= ROUNDING * most:
            break
        for p in range(size - 1):
            for q in range(p + 1, size):
                if matrix[p, q] == 0.0:
                    continue
                # The smaller of the two angles that make this number 0, by its tangent.
                cotangent = (matrix[q, q] - matrix[p, p]) / (2 * matrix[p, q])
                tangent = 1 / (abs(cotangent) + np.sqrt(cotangent * cotangent + 1))
                c = 1 / np.sqrt(tangent * tangent + 1)
                s = tangent * c if cotangent >= 0 else -tangent * c
                for k in range(size):
                    low, high = matrix[k, p], matrix[k, q]
                    matrix[k, p], matrix[k, q] = c * low - s * high, s * low + c * high
                for k in range(size):
                    low, high = matrix[p, k], matrix[q, k]
                    matrix[p, k], matrix[q, k] = c * low - s * high, s * low + c * high
                for k in range(size):
                    low, high = vectors[k, p], vectors[k, q]
                    vectors[k, p], vectors[k, q] = c * low - s * high, s * low + c * high
    return vectors

"""Votes of heatmaps -> sums for the fit of a Gaussian around each mode, compiled.

Every term is a whole number of fixed-point units and every sum stays below 2^53, so float64 holds
each sum exactly and the order of the votes changes no bit.
"""

from typing import Final

import numpy as np

from app.compute import numba_jit

COEFFICIENTS: Final = 5
"""Of the logarithm of a Gaussian: 1, x, y, z, and the square of the distance."""


@numba_jit
def sum_logarithms(landmark, columns, centres, unit, ones):
    """Sum the normal equations of the logarithm of heatmaps, over the votes within reach of modes.

    The logarithm has an error of 1 / p times that of the value p, so p^2 is its weight.

    Args:
        landmark: Landmark of each vote.
        columns: Of ``Votes``.
        centres: Centres of the modes, (landmarks modes 3), in reaches; NaN where there is none.
        unit: Reaches per grid voxel along each axis.
        ones: Fixed-point units of a weight of 1 in the sums of each mode, (landmarks modes).

    Returns:
        Products of 1, x, y, z and the square of the distance, in reaches, with each other and, in
        the last column, with the logarithm, (landmarks modes 5 6).
    """
    sums = np.zeros((*centres.shape[:2], COEFFICIENTS, COEFFICIENTS + 1))
    terms = np.ones(COEFFICIENTS + 1)
    for vote in range(len(landmark)):
        probability = np.float64(columns[6, vote])
        importance = probability * columns[7, vote]
        terms[5] = np.log(probability)
        for mode in range(centres.shape[1]):
            square = 0.0
            for axis in range(3):
                at = columns[3 + axis, vote] * unit[axis] - centres[landmark[vote], mode, axis]
                terms[1 + axis] = at
                square += at * at
            terms[4] = square
            if square <= 1.0:  # As NaN is not.
                table = sums[landmark[vote], mode]
                weight = importance * ones[landmark[vote], mode]
                for row in range(COEFFICIENTS):
                    for column in range(row, COEFFICIENTS + 1):
                        table[row, column] += np.rint(weight * terms[row] * terms[column])
    for row in range(COEFFICIENTS):
        for column in range(row):
            sums[..., row, column] = sums[..., column, row]
    return sums

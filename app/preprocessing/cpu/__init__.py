"""The filters of preprocessing compiled for the CPU by Numba; ``app.preprocessing`` calls them.

Functions that are compiled have no annotations: their types are those of their first call, and they
take tuples, as they know no other structures. Where lines are short they index arrays and take no
views of them: to count a view's references costs more than to filter a line of 200 voxels.

slabs       a scan of any type -> some planes of it in float32
resampling  two axes of a scan, each by a matrix
smoothing   all axes of a scan, each by a Gaussian
sampling    values between voxels
"""

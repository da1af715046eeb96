"""The stages of voting compiled for the CPU by Numba; ``app.voting`` calls them.

Functions that are compiled have no annotations: their types are those of their first call, and they
take tuples, as they know no other structures.

plan           a field's memory, and in which order its scores are read
activations    scores -> probabilities
rows           scores -> candidate voxels: the loops that read all scores
votes          candidate voxels -> votes, or rows of votes
heatmaps       votes -> sums per voxel
peaks          votes -> groups by landmark -> cells -> peaks
modes          votes -> sums around modes
gaussians      votes of heatmaps -> sums for Gaussians around modes
constellation  modes -> similarities of the mean shape
"""

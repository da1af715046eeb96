"""From a network's output to landmarks: votes, the modes they agree on, and which are present.

A network gives a probability p and an offset d at every voxel u, for every landmark: a **vote** for
the position x = u + d. Votes with p below a threshold are dropped, and few are left. The votes of a
landmark are counted in sparse, coarse cells, whose highest are **peaks**. From a peak, mean shift
moves to a **mode**, a position m around which much vote weight lies:

    m <- sum w x / sum w    over the votes within reach of m, until m stands still,

where w is p times the importance of the vote's voxel in its tile. The weight per voxel that could
have voted says whether the **landmark** is present. The voxels of a network's heatmaps vote for
themselves, and its coordinates are votes: only how modes are read from them differs. If a landmark
has several modes, the mean shape of all landmarks, fitted by a robust similarity, says which one it
is.

    Field -> Votes -> peaks -> Modes -> Landmarks
               |
               +----> rows, heatmaps: outputs that no landmark is read from

votes          Field -> Votes, or rows of votes
overlaps       Heatmaps of tiles that overlap -> votes of their mean
reference      what is computed there, in plain torch: compiled code is tested against it
peaks, modes   Votes -> peaks of sparse cells -> Modes
constellation  Modes -> the mode of each landmark that agrees with the mean shape
landmarks      Modes -> Landmarks: position, presence, confidence
readout        the grid that votes point into, and how modes are read
heatmaps       Votes -> dense heatmaps
arrays         arrays of any network -> Field, checked
archives       safetensors and npz files -> arrays
export         Votes -> files
cpu            these stages compiled by Numba
cuda           the filter of votes by kernels in Triton
"""

from app.model import LandmarkSpec
from app.voting.archives import Archive, count_array_bytes, read_archive
from app.voting.arrays import (
    Layout,
    check_affine,
    check_values,
    filter_in_blocks,
    make_field,
)
from app.voting.constellation import fit_constellation
from app.voting.export import VOTES_FORMATS, VotesFormat, write_heatmaps, write_volumes
from app.voting.heatmaps import aggregate, kernel_of
from app.voting.landmarks import (
    Candidate,
    Landmark,
    Point,
    locate,
    positions_of,
)
from app.voting.overlaps import DenseMean, SparseMean, WeightedTile, mean_of
from app.voting.readout import GridFrame, Readout, make_readout
from app.voting.reference import Placement
from app.voting.votes import Votes, concat_votes, filter_rows, filter_votes, launch_filter

__all__ = [
    "VOTES_FORMATS", "Archive", "Candidate", "DenseMean", "GridFrame",
    "Landmark", "LandmarkSpec", "Layout", "Placement", "Point", "Readout",
    "SparseMean", "Votes", "VotesFormat", "WeightedTile", "aggregate",
    "check_affine", "check_values", "concat_votes", "count_array_bytes",
    "filter_in_blocks",
    "filter_rows", "filter_votes",
    "fit_constellation", "kernel_of", "launch_filter", "locate", "make_field",
    "make_readout", "mean_of", "positions_of", "read_archive",
    "write_heatmaps", "write_volumes",
]  # fmt: skip

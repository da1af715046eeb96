"""app/voting."""

from app.model import LandmarkSpec
from app.voting.archives import Archive, read_archive
from app.voting.arrays import (
    Layout,
    check_affine,
    check_values,
    filter_rows_in_blocks,
    filter_votes_in_blocks,
    make_field,
)
from app.voting.constellation import (
    LEAST_LANDMARKS,
    SCALE_BOUNDS,
    Shape,
    Similarity,
    fit_constellation,
    fit_similarity,
    mean_shape,
)
from app.voting.export import VOTES_FORMATS, VotesFormat, write_heatmaps
from app.voting.heatmaps import aggregate
from app.voting.landmarks import Candidate, Landmark, Point, Status, locate
from app.voting.readout import GridFrame, Readout, readout_of
from app.voting.votes import Votes, begin_votes, concat_votes, filter_rows, filter_votes

__all__ = [
    "LEAST_LANDMARKS",
    "SCALE_BOUNDS",
    "VOTES_FORMATS",
    "Archive",
    "Candidate",
    "GridFrame",
    "Landmark",
    "LandmarkSpec",
    "Layout",
    "Point",
    "Readout",
    "Shape",
    "Similarity",
    "Status",
    "Votes",
    "VotesFormat",
    "aggregate",
    "begin_votes",
    "check_affine",
    "check_values",
    "concat_votes",
    "filter_rows",
    "filter_rows_in_blocks",
    "filter_votes",
    "filter_votes_in_blocks",
    "fit_constellation",
    "fit_similarity",
    "locate",
    "make_field",
    "mean_shape",
    "read_archive",
    "readout_of",
    "write_heatmaps",
]

"""app/inference."""

from app.inference.answers import build_answer, reference, timing_of
from app.inference.batch_runner import Flight, end, named, start
from app.inference.detector import Detection, Detector, StageTimes, describe, stage_times
from app.inference.forward import launch, settle
from app.inference.load import check_again, load_checked
from app.inference.pose import index_grid, pose_of, sample_at, smooth_for
from app.inference.refinement import SecondLook
from app.inference.scan_state import Case
from app.inference.verification import Verification, verify_precisions
from app.inference.votes_request import VotesQuestion, answer_votes

__all__ = [
    "Case",
    "Detection",
    "Detector",
    "Flight",
    "SecondLook",
    "StageTimes",
    "Verification",
    "VotesQuestion",
    "answer_votes",
    "build_answer",
    "check_again",
    "describe",
    "end",
    "index_grid",
    "launch",
    "load_checked",
    "named",
    "pose_of",
    "reference",
    "sample_at",
    "settle",
    "smooth_for",
    "stage_times",
    "start",
    "timing_of",
    "verify_precisions",
]

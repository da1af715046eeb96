"""One scan on one device: passes of the networks, from a volume to landmarks.

forecast       a header -> tiles and memory that a scan will take
scan_state     one pass of a network over a scan, and what is kept of its tiles
scan_heatmaps  votes of a scan -> heatmaps on the grid of its file
forward        one forward pass over tiles of one or more scans
batch_runner   the same with faults contained: in smaller batches, tile by tile
refinement     the second-stage network, in the pose that the first stage has found
doubts         landmarks of scans that are unlike what the model was made for
regions        how far landmarks may be off: 95 % regions, wider where a scan is uncertain
detector       composes them: pass after pass; ``Detector.detect`` does it all for one scan
load           a model folder, which must pass its self-check
verification   how far landmarks shift when networks compute in a lower precision
precompile     compiles all loops before the first scan
votes_request  a file of a network's output -> its landmarks, votes or heatmaps
answers        detections -> the JSON that clients get
"""

from app.inference.answers import (
    answer_scan,
    build_answer,
    measure_answer,
    model_ref,
    timing_of,
)
from app.inference.batch_runner import (
    BatchReport,
    InFlightBatch,
    collect_batch,
    launch_batch,
    translate_out_of_memory,
)
from app.inference.detector import Detection, Detector, Located, StageTimes, conclude
from app.inference.forecast import Forecast, forecast
from app.inference.load import load_checked, self_check
from app.inference.precompile import compile_loops
from app.inference.regions import Uncertainty, combine, growth
from app.inference.scan_heatmaps import write_scan_heatmaps
from app.inference.scan_state import ScanState
from app.inference.verification import verify_precisions
from app.inference.votes_request import VotesRequest, answer_votes, forecast_votes

__all__ = [
    "BatchReport", "Detection", "Detector", "Forecast", "InFlightBatch", "Located", "ScanState",
    "StageTimes", "Uncertainty", "VotesRequest", "answer_scan", "answer_votes", "build_answer",
    "collect_batch", "combine", "compile_loops", "conclude", "forecast", "forecast_votes", "growth",
    "launch_batch", "load_checked", "measure_answer", "model_ref", "self_check",
    "timing_of", "translate_out_of_memory", "verify_precisions", "write_scan_heatmaps",
]  # fmt: skip

"""The bars, by the names that design and README use."""

from typing import Final

from tests.benchmarks.bars.accuracy import v8_accuracy
from tests.benchmarks.bars.bounds import s12_bounds
from tests.benchmarks.bars.chaos import chaos
from tests.benchmarks.bars.decoding import s4_decoding
from tests.benchmarks.bars.endurance import s7_endurance
from tests.benchmarks.bars.exactness import v7_same_bits
from tests.benchmarks.bars.fairness import s11_fairness
from tests.benchmarks.bars.filtering import v2_rows, v3_rows_and_heatmaps
from tests.benchmarks.bars.fuzzing import r2_fuzzing
from tests.benchmarks.bars.heatmap_readout import v9_heatmap_readout
from tests.benchmarks.bars.idling import s5_idling
from tests.benchmarks.bars.ingest import s3_ingest
from tests.benchmarks.bars.kinds import kinds
from tests.benchmarks.bars.landmarks import cost, v1_landmarks, v6_landmarks_on_cuda
from tests.benchmarks.bars.learning import learning, learning_skulls
from tests.benchmarks.bars.load import load
from tests.benchmarks.bars.memory import v5_memory
from tests.benchmarks.bars.phantoms import a1_phantoms
from tests.benchmarks.bars.repeats import r1_repeats
from tests.benchmarks.bars.replicas import s8_replicas
from tests.benchmarks.bars.sharing import s2_sharing
from tests.benchmarks.bars.shifting import v4_shift_and_sum
from tests.benchmarks.bars.skulls import a2_skulls, a3_poses, a4_regions, a5_presence
from tests.benchmarks.bars.spines import a6_spines, a7_other_scans, a8_lordosis
from tests.benchmarks.bars.starting import s6_starting
from tests.benchmarks.bars.throughput import s1_throughput, s10_overhead
from tests.benchmarks.bars.tiling import s9_tiling
from tests.benchmarks.bars.waterfall import waterfall
from tests.benchmarks.harness import Bar

BARS: Final[dict[str, Bar]] = {
    "V1": v1_landmarks,
    "V2": v2_rows,
    "V3": v3_rows_and_heatmaps,
    "V4": v4_shift_and_sum,
    "V5": v5_memory,
    "V6": v6_landmarks_on_cuda,
    "V7": v7_same_bits,
    "V8": v8_accuracy,
    "V9": v9_heatmap_readout,
    "A1": a1_phantoms,
    "A2": a2_skulls,
    "A3": a3_poses,
    "A4": a4_regions,
    "A5": a5_presence,
    "A6": a6_spines,
    "A7": a7_other_scans,
    "A8": a8_lordosis,
    "learning": learning,
    "learning-skulls": learning_skulls,
    "kinds": kinds,
    "cost": cost,
    "waterfall": waterfall,
    "S1": s1_throughput,
    "S2": s2_sharing,
    "S3": s3_ingest,
    "S4": s4_decoding,
    "S5": s5_idling,
    "S6": s6_starting,
    "S7": s7_endurance,
    "S8": s8_replicas,
    "S9": s9_tiling,
    "S10": s10_overhead,
    "S11": s11_fairness,
    "S12": s12_bounds,
    "load": load,
    "R1": r1_repeats,
    "R2": r2_fuzzing,
    "chaos": chaos,
}

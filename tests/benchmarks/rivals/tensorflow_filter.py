"""P1's arrays -> rows, in TensorFlow: the vectorised filter, compiled.

Arrays are arguments of the compiled function, not constants of its graph, which it would fold.
Without XLA: that pads what only data decides to its largest size, and was 90 times slower at 70³.
"""

import os
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # Read when TensorFlow is imported.
if find_spec("triton"):
    # torch's optimisers load it, and its LLVM ends a process in which TensorFlow's came first.
    import_module("triton._C.libtriton")

import numpy as np
import tensorflow as tf
from jaxtyping import Float32

from tests.benchmarks.fields import KnownCase

Rows = Float32[np.ndarray, "rows 5"]


def filter_rows(
    probs: tf.Tensor, offsets: tf.Tensor, threshold: tf.Tensor, sample_shape: tf.Tensor
) -> tf.Tensor:
    """Filter votes; only survivors' offsets are read."""
    probs = probs[..., 1:]
    landmarks = tf.shape(probs, out_type=tf.int64)[3]
    index = tf.where(probs >= threshold)
    shape = tf.shape(probs, out_type=tf.int64)
    voxel = (index[:, 0] * shape[1] + index[:, 1]) * shape[2] + index[:, 2]
    first = voxel * 3 * landmarks + index[:, 3]
    channels = first[:, None] + tf.range(3, dtype=tf.int64) * landmarks
    offset = tf.gather(tf.reshape(offsets, [-1]), channels)
    probability = tf.gather(tf.reshape(probs, [-1]), voxel * landmarks + index[:, 3])
    position = tf.cast(index[:, :3], tf.float32) + offset
    inside = tf.reduce_all((position >= 0) & (position < sample_shape), axis=1)
    landmark = tf.cast(index[:, 3:], tf.float32)
    rows = tf.concat([landmark, probability[:, None], position], axis=1)
    return tf.boolean_mask(rows, inside)


def compile_filter(case: KnownCase) -> Callable[[], Rows]:
    """Compile the filter for arrays; TensorFlow copies them now, outside of what is timed."""
    arguments = (
        tf.constant(case.probs),
        tf.constant(case.offsets),
        tf.constant(case.threshold, tf.float32),
        tf.constant(case.sample_shape, tf.float32),
    )
    compiled = tf.function(filter_rows)

    def run() -> Rows:
        return np.asarray(compiled(*arguments))

    return run

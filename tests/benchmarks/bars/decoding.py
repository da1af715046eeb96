"""S4: .nii.gz bytes -> float tensor."""

import gzip
from collections.abc import Iterator
from functools import partial

import nibabel as nib
import numpy as np
import torch
from jaxtyping import Float32
from torch import Tensor

from app.io.volume import read_volume
from tests.benchmarks import agreement
from tests.benchmarks.harness import Case, Limit, Rival, Run
from tests.benchmarks.scans import head_like, skulls

Values = Float32[Tensor, "i j k"]


def s4_decoding(run: Run) -> Iterator[Case]:
    """A generated head of 256³ int16, and a skull, against nibabel and gzip."""
    shape = (40, 36, 44) if run.fast else (256, 256, 256)
    text = "x".join(map(str, shape))
    yield _case(f".nii.gz -> float tensor, {text} int16", head_like(shape), "generated head")
    if not run.fast:
        (skull,), note = skulls(1)
        yield _case(".nii.gz -> float tensor, a mouse skull", skull, note)


def _case(what: str, content: bytes, note: str) -> Case:
    rival = Rival("nibabel + gzip", partial(_by_nibabel, content), _same, Limit(1.6))
    return Case(what, partial(_by_us, content), (rival,), note)


def _by_us(content: bytes) -> Values:
    """Read as the service does: checked, hashed, and free of what is not finite."""
    return torch.from_numpy(read_volume(content).voxels.astype(np.float32))


def _by_nibabel(content: bytes) -> Values:
    image = nib.Nifti1Image.from_bytes(gzip.decompress(content))
    return torch.from_numpy(image.get_fdata(dtype=np.float32))


def _same(ours: Values, theirs: Values) -> None:
    agreement.same_numbers(ours, theirs, 0.0)

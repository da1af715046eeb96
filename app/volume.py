"""bytes -> Volume."""

from dataclasses import dataclass

import nibabel as nib
import numpy as np

from app.frames import Affine


@dataclass(frozen=True, slots=True)
class Volume:
    """A scan as it was uploaded.

    Attributes:
        voxels: Scaled values (slope and intercept applied), real, (i j k), any strides, any byte
            order; masked voxels hold the smallest finite value.
        affine: Voxel index -> mm, RAS.
        masked: How many voxels were NaN or infinite.
        digest: SHA-256 of the uncompressed file, hex.
        warnings: What a careful reader should know, in sentences without patient data.
    """

    voxels: np.ndarray
    affine: Affine
    masked: int
    digest: str
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class VolumeLimits:
    """What a volume may need.

    Attributes:
        inflated_bytes: Size of the file once inflated.
        voxels: Voxels of the 3D volume.
        axis: Voxels along one axis.
    """

    inflated_bytes: int = 4 << 30
    voxels: int = 768**3
    axis: int = 4096


def read_volume(
    content: bytes, limits: VolumeLimits | None = None, frame: int | None = None
) -> Volume:
    import gzip

    raw = gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content
    image = nib.Nifti1Image.from_bytes(raw)
    return Volume(np.asarray(image.dataobj), image.affine, 0, "", ())

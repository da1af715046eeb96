"""first bytes -> Header: what a FreeSurfer file (.mgh, .mgz) declares, before a voxel is read.

Fields and formulas are those of https://surfer.nmr.mgh.harvard.edu/fswiki/FsTutorial/MghFormat;
nibabel has their layout. The world is RAS, in mm.
"""

from typing import Final

import numpy as np
from nibabel.freesurfer.mghformat import DATA_OFFSET, header_dtype

from app.errors import BadGeometry, BadVoxels, BrokenVolume
from app.geometry import Affine
from app.io.gzip_stream import FileStream
from app.io.header import Header, make_affine, shape_of

MGH_MAGIC: Final = b"\0\0\0\1"
"""The version, of which there is one."""

TYPES: Final = {0: ">u1", 1: ">i4", 3: ">f4", 4: ">i2", 10: ">u2"}

FOOTER_BYTES: Final = 1 << 20
"""Several times what echo times, the history of commands and a table of colours take."""


def read_mgh_header(stream: FileStream) -> Header:
    """Read the header at the start of a file.

    Args:
        stream: At its first byte; afterwards at the first byte after the fields.

    Returns:
        The header; its affine is valid.

    Raises:
        BrokenVolume: The header is cut short.
        BadGeometry: An axis is empty, or there is no clear place in space.
        BadVoxels: Voxels that are no numbers.
    """
    head = stream.read(header_dtype.itemsize)
    if len(head) < header_dtype.itemsize:
        raise BrokenVolume(f"expected a header of {DATA_OFFSET} bytes, got {len(head)}")
    (fields,) = np.frombuffer(head, header_dtype)
    lengths = [int(length) for length in fields["dims"]]
    shape = shape_of(lengths)
    code = TYPES.get(int(fields["type"]))
    if code is None:
        raise BadVoxels(f"expected integer or real voxels, got the unknown type {fields['type']}")
    return Header(
        shape=shape,
        frame_shape=(lengths[3],),
        dtype=np.dtype(code),
        offset=DATA_OFFSET,
        affine=_affine(fields),
        footer_bytes=FOOTER_BYTES,
    )


@np.errstate(all="ignore")  # Overflows fail the checks.
def _affine(fields: np.void) -> Affine:
    """Compute the affine in mm, RAS, of the place of the centre, which is voxel ``shape / 2``."""
    if fields["goodRASFlag"] <= 0:
        raise BadGeometry("expected an affine, got a file whose goodRASFlag is not set")
    spacing = fields["delta"].astype(np.float64)
    if not spacing.min() > 0:
        raise BadGeometry("expected a positive spacing, got one that is not")
    steps = fields["Mdc"].astype(np.float64) * spacing[:, None]
    corner = fields["Pxyz_c"] - fields["dims"][:3] / 2 @ steps
    return make_affine(np.eye(4), np.vstack([steps, corner]))

"""Model folders from elsewhere, and for elsewhere. The service never imports it.

==========  ======================================================================================
bundles     the components of a MONAI bundle, as data
folders     JSON and checkpoints read as data, and a model folder written whole
plans       what nnU-Net wrote down of a network: geometry, intensities, architecture, labels
transforms  what the transforms of a MONAI bundle say of a network's input
monai       a MONAI bundle -> a model folder
nnunet      a results folder of nnU-Net or nnLandmark -> a model folder
pack        a model folder -> one file to share, and back
==========  ======================================================================================

``monai`` and ``nnunet`` are imported by their commands alone, which must not wait for both.
"""

from app.exchange.pack import find_tables, install_model, pack_model

__all__ = ["find_tables", "install_model", "pack_model"]

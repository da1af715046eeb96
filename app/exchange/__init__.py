"""Model folders from elsewhere, and for elsewhere. The service never imports it.

======  ==========================================================================================
plans   what nnU-Net wrote down of a network: geometry, intensities, architecture, labels
nnunet  a results folder of nnU-Net or nnLandmark -> a model folder; imported by itself, as it takes
        the extra ``nnunet``
pack    a model folder -> one file to share, and back
======  ==========================================================================================
"""

from app.exchange.pack import install_model, pack_model

__all__ = ["install_model", "pack_model"]

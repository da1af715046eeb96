"""Model folders from elsewhere, and for elsewhere. The service never imports it.

======  ==========================================================================================
plans   what nnU-Net wrote down of a network: geometry, intensities, architecture, labels
nnunet  a results folder of nnU-Net or nnLandmark -> a model folder
======  ==========================================================================================
"""

from app.exchange.nnunet import import_nnunet

__all__ = ["import_nnunet"]

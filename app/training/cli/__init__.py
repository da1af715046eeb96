"""Command lines of the trainer; a module here is imported for ``landmarkd --help``, so never torch.

===========  ======================================================================
arguments    command-line arguments and options that several commands share
train        ``landmarkd train`` and ``landmarkd refine``
evaluate     ``landmarkd evaluate``
calibrate    ``landmarkd calibrate``
learn        ``landmarkd learn``
===========  ======================================================================
"""

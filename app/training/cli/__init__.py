"""Command lines of the trainer; imported for all commands of ``landmarkd``, so never torch.

===========  ======================================================================
arguments    command-line arguments and options that several commands share
train        ``landmarkd train`` and ``landmarkd refine``
evaluate     ``landmarkd evaluate``
calibrate    ``landmarkd calibrate``
learn        ``landmarkd learn``
===========  ======================================================================
"""

from app.training.cli import calibrate, evaluate, learn, train

COMMANDS = (train.train, train.refine, evaluate.evaluate, calibrate.calibrate, learn.learn)
"""In the order in which the help lists them."""

"""Training, evaluation and calibration of model folders: ``landmarkd train`` and its siblings.

The service runs without this package. The modules of its commands are imported with those of all
others, so whatever takes a second to import (torch, matplotlib) is imported in a function's body.

=============  ==================================================================================
data           scans and landmark files: reading, checking, splitting into training and held out
fit            augmentation, network, loss, training loop, checkpoints, export to a model folder
evaluate       errors on scans with known landmarks: metrics, tables, plots, report, leakage
calibrate      95 % regions and presence thresholds from held-out errors
cli            the command lines
files          names of the files that a training keeps in a model folder; its progress
options        what the command line asked for
recipe         every number that shapes a model
record         recipe.json: what a training was started with
pipeline       options -> a trained network, the first or the second of a model
crossvalidate  the same K times, each without one fold, and once on all scans
learn          kept cases -> the next version of a model, in place if it is better
versions       the version before, and the exchange of folders
=============  ==================================================================================
"""

from app.training.cli import COMMANDS
from app.training.files import describe_unfinished

__all__ = ["COMMANDS", "describe_unfinished"]

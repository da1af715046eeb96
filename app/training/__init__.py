"""Training, evaluation and calibration of model folders: ``landmarkd train`` and its siblings.

The service never imports this package. ``app.cli.plugins`` finds its commands in ``COMMANDS``, by
name; a command's module is imported for ``landmarkd --help``, too, so whatever takes a second to
import (torch, matplotlib) is imported in the function's body.

=============  ==================================================================================
data           scans and landmark files: reading, checking, splitting into training and held out
fit            augmentation, network, loss, training loop, checkpoints, export to a model folder
evaluate       errors on scans with known landmarks: metrics, tables, plots, report, leakage
calibrate      95 % regions and presence thresholds from held-out errors
cli            the command lines
tools          scripts: make phantoms, bring landmarks into the frame of their scan
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

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from app.training.files import describe_unfinished

__all__ = ["COMMANDS", "describe_unfinished"]

COMMANDS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "train": "app.training.cli.train:train",
        "refine": "app.training.cli.train:refine",
        "evaluate": "app.training.cli.evaluate:evaluate",
        "calibrate": "app.training.cli.calibrate:calibrate",
        "learn": "app.training.cli.learn:learn",
    }
)
"""``module:function`` of every command, in the order in which the help lists them."""

"""Name -> function of the commands that need more than the service: training and measuring.

``landmarkd`` looks here by name when it is run with a command that it does not have itself. A
function is a typer command; its module is imported for ``landmarkd --help`` too, so what takes a
second to import (torch, matplotlib) is imported in its body.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

COMMANDS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "train": "app.training.train_command:train",
        "refine": "app.training.train_command:refine",
        "evaluate": "app.training.evaluate.command:evaluate",
        "calibrate": "app.training.calibrate.command:calibrate",
        "average": "app.training.average_command:average",
    }
)
"""``module:function`` of every command, in the order in which the help lists them."""

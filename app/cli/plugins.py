"""Adds the commands of the trainer, ``app.training``, to those of the service, if it is installed.

The image of the service leaves it out. It is imported only for its own commands, for ``check``, and
for the help.
"""

from collections.abc import Mapping
from importlib import import_module
from types import ModuleType
from typing import Any, Final

import typer
from typer.core import TyperGroup

TRAINER: Final = "app.training"
"""Package whose ``COMMANDS`` maps the name of every command to ``module:function``."""


class Commands(TyperGroup):
    """The registered commands, followed by those of the trainer.

    The contexts and commands are ``Any``, because typer uses click's classes or its own copy of
    them, depending on its version.
    """

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ANN401
        """List the names of all commands in the order of the help."""
        return [*super().list_commands(ctx), *trainer_commands()]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ANN401
        """Return a command; None if there is none of that name."""
        command = super().get_command(ctx, cmd_name)
        target = trainer_commands().get(cmd_name) if command is None else None
        if target is None:
            return command
        module, _, function = target.partition(":")
        single = typer.Typer(add_completion=False)
        single.command(cmd_name)(getattr(import_module(module), function))
        return typer.main.get_command(single)


def import_trainer() -> ModuleType | None:
    """Import the trainer; None if it is not installed."""
    try:
        return import_module(TRAINER)
    except ModuleNotFoundError as error:
        if error.name != TRAINER:
            raise
        return None


def trainer_commands() -> Mapping[str, str]:
    """Return ``module:function`` of each command of the trainer, by the command's name."""
    trainer = import_trainer()
    return trainer.COMMANDS if trainer else {}

"""Name -> command: those of ``app.cli.main``, and those of the trainer.

The trainer is no part of the service and may be absent, so nothing of it is imported before one of
its commands, or the help, is asked for.
"""

from collections.abc import Mapping
from importlib import import_module
from typing import Any, Final

import typer
from typer.core import TyperGroup

TRAINER: Final = "app.training"
"""Module whose ``COMMANDS`` names ``module:function`` of every command of the trainer."""


class Commands(TyperGroup):
    """The commands that are registered, and then those of the trainer.

    What typer passes and expects are classes of click, or of its own copy of it, by version: Any.
    """

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ANN401
        """List the names in the order of the help."""
        return [*super().list_commands(ctx), *trainer_commands()]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ANN401
        """Find a command by its name; None if there is none."""
        command = super().get_command(ctx, cmd_name)
        target = trainer_commands().get(cmd_name) if command is None else None
        if target is None:
            return command
        module, _, function = target.partition(":")
        alone = typer.Typer(add_completion=False)
        alone.command(cmd_name)(getattr(import_module(module), function))
        return typer.main.get_command(alone)


def trainer_commands() -> Mapping[str, str]:
    """Say which function stands behind which name; nothing if the trainer is not installed."""
    try:
        commands: Mapping[str, str] = import_module(TRAINER).COMMANDS
    except ModuleNotFoundError as error:
        if error.name not in (TRAINER, TRAINER.rpartition(".")[0]):
            raise
        return {}
    return commands

"""Options of a command -> Settings: those of the environment, unless an option is given."""

from pydantic import ValidationError

from app.errors import StartupError
from app.settings import Settings


def read_settings(**given: object) -> Settings:
    """Read the settings from the environment; options that were given take precedence.

    Raises:
        StartupError: A setting cannot be used.
    """
    try:
        return Settings.model_validate({k: v for k, v in given.items() if v is not None})
    except ValidationError as error:
        lines = (f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors())
        raise StartupError("; ".join(lines)) from None

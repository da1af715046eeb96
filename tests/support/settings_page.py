"""Writes docs/settings.md from the settings: ``python -m tests.support.settings_page``."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from pydantic import ByteSize

from app.settings import PREFIX, Settings

PAGE: Final = Path(__file__).resolve().parents[2] / "docs" / "settings.md"

INTRODUCTION: Final = """\
# Settings

The service is configured by environment variables. A value out of bounds stops it at startup, an
empty one is as none, and an unknown variable that starts with `{prefix}` is logged as a warning.

```sh
{prefix}PORT=9000 {prefix}DEVICE=cpu {prefix}MAX_BODY_BYTES=64MiB landmarkd serve
```

`landmarkd serve --host` and `--port` take precedence over `{prefix}HOST` and `{prefix}PORT`. Sizes
are in bytes or have a unit, such as `512MiB`; `~` in front of a folder is the home folder.
[HTTP API](http.md#authentication) shows how to make keys; `landmarkd detect --url` and the
Python client send the one in `LANDMARKD_API_KEY`.

This page is generated from [app/settings.py](../app/settings.py) by
`python -m tests.support.settings_page`; do not edit it.

"""


def settings_page() -> str:
    """Write the page: one table row for each setting, with its default, bounds and meaning."""
    rows = ["| variable | default | bounds | meaning |", "|---|---|---|---|"]
    schema = Settings.model_json_schema()["properties"]
    for name, field in Settings.model_fields.items():
        default = field.get_default(call_default_factory=True)
        rows.append(
            f"| `{PREFIX}{name.upper()}` | {_default(default)} "
            f"| {_bounds(schema[name])} | {field.description} |"
        )
    return INTRODUCTION.format(prefix=PREFIX) + "\n".join(rows) + "\n"


def _default(value: object) -> str:
    if value in (None, ()):
        return "unset"
    if isinstance(value, ByteSize):
        # pydantic writes 512.0MiB.
        return f"`{value.human_readable().replace('.0', '')}`"
    return f"`{value}`"


def _bounds(schema: Mapping[str, Any]) -> str:
    if "enum" in schema:
        return ", ".join(f"`{choice}`" for choice in schema["enum"])
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    return ", ".join(f"{sign} {schema[key]:g}" for key, sign in signs.items() if key in schema)


if __name__ == "__main__":
    PAGE.write_text(settings_page(), encoding="utf-8")

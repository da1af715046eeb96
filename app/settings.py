"""Environment -> Settings: every knob, with its unit, bounds and default.

Set by environment variables named ``LANDMARKD_`` and the field's name in capitals.
"""

import ipaddress
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, ByteSize, Field, StringConstraints, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

PREFIX: Final = "LANDMARKD_"
MIB: Final = 1 << 20
GIB: Final = 1 << 30
DEVICES: Final = r"^(auto|all|(cpu|cuda)(:\d{1,3})?(, ?(cpu|cuda)(:\d{1,3})?)*)$"


def _split(value: object) -> object:
    """Read ``a, b`` as a list, so that no JSON is needed in an environment variable."""
    if isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    return value


KeyHash = Annotated[
    str, StringConstraints(pattern=r"^[0-9a-fA-F]{64}$", to_lower=True, strip_whitespace=True)
]
KeyHashes = Annotated[tuple[KeyHash, ...], NoDecode, BeforeValidator(_split)]


class Settings(BaseSettings):
    """Every knob of the service; see each field's description."""

    # Errors hide their input: a key that was set in clear by mistake must not reach a log.
    model_config = SettingsConfigDict(
        env_prefix=PREFIX, frozen=True, extra="forbid", hide_input_in_errors=True
    )

    host: str = Field("127.0.0.1", description="Address to listen on.")
    port: int = Field(
        8000, ge=0, le=65535, description="TCP port to listen on; 0 takes a free one."
    )
    models_dir: Path = Field(
        Path("models"), description="Folder whose subfolders with a model.toml are the models."
    )
    default_model: str | None = Field(
        None, description="Model of a request that names none; none: the only one there is."
    )
    device: Annotated[str, StringConstraints(pattern=DEVICES)] = Field(
        "auto",
        description="Where networks run: `auto` (CUDA if there is one), `cpu`, `cuda:N`, several "
        "of them with commas between, or `all` (every CUDA device).",
    )
    precision: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="What networks compute in; `auto`: the first precision below `float32` that "
        "the model was verified in and the device computes natively, else `float32`.",
    )
    threads: int = Field(
        0, ge=0, le=1024, description="CPU threads of one forward pass; 0 lets torch choose."
    )
    batch_size: int = Field(
        0,
        ge=0,
        le=1024,
        description="Tiles in one forward pass, at most; 0: as many as prove fastest.",
    )
    max_body_bytes: ByteSize = Field(
        ByteSize(512 * MIB), ge=1, description="Size of a request's body (bytes, or `512MiB`)."
    )
    max_inflated_bytes: ByteSize = Field(
        ByteSize(4 * GIB), ge=1, description="Size of a volume's file once inflated (bytes)."
    )
    max_voxels: int = Field(768**3, ge=1, description="Voxels of one volume.")
    max_axis: int = Field(4096, ge=1, le=32767, description="Voxels along one axis of a volume.")
    max_in_flight: int = Field(
        64, ge=1, le=100_000, description="Requests accepted at the same time; more get 429."
    )
    max_queued_bytes: ByteSize = Field(
        ByteSize(2 * GIB),
        ge=1,
        description="Sum of the bodies of all requests accepted at the same time (bytes).",
    )
    header_timeout_s: float = Field(
        10.0, gt=0, le=3600, description="Seconds for a request's head to arrive."
    )
    body_timeout_s: float = Field(
        120.0, gt=0, le=86_400, description="Seconds for a request's body to arrive; later is 408."
    )
    timeout_s: float = Field(
        60.0,
        gt=0,
        le=86_400,
        description="Seconds from the end of the upload to the answer, unless the request says.",
    )
    max_timeout_s: float = Field(
        600.0, gt=0, le=86_400, description="Largest `timeout_s` that a request may ask for."
    )
    drain_s: float = Field(
        30.0, ge=0, le=3600, description="Seconds to answer what was accepted when stopping."
    )
    api_keys: KeyHashes = Field(
        (),
        description="SHA-256 (hex, comma-separated) of the keys that may call `/v1`; none: open.",
    )
    admin_key_hash: KeyHash | None = Field(
        None, description="SHA-256 (hex) of the key that may reload models; none: nobody may."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Least severe level that is logged."
    )
    log_format: Literal["json", "text"] = Field(
        "json", description="`json`: one object per line. `text`: for a terminal."
    )

    @model_validator(mode="after")
    def _check_timeouts(self) -> "Settings":
        if self.timeout_s > self.max_timeout_s:
            raise ValueError(
                f"expected timeout_s <= max_timeout_s, got {self.timeout_s} > {self.max_timeout_s}"
            )
        return self


def unknown_variables(environment: Mapping[str, str]) -> tuple[str, ...]:
    """List the environment variables that look like settings but are none.

    Args:
        environment: Such as ``os.environ``.

    Returns:
        Their names, sorted; a misspelt setting is among them.
    """
    known = {PREFIX + name.upper() for name in Settings.model_fields}
    return tuple(sorted(n for n in environment if n.startswith(PREFIX) and n not in known))


def open_to_strangers(settings: Settings) -> bool:
    """Tell whether anyone on a network may use the service: a public address and no keys.

    Args:
        settings: The service's settings.

    Returns:
        True unless the host is a loopback address or API keys are set.
    """
    if settings.api_keys or settings.host == "localhost":
        return False
    try:
        return not ipaddress.ip_address(settings.host).is_loopback
    except ValueError:
        return True


def settings_table() -> str:
    """Write the settings as the Markdown table of the README.

    Returns:
        One row for each setting: variable, default, bounds, meaning.
    """
    rows = ["| variable | default | bounds | meaning |", "|---|---|---|---|"]
    schema = Settings.model_json_schema()["properties"]
    for name, field in Settings.model_fields.items():
        rows.append(
            f"| `{PREFIX}{name.upper()}` | {_shown(field.default)} "
            f"| {_bounds(schema[name])} | {field.description} |"
        )
    return "\n".join(rows) + "\n"


def _shown(default: object) -> str:
    if default in (None, ()):
        return "none"
    if isinstance(default, ByteSize):
        # 512.0MiB is how pydantic writes it and 512MiB how a person would.
        return f"`{default.human_readable().replace('.0', '')}`"
    return f"`{default}`"


def _bounds(schema: Mapping[str, Any]) -> str:
    if "enum" in schema:
        return ", ".join(f"`{choice}`" for choice in schema["enum"])
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    return ", ".join(f"{sign} {schema[key]:g}" for key, sign in signs.items() if key in schema)

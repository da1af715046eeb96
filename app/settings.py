"""The service's settings, each with its unit, bounds and default.

They are read from environment variables named ``LANDMARKD_`` and the field's name in capitals.
``docs/settings.md`` is generated from them.
"""

import ipaddress
import re
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ByteSize,
    Field,
    StringConstraints,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from app.errors import StartupError, Unauthorized

PREFIX: Final = "LANDMARKD_"
API_KEY: Final = "LANDMARKD_API_KEY"
"""Variable with the key that clients send; of no meaning to the service."""

NO_PROXY: Final = dict.fromkeys(("all://localhost", "all://127.0.0.1", "all://[::1]"))
"""Of httpx's clients: of this machine no proxy is asked, for which that would be the proxy's own.
"""

SECRET: Final = frozenset({"api_keys", "admin_key_hash"})
"""Settings in which a key may stand in plain text by mistake: what they are is never told."""

PORT: Final = 8000

KIB: Final = 1 << 10
MIB: Final = 1 << 20
GIB: Final = 1 << 30

LEAST_BYTES: Final = MIB
"""Of what a size bounds: a smaller one lets nothing in, as where its unit was forgotten."""

DEVICES: Final = re.compile(r"(auto|all|(cpu|cuda)(:\d{1,3})?(, ?(cpu|cuda)(:\d{1,3})?)*)")


def _split(value: object) -> object:
    """Read ``a, b`` as a list, so that no JSON is needed in an environment variable."""
    if isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    return value


def _find_models() -> Path:
    """Return the folder ``models`` here; if there is none, that of the checkout installed."""
    here, checkout = Path("models"), Path(__file__).resolve().parents[1]
    is_checkout = (checkout / "pyproject.toml").is_file()
    return checkout / here if is_checkout and not here.is_dir() else here


KeyHash = Annotated[
    str, StringConstraints(pattern=r"^[0-9a-fA-F]{64}$", to_lower=True, strip_whitespace=True)
]
NamedKeyHash = Annotated[
    str,
    StringConstraints(
        pattern=r"^([\w.-]{1,32}:)?[0-9a-fA-F]{64}$", to_lower=True, strip_whitespace=True
    ),
]


def _check_devices(value: str) -> str:
    if not DEVICES.fullmatch(value):
        raise ValueError(
            f"expected auto, all, cpu, cuda or cuda:N, or several of the last three with commas "
            f"between, got {value!r}"
        )
    return value


def _ignore_service_link(value: object) -> object:
    """Take for unset what Kubernetes sets where a Service is named landmarkd: the URL of that."""
    return PORT if isinstance(value, str) and value.startswith("tcp://") else value


def _check_host(value: str) -> str:
    if "/" in value:
        raise ValueError(f"expected names of hosts, without https:// or a path, got {value!r}")
    return value


def _expand_home(value: Path) -> Path:
    """Replace ``~`` as a shell does: files of environments and quotes leave it as it is."""
    try:
        return value.expanduser()
    except RuntimeError as error:
        raise ValueError(f"expected a home folder that exists, got {str(value)!r}") from error


Folder = Annotated[Path, AfterValidator(_expand_home)]
HostName = Annotated[str, AfterValidator(_check_host)]
HostNames = Annotated[tuple[HostName, ...], NoDecode, BeforeValidator(_split)]
KeyHashes = Annotated[tuple[NamedKeyHash, ...], NoDecode, BeforeValidator(_split)]


class Settings(BaseSettings):
    """All settings of the service; see each field's description."""

    # Errors hide their input: a key set in plain text by mistake must not reach a log. An empty
    # variable is unset: an empty address would be every one, an empty path the current folder.
    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        env_ignore_empty=True,
        frozen=True,
        extra="forbid",
        hide_input_in_errors=True,
    )

    host: str = Field("127.0.0.1", description="Address to listen on.")
    port: Annotated[int, BeforeValidator(_ignore_service_link)] = Field(
        PORT, ge=0, le=65535, description="TCP port to listen on; 0 picks a free one."
    )
    models_dir: Folder = Field(
        default_factory=_find_models,
        description="Folder of models: each subfolder that holds a `model.toml` is one. Unset: "
        "`models` in the current folder; where there is none, that of the checkout installed.",
    )
    default_model: str | None = Field(
        None,
        description="Model used when a request names none. Unset: the only one that is loaded; "
        "where there are several, a request must name one.",
    )
    device: Annotated[str, AfterValidator(_check_devices)] = Field(
        "auto",
        description="Devices that run the networks: `auto` (the first CUDA device, else the CPU), "
        "`cpu`, `cuda:N`, a comma-separated list of these, or `all` (every CUDA device).",
    )
    precision: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="Number format of the forward pass. `auto`: the first one below `float32` "
        "that the model was verified in and the device computes natively, else `float32`.",
    )
    allow_torchscript: bool = Field(
        False,
        description="Whether model folders may hold TorchScript, which torch's unpickler reads and "
        "which runs unreviewed code; ONNX needs no permission.",
    )
    threads: int = Field(
        0,
        ge=0,
        le=1024,
        description="CPU threads that the forward passes of a device use; 0: as many as PyTorch "
        "chooses, but no more than the container or systemd's unit has the time of cores for.",
    )
    batch_size: int = Field(
        0,
        ge=0,
        le=1024,
        description="Maximum number of tiles per forward pass; 0: the fastest size, as measured.",
    )
    max_body_bytes: ByteSize = Field(
        ByteSize(512 * MIB),
        ge=LEAST_BYTES,
        description="Maximum size of a request body, in bytes or with a unit (`512MiB`); 1 MiB or "
        "more, and at most 3/16 of `LANDMARKD_MEMORY`.",
    )
    max_inflated_bytes: ByteSize = Field(
        ByteSize(4 * GIB),
        ge=LEAST_BYTES,
        description="Maximum size of the file of a scan once inflated; 1 MiB or more.",
    )
    max_voxels: int = Field(768**3, ge=1, description="Maximum number of voxels in a volume.")
    max_axis: int = Field(
        4096, ge=1, le=32767, description="Maximum number of voxels along one axis of a volume."
    )
    max_in_flight: int = Field(
        64,
        ge=1,
        le=100_000,
        description="Maximum number of requests that are received at once, and number of those in "
        "work from which on others are answered with 429; as what is received then gets into work, "
        "up to twice as many may be. One client may have three quarters of each.",
    )
    memory: ByteSize | None = Field(
        None,
        ge=16 * MIB,
        description="Memory that all requests in progress may take together, a quarter of it for "
        "their bodies; a scan that needs more is refused, others wait; 16 MiB or more. Unset: half "
        "of the machine's, or of the limit of the container, of systemd's unit or of Slurm's job.",
    )
    header_timeout_s: float = Field(
        10.0, gt=0, le=3600, description="Seconds within which a request's headers must arrive."
    )
    body_timeout_s: float = Field(
        120.0,
        gt=0,
        le=86_400,
        description="Seconds within which a request's body must arrive, else 408.",
    )
    min_upload_rate: ByteSize = Field(
        ByteSize(64 * KIB),
        ge=0,
        description="Bytes per second at which a request's body must arrive on average, after its "
        "first 5 seconds, else 408; 0: no limit.",
    )
    timeout_s: float = Field(
        60.0,
        gt=0,
        le=86_400,
        description="Seconds from the end of the upload to the answer, else 504; a request may "
        "set its own with `timeout_s`. At most `LANDMARKD_MAX_TIMEOUT_S`.",
    )
    max_timeout_s: float = Field(
        600.0, gt=0, le=86_400, description="Largest `timeout_s` that a request may set."
    )
    drain_s: float = Field(
        30.0,
        ge=0,
        le=3600,
        description="Seconds allowed for finishing accepted requests at shutdown.",
    )
    jobs: Folder | None = Field(
        None,
        description="Folder in which jobs are kept, with their scans until these are answered, for "
        "this process alone. Unset: no jobs.",
    )
    jobs_max_bytes: ByteSize = Field(
        ByteSize(10 * GIB),
        ge=LEAST_BYTES,
        description="Maximum size of all jobs with their scans and answers, each job counted as "
        "1 MiB and each scan as 64 KiB besides its file; 1 MiB or more. One client leaves a "
        "quarter of it to others.",
    )
    jobs_ttl_s: float = Field(
        86_400.0,
        gt=0,
        le=31_536_000,
        description="Seconds for which a finished job is kept, and an upload in parts to which "
        "nothing is added.",
    )
    api_keys: KeyHashes = Field(
        (),
        description="SHA-256 hashes (hex, comma-separated) of the keys that may call `/v1`, each "
        "with a name in front if it shall have one: `anna:HASH`, up to 32 letters, digits, `_`, "
        "`.` and `-`, which become lower case. Unset: no key is needed.",
    )
    allowed_hosts: HostNames = Field(
        (),
        description="Names, comma-separated, that `Host` may have, on any port, where no key is "
        "needed, besides `localhost` and the service's address; `*`: any, and pages of other sites "
        "may use the service. Unset: no others if the address is a loopback address, or the "
        "service runs on Ray Serve, else any.",
    )
    admin_key_hash: KeyHash | None = Field(
        None,
        description="SHA-256 hash (hex) of the key that may reload models. Unset: reloading is "
        "disabled.",
    )
    store: Folder | None = Field(
        None,
        description="Folder in which corrected cases are kept if a client asks for that: scans as "
        "they were uploaded, with their landmarks. Unset: nothing is kept.",
    )
    store_max_bytes: ByteSize = Field(
        ByteSize(20 * GIB),
        ge=LEAST_BYTES,
        description="Maximum size of all cases, each counted as 1 MiB or more; at least 1 MiB. A "
        "case beyond it is refused. One key leaves a quarter of it to others.",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Minimum severity that is logged."
    )
    log_format: Literal["json", "text"] = Field(
        "json",
        description="`json`: one object per line; `text`: for a terminal, which gets it if this is "
        "unset.",
    )

    @model_validator(mode="after")
    def _check_timeouts(self) -> "Settings":
        if self.timeout_s > self.max_timeout_s:
            raise ValueError(
                f"expected {PREFIX}TIMEOUT_S <= {PREFIX}MAX_TIMEOUT_S, "
                f"got {self.timeout_s} > {self.max_timeout_s}"
            )
        return self


def unknown_variables(environment: Mapping[str, str]) -> tuple[str, ...]:
    """List the environment variables that are named like settings but are unknown."""
    known = {API_KEY, *(PREFIX + name.upper() for name in Settings.model_fields)}
    return tuple(sorted(n for n in environment if n.startswith(PREFIX) and n not in known))


def bearer(key: str | None) -> dict[bytes, bytes]:
    """Make the header with an API key, as a variable or a file has it; none without a key.

    Raises:
        Unauthorized: It is several lines, or holds control characters. What refuses to send it
            would quote it.
    """
    token = (key or "").strip()  # A file of a key ends in a line break.
    if not token.isprintable():
        raise Unauthorized(
            "expected an API key in one line of text, got one with line breaks or control "
            "characters inside"
        )
    # Bytes, as httpx wants text to be ASCII.
    return {b"Authorization": f"Bearer {token}".encode()} if token else {}


def spell_out(folder: Path) -> Path:
    """Spell out the path of a model's folder, whose name says whose it is: ``.`` has none.

    Nor has ``..``, which leads from where a link leads to. Other links keep their names.
    """
    return folder.resolve() if folder.name == ".." else folder.absolute()


def is_public_without_keys(settings: Settings) -> bool:
    """Return whether anyone on the network may use the service: a public address and no keys."""
    return not settings.api_keys and not is_loopback(settings.host)


def is_loopback(host: str) -> bool:
    """Return whether a host can be reached only from its own machine, as far as its name tells."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def url_host(host: str) -> str:
    """Return a host as URLs and ``Host`` have it: an address of IPv6 in brackets."""
    return f"[{host}]" if ":" in host else host


def service_url(address: str) -> str:
    """Return the URL of a service whose address may lack ``http://``, as those of browsers."""
    return address if "://" in address else f"http://{address}"


def hide_password(url: str) -> str:
    """Leave out of a URL its user and password, for messages, which end in logs."""
    return re.sub(r"^(.*//)?.*@", r"\1", url)


def read_settings(**given: object) -> Settings:
    """Read the settings from the environment; options that were given take precedence.

    Options that are None or empty are not given.

    Raises:
        StartupError: A setting cannot be used.
    """
    options = {name: value for name, value in given.items() if value not in (None, "")}
    try:
        return Settings.model_validate(options)
    except ValidationError as error:
        lines = (_describe(item, options) for item in error.errors())
        raise StartupError("; ".join(lines)) from None


def _describe(error: ErrorDetails, options: Container[str]) -> str:
    """Say which option or variable cannot be used, what was expected, and, unless secret, got."""
    what = error["msg"].removeprefix("Value error, ").replace("Input should be", "expected")
    if error["type"] == "string_pattern_mismatch":  # Only hashes have a pattern.
        what = "expected a SHA-256 hash, 64 hexadecimal digits"
    if not error["loc"]:
        return what
    name, *item = map(str, error["loc"])
    given = f"--{name.replace('_', '-')}" if name in options else f"{PREFIX}{name.upper()}"
    if name in SECRET:
        return f"{'.'.join([given, *item])}: {what}, got something else"
    return f"{given}: {what}" + ("" if "got" in what else f", got {error['input']!r}")

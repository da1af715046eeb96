"""Settings are bounded, documented, and read from the environment."""

import hashlib
from ipaddress import IPv4Address
from pathlib import Path

import pytest
from pydantic import ValidationError

from app.cli.client import Client
from app.errors import StartupError, Unauthorized
from app.settings import (
    PREFIX,
    Settings,
    bearer,
    is_public_without_keys,
    read_settings,
    unknown_variables,
)

EVERY_ADDRESS = str(IPv4Address(0))
HASH = hashlib.sha256(b"a key").hexdigest()


def test_every_setting_says_what_it_is() -> None:
    assert [name for name, field in Settings.model_fields.items() if not field.description] == []


def test_settings_are_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LANDMARKD_PORT", "9000")
    monkeypatch.setenv("LANDMARKD_MAX_BODY_BYTES", "10MiB")
    monkeypatch.setenv("LANDMARKD_API_KEYS", f"{HASH}, {HASH.upper()}")
    settings = Settings()
    assert settings.port == 9000
    assert settings.max_body_bytes == 10 << 20
    assert settings.api_keys == (HASH, HASH)


def test_models_are_those_here_or_else_those_of_the_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert (Settings().models_dir / "phantom" / "model.toml").is_file()
    (tmp_path / "models").mkdir()
    assert Settings().models_dir == Path("models")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PORT", "70000"),
        ("MAX_BODY_BYTES", "0"),
        ("DEVICE", "gpu"),
        ("DEVICE", "cpu,auto"),
        ("DEVICE", "cuda:0,"),
        ("PRECISION", "int8"),
        ("TIMEOUT_S", "601"),
        ("BODY_TIMEOUT_S", "0"),
        ("LOG_LEVEL", "loud"),
    ],
)
def test_value_out_of_bounds_is_refused(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PREFIX + name, value)
    with pytest.raises(ValidationError):
        Settings()


def test_devices_are_listed_in_words() -> None:
    with pytest.raises(StartupError, match=r"^--device: expected auto, all, cpu, .*, got 'gpu'$"):
        read_settings(device="gpu")


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("PORT", "70000", "LANDMARKD_PORT: expected less than or equal to 65535, got '70000'"),
        ("MEMORY", "8", "LANDMARKD_MEMORY: expected greater than or equal to 16777216, got '8'"),
        ("MAX_BODY_BYTES", "512", "LANDMARKD_MAX_BODY_BYTES: expected greater than or equal to 1"),
        ("MAX_INFLATED_BYTES", "4", "LANDMARKD_MAX_INFLATED_BYTES: expected greater than or"),
        ("JOBS_MAX_BYTES", "10", "LANDMARKD_JOBS_MAX_BYTES: expected greater than or equal to 1"),
        ("STORE_MAX_BYTES", "20", "LANDMARKD_STORE_MAX_BYTES: expected greater than or equal to"),
        ("JOBS", "~nobody-here/jobs", "LANDMARKD_JOBS: expected a home folder that exists"),
        ("ALLOWED_HOSTS", "a,https://b/", "LANDMARKD_ALLOWED_HOSTS: expected names of hosts, with"),
        ("DEVICE", "gpu", "LANDMARKD_DEVICE: expected auto, all, cpu, cuda"),
        ("LOG_LEVEL", "INFO", "LANDMARKD_LOG_LEVEL: expected 'debug', 'info', 'warning' or"),
        ("MAX_BODY_BYTES", "12foo", "LANDMARKD_MAX_BODY_BYTES: could not interpret byte unit: foo"),
        ("TIMEOUT_S", "601", "expected LANDMARKD_TIMEOUT_S <= LANDMARKD_MAX_TIMEOUT_S, got 601"),
        ("API_KEYS", f"{HASH},my-secret", "LANDMARKD_API_KEYS.1: expected a SHA-256 hash, 64"),
        ("ADMIN_KEY_HASH", "my-secret", "LANDMARKD_ADMIN_KEY_HASH: expected a SHA-256 hash"),
    ],
)
def test_variable_that_cannot_be_used_is_named_with_what_it_got(
    name: str, value: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PREFIX + name, value)
    with pytest.raises(StartupError) as caught:
        read_settings()
    assert str(caught.value).startswith(words)
    assert str(caught.value).count("got") == 1
    assert "my-secret" not in str(caught.value)


@pytest.mark.parametrize("name", ["API_KEYS", "ADMIN_KEY_HASH"])
def test_key_in_plain_text_is_refused_without_being_shown(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PREFIX + name, "my-secret")
    with pytest.raises(ValidationError) as caught:
        Settings()
    assert "my-secret" not in str(caught.value)


@pytest.mark.parametrize("value", ["auto", "all", "cuda:1", "cuda:0,cuda:1", "cpu:0, cpu:1"])
def test_device_may_be_one_or_several(value: str) -> None:
    assert Settings(device=value).device == value


def test_misspelt_variable_is_found() -> None:
    environment = {"LANDMARKD_PROT": "1", "LANDMARKD_PORT": "1", "HOME": "/"}
    environment["LANDMARKD_API_KEY"] = "of the client"
    assert unknown_variables(environment) == ("LANDMARKD_PROT",)


@pytest.mark.parametrize(
    ("host", "keys", "expected"),
    [
        ("127.0.0.1", (), False),
        ("::1", (), False),
        ("localhost", (), False),
        (EVERY_ADDRESS, (), True),
        ("scans.example", (), True),
        (EVERY_ADDRESS, (HASH,), False),
    ],
)
def test_public_address_without_keys_is_told_apart(
    host: str, keys: tuple[str, ...], expected: bool
) -> None:
    assert is_public_without_keys(Settings(host=host, api_keys=keys)) is expected


def test_empty_variable_is_no_folder_to_store_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LANDMARKD_STORE", "")
    assert Settings().store is None


@pytest.mark.parametrize("name", ["MODELS_DIR", "JOBS", "STORE"])
def test_tilde_is_the_home_folder(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv(PREFIX + name, "~/kept")
    assert getattr(Settings(), name.lower()) == tmp_path / "kept"


@pytest.mark.parametrize("name", sorted(Settings.model_fields))
def test_empty_variable_is_unset(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    default = Settings()
    monkeypatch.setenv(PREFIX + name.upper(), "")
    assert Settings() == default


def test_empty_option_is_not_given() -> None:
    assert read_settings(host="", port=0) == Settings(port=0)


def test_key_may_have_a_name() -> None:
    keys = (f"anna:{HASH.upper()}", HASH)
    assert Settings(api_keys=keys).api_keys == (f"anna:{HASH}", HASH)


@pytest.mark.parametrize(
    ("given", "sent"),
    [(None, None), ("\n", None), ("key\r\n", b"Bearer key"), ("ä", b"Bearer \xc3\xa4")],
)
def test_key_is_sent_as_its_file_holds_it(given: str | None, sent: bytes | None) -> None:
    assert bearer(given).get(b"Authorization") == sent


@pytest.mark.parametrize("key", ["se\ncret", "se\r\ncret", "se\0cret", "se\udcffcret"])
def test_key_that_cannot_be_sent_is_refused_without_being_shown(key: str) -> None:
    with pytest.raises(Unauthorized, match="expected an API key in one line") as caught:
        Client("http://127.0.0.1:1", api_key=key)
    assert "cret" not in str(caught.value)


def test_what_kubernetes_tells_of_a_service_is_no_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """It sets this in each pod where a Service is named landmarkd, whose pods ended at once."""
    monkeypatch.setenv("LANDMARKD_PORT", "tcp://10.96.0.5:80")
    assert read_settings() == Settings(port=8000)

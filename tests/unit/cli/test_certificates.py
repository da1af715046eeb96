"""What a client is told to trust, where it cannot be read; test_caddy.py has what can."""

from pathlib import Path

import pytest

from app.cli.client import Client, Unreachable


@pytest.mark.parametrize("content", [None, b"", b"no certificate"])
def test_authorities_that_cannot_be_read_are_named_by_their_setting(
    content: bytes | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "root.crt"
    if content is not None:
        file.write_bytes(content)
    monkeypatch.setenv("SSL_CERT_FILE", str(file))
    with pytest.raises(Unreachable, match="expected certificates in SSL_CERT_FILE"):
        Client("https://127.0.0.1:1")

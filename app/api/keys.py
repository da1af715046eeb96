"""Authorization header -> allowed, or Unauthorized.

Settings hold SHA-256 hashes only. Keys are meant to be long and random (``openssl rand -hex 32``),
so a fast hash is enough: there is nothing to guess.
"""

import hashlib
import hmac
from collections.abc import Iterable

from app.errors import Unauthorized
from app.settings import Settings


def hash_key(key: str) -> str:
    """Hash a key as the settings want it: SHA-256, hex."""
    return hashlib.sha256(key.encode()).hexdigest()


def check_api_key(key: str | None, settings: Settings) -> None:
    """Allow a call of the API.

    Args:
        key: The Bearer token of the request, None if it has none.
        settings: The service's settings; without API keys every call is allowed.

    Raises:
        Unauthorized: The key is missing or wrong.
    """
    if not settings.api_keys:
        return
    admin = (settings.admin_key_hash,) if settings.admin_key_hash else ()
    _check(key, (*settings.api_keys, *admin), "an API key")


def check_admin_key(key: str | None, settings: Settings) -> None:
    """Allow a call that changes the service.

    Args:
        key: The Bearer token of the request, None if it has none.
        settings: The service's settings; without an admin key no call is allowed.

    Raises:
        Unauthorized: The key is missing or wrong, or the service has none.
    """
    if settings.admin_key_hash is None:
        raise Unauthorized("expected the admin key, but LANDMARKD_ADMIN_KEY_HASH is not set here")
    _check(key, (settings.admin_key_hash,), "the admin key")


def _check(key: str | None, hashes: Iterable[str], wanted: str) -> None:
    header = "in the header 'Authorization: Bearer <key>'"
    if key is None:
        raise Unauthorized(f"expected {wanted} {header}, got none")
    given = hash_key(key)
    # A list, not a generator: every hash is compared, so the time tells nothing of which matched.
    if not any([hmac.compare_digest(given, known) for known in hashes]):  # noqa: C419
        raise Unauthorized(f"expected {wanted} {header}, got another")

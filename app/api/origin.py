"""Which web pages may use a service that needs no key: its own.

A browser sends requests of any site's page to the service, also on localhost, and a site may let
its own name resolve to 127.0.0.1, so that its page can read the answers (DNS rebinding). The
browser says the former in ``Sec-Fetch-Site`` or ``Origin``, the latter in ``Host``.
"""

from collections.abc import Callable
from typing import Final

from starlette.datastructures import Headers
from starlette.types import Scope

from app.errors import Forbidden
from app.settings import Settings, is_loopback, url_host

OriginCheck = Callable[[Scope], Forbidden | None]
"""Returns the error for which a request is refused, if it is."""

LOCAL_HOSTS: Final = frozenset({"localhost", "127.0.0.1", "[::1]"})


def make_origin_check(settings: Settings) -> OriginCheck:
    """Make the check of a service's settings: keys, address and allowed hosts."""
    named = frozenset(map(host_name, settings.allowed_hosts))
    public = not (named or is_loopback(settings.host))
    if settings.api_keys or "*" in named or public:
        return lambda _: None
    allowed = LOCAL_HOSTS | named | {url_host(settings.host).lower()}

    def check(scope: Scope) -> Forbidden | None:
        headers = Headers(scope=scope)
        if _is_of_another_site(headers, allowed) and not _is_link(scope["method"], headers):
            return Forbidden("expected a request of this service's own page, got another site's")
        host = host_name(headers.get("host", ""))
        if host and host not in allowed:
            return Forbidden(
                f"expected Host to be {', '.join(sorted(allowed))} or one of "
                f"LANDMARKD_ALLOWED_HOSTS, got {host[:64]!r}"
            )
        return None

    return check


def _is_of_another_site(headers: Headers, allowed: frozenset[str]) -> bool:
    # Older browsers send only an Origin, and only with what is not a GET.
    origin = headers.get("origin")
    return headers.get("sec-fetch-site") == "cross-site" or (
        origin is not None and host_name(origin.rpartition("://")[2]) not in allowed
    )


def _is_link(method: str, headers: Headers) -> bool:
    """Return whether the user has followed a link, whose page sees nothing of the answer."""
    mode, goal = headers.get("sec-fetch-mode"), headers.get("sec-fetch-dest")
    return (method, mode, goal) == ("GET", "navigate", "document")


def host_name(host: str) -> str:
    """Return the name or address in a ``Host`` header, without the port and in lower case."""
    name, _, port = host.strip().lower().rpartition(":")
    return name.rstrip(".") if name and port.isdigit() else host.strip().lower().rstrip(".")

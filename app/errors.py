"""Every error that can leave the service, with its HTTP status; ``docs/http.md`` lists their codes.

A ``RequestError`` is the request's fault: its message says what was expected and what was got. At a
``ServiceError`` the service is at fault, and another attempt, later or elsewhere, may succeed.
"""

import re
from collections.abc import Collection
from difflib import get_close_matches
from typing import Final

CAPITAL: Final = re.compile(r"(?<!^)(?=[A-Z])")
"""Where a word begins in the name of a class, but for the first."""


class LandmarkdError(Exception):
    """Base of all errors that the service raises on purpose.

    ``str(error)`` is the problem's ``detail``: it says what was expected and what was got, and
    contains no path, patient data or stack trace.
    """

    status = 500
    code = "internal"

    def __init_subclass__(cls, status: int | None = None, code: str = "") -> None:
        """Make a kind of error, whose code is the name of its class: that of NotReady is not-ready.

        Args:
            status: HTTP status; None: that of the base.
            code: Another code.
        """
        cls.status = status or cls.status
        cls.code = code or CAPITAL.sub("-", cls.__name__).lower()

    @property
    def title(self) -> str:
        """The problem's ``title``."""
        return self.code.replace("-", " ").capitalize()


class RequestError(LandmarkdError, status=400, code="bad-request"):
    """The request is invalid; sent again unchanged, it fails again."""


class NotAVolume(RequestError):
    """The bytes are no single file of a format that is read here."""


class BrokenVolume(RequestError):
    """The file is truncated or corrupt, or inflates past what its header declares."""


class NotAnArchive(RequestError):
    """The bytes are not a safetensors or npz file."""


class BrokenArchive(RequestError):
    """The file of arrays is truncated, corrupt or encrypted, or inflates past what it declares."""


class Unauthorized(RequestError, status=401):
    """The API key is missing or wrong."""


class Forbidden(RequestError, status=403):
    """The request comes from another site's page, for an unknown host, or for another's case."""


class UnknownModel(RequestError, status=404):
    """No model of that name is loaded."""


class UnknownJob(RequestError, status=404):
    """The client has no such job: it is another's, was removed, or its time to live has passed."""


class UnknownCase(RequestError, status=404):
    """No case of that model and id is kept."""


class UnknownFormat(RequestError, status=406):
    """The answer cannot be written in the format asked for."""


class SlowUpload(RequestError, status=408):
    """The body did not arrive in time."""


class NotFinished(RequestError, status=409):
    """A scan of a job has no answer yet."""


class WrongOffset(RequestError, status=409):
    """A part of an upload does not begin where the one before ended, or is too long."""


class WrongTusVersion(RequestError, status=412):
    """The client speaks a version of tus, the protocol of uploads, that the service does not."""


class TooLarge(RequestError, status=413):
    """The body or the volume is over a limit; the detail names the limit."""


class UnsupportedMediaType(RequestError, status=415):
    """The body's media type is none of those accepted."""


class BadGeometry(RequestError, status=422):
    """The volume's axes, affine or units do not define its position in 3D space."""


class BadVoxels(RequestError, status=422):
    """The voxel values are of a type that networks here do not support."""


class BadArrays(RequestError, status=422):
    """An array has a name, shape, type or value that cannot be read as votes; names the array."""


class BadParameter(RequestError, status=422):
    """A parameter of the request is invalid."""


class HeadTooLarge(RequestError, status=431):
    """The head or the trailers are over a limit; the detail names it."""


class ClientLeft(RequestError, status=499):
    """The client closed the connection before its answer; the status, nginx's, is only logged."""


class UnknownCoding(RequestError, status=501):
    """The body has a transfer coding besides ``chunked``."""


class ServiceError(LandmarkdError, status=503, code="unavailable"):
    """The service cannot answer now; the request itself may be valid."""


class QueueFull(ServiceError, status=429):
    """As much as allowed is in progress already."""

    def __init__(self, detail: str, retry_after_s: int) -> None:
        """Add when to try again.

        Args:
            detail: Of the problem.
            retry_after_s: Whole seconds after which there is probably room.
        """
        super().__init__(detail)
        self.retry_after_s = retry_after_s


class NotConfigured(ServiceError, status=501):
    """The service has no folder for what it should keep; the detail names the setting."""


class NotReady(ServiceError):
    """The model or the service is not ready to answer."""


class Draining(ServiceError):
    """The service is stopping and accepts nothing new."""


class DeadlineExceeded(ServiceError, status=504):
    """The answer did not come within the time the request allowed."""


class InsufficientMemory(ServiceError, status=507, code="does-not-fit"):
    """The request, or a single tile of its scan, needs more memory than there is."""


class NotStored(ServiceError, status=507):
    """The store of cases has no room, or the disk of cases or jobs took no more."""


class GivenUp(LandmarkdError):
    """A scan of a job during which the process has ended, again and again."""


class NetworkFailed(LandmarkdError):
    """The model's network raised, or its scores are not finite, for this volume."""


class ModelRefused(LandmarkdError, status=409):
    """A model folder breaks the contract; ``str`` names the key and the reason."""


class StartupError(LandmarkdError, code="cannot-start"):
    """The service cannot start with these settings on this machine."""


def describe_unknown(kind: str, name: str, known: Collection[str]) -> str:
    """Say that there is no key or parameter of a name, and which one was probably meant."""
    name = name[:80]  # A request may hold a long one.
    likely = get_close_matches(name, known, n=1)
    hint = f"did you mean {likely[0]!r}?" if likely else f"expected one of {', '.join(known)}"
    return f"unknown {kind} {name!r}: {hint}"


def show_controls(text: str, kept: str = "") -> str:
    """Write control characters, which a terminal obeys and a reader does not see, as escapes."""
    return "".join(
        one if one.isprintable() or one in kept else one.encode("unicode_escape").decode()
        for one in text
    )

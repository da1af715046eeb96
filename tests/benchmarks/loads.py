"""a Load -> Replies: what clients send, and what they got, sent by a process of their own."""

import pickle
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal, cast

ROOT: Final = Path(__file__).resolve().parents[2]

LEFT: Final = 0
"""Status of a request whose client did not wait for the answer."""

LOST: Final = -1
"""Status of a request whose connection broke."""

HANG_S: Final = 120.0
"""A client waits so long for a sign of life."""


@dataclass(frozen=True, slots=True)
class Message:
    """One HTTP request.

    Attributes:
        name: Says what kind it is, in replies.
        target: Path and query.
        body: Of a POST; empty: a GET.
        headers: Besides Host and Content-Length.
        leave: Close the connection in the middle of the upload, or right after it.
        keep: Keep the answer's body.
        rest: More of the body, sent after it; messages may share it.
    """

    name: str
    target: str
    body: bytes = b""
    headers: Mapping[str, str] | None = None
    leave: Literal["", "uploading", "waiting"] = ""
    keep: bool = False
    rest: bytes = b""


@dataclass(frozen=True, slots=True)
class Stream:
    """Clients that share a list of messages, each sending the next as soon as it has an answer.

    Attributes:
        messages: Go round.
        clients: Each has a connection of its own.
        count: How many messages in all; None: until time is up or the streams that count are done.
        address: Of the clients, on loopback: the service tells clients apart by it.
    """

    messages: tuple[Message, ...]
    clients: int = 1
    count: int | None = None
    address: str = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Load:
    """What is sent at the same time.

    Attributes:
        port: Of the server, on loopback.
        streams: Who sends what.
        seconds: After these no message is sent any more; what is under way is waited for.
        watch: Process whose memory is noted with every reply.
    """

    port: int
    streams: tuple[Stream, ...]
    seconds: float = 3600.0
    watch: int | None = None


@dataclass(frozen=True, slots=True)
class Reply:
    """What became of a message.

    Attributes:
        name: The message's.
        status: HTTP status, LEFT or LOST.
        start_s: When sending began, since the first message of all.
        seconds: From the first byte sent to the last one received.
        memory: Resident bytes of the watched process afterwards.
        body: Of the answer, if it was to be kept.
    """

    name: str
    status: int
    start_s: float
    seconds: float
    memory: int = 0
    body: bytes = b""


def send(load: Load) -> list[Reply]:
    """Let a process of its own send a load.

    Returns:
        A reply to every message that was sent, in the order of their ends.
    """
    done = subprocess.run(
        [sys.executable, "-m", "tests.benchmarks.load_client"],
        cwd=ROOT,
        input=pickle.dumps(load),
        stdout=subprocess.PIPE,
        check=True,
    )
    return cast("list[Reply]", pickle.loads(done.stdout))  # noqa: S301 - written by our own client


def send_one(port: int, message: Message) -> Reply:
    """Send one message and keep its answer."""
    keeping = replace(message, keep=True)
    (reply,) = send(Load(port, (Stream((keeping,), count=1),)))
    return reply


def of_kind(replies: Sequence[Reply], name: str) -> list[Reply]:
    """Choose the replies to one kind of message."""
    return [reply for reply in replies if reply.name == name]


def percentile(replies: Sequence[Reply], percent: float) -> float:
    """Read off the time, in ms, within which so many percent of the replies came (nearest rank)."""
    times = sorted(1e3 * reply.seconds for reply in replies)
    rank = -int(-percent * len(times) // 100)
    return times[max(rank, 1) - 1]


def multipart(content: bytes, field: str = "volume") -> tuple[bytes, dict[str, str]]:
    """Wrap a file in a form, as browsers and most client libraries do."""
    mark = "fence-of-the-benchmarks"
    disposition = f'Content-Disposition: form-data; name="{field}"; filename="scan.nii.gz"'
    head = f"--{mark}\r\n{disposition}\r\nContent-Type: application/octet-stream\r\n\r\n"
    body = b"".join((head.encode(), content, f"\r\n--{mark}--\r\n".encode()))
    return body, {"Content-Type": f"multipart/form-data; boundary={mark}"}

"""Who takes part in the chaos: groups of clients, their requests, and what each may end in.

Every client draws its requests from a generator of its own, so that a run can be repeated.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np

from tests.benchmarks.chaos.attempt import CLOSED, EVENT_STREAM, Attempt, Then, post
from tests.benchmarks.loads import LEFT, LOST, multipart
from tests.benchmarks.mutations import mutate, sound_archives, sound_scans
from tests.benchmarks.scans import HUGE, large_scans, skulls, small_scans
from tests.support import faulty_network as commands
from tests.support.faulty_network import command_scan
from tests.support.model_folders import TILE
from tests.support.nifti_files import nifti
from tests.support.vote_archives import npz

BODY_LIMIT: Final = 32 << 20
ADMIN_KEY: Final = "of-the-chaos"

BUSY: Final = frozenset({429, 503, 504})
"""What any request for work may end in while others take more than there is."""

STALL_S: Final = 40.0
"""Longer than the service waits for a client that reads nothing, by what it may be late with."""

UNREAD_EDGE: Final = 120

Random = np.random.Generator
Make = Callable[[str, Random], Attempt]


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of request.

    Attributes:
        name: Of the kind.
        make: Makes one, with its id.
        own: Statuses that it is for: one of them has to come sooner or later.
        others: Statuses in which it may also end.
        logged: Whether the service logs it under its id.
        weight: How often its clients choose it, over the weights of their other kinds.
    """

    name: str
    make: Make
    own: frozenset[int]
    others: frozenset[int] = BUSY
    logged: bool = True
    weight: int = 1


@dataclass(frozen=True, slots=True)
class Group:
    """Clients that do the same.

    Attributes:
        name: Of the group.
        clients: How many at once.
        address: Of all of them: the service takes them for one client.
        kinds: They choose from.
        pause_s: Of each client after each request.
    """

    name: str
    clients: int
    address: str
    kinds: tuple[Kind, ...]
    pause_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Scan:
    """A request whose answer is known.

    Attributes:
        target: Path and query.
        body: Scan or archive.
    """

    target: str
    body: bytes


@dataclass(frozen=True)
class Chaos:
    """All that is sent.

    Attributes:
        known: Requests whose answers are known, by name.
        groups: Of clients.
    """

    known: Mapping[str, Scan] = field(default_factory=dict)
    groups: tuple[Group, ...] = ()


def make_chaos(*, fast: bool) -> Chaos:
    """Make all requests.

    Args:
        fast: Few and small scans.

    Returns:
        The groups of clients.
    """
    phantoms = _scans("phantom", "phantom", small_scans(2 if fast else 8))
    huge = _scans("huge", "phantom", large_scans(2, (120, 84, 100) if fast else HUGE))
    heads = _scans("skull", "mouse-skull", skulls(1 if fast else 3)[0])
    faulty = _scans("faulty", "faulty", [command_scan(seed=seed) for seed in range(4)])
    halved = _scans("halved", "faulty", [command_scan(commands.TOO_MANY)])
    votes = {
        f"votes {number}": Scan("/v1/votes", archive)
        for number, archive in enumerate(sound_archives())
    }
    small = {**phantoms, **faulty, **votes}
    groups = (
        Group("small", 6, "127.0.0.2", (_good("small", small, 12), *_careless(phantoms))),
        Group("large", 2, "127.0.0.3", (_good("huge", huge), _good("skull", heads))),
        Group("leaving", 4, "127.0.0.4", (_leaving(small, "leave"), _leaving(huge, "reset"))),
        Group("damaged", 2, "127.0.0.5", _damaged()),
        Group("slow", 8, "127.0.0.6", _slow(phantoms), pause_s=0.2),
        Group("unread", 2, "127.0.0.7", (_unread(6.0 if fast else STALL_S),), pause_s=1.0),
        Group("storm", 40, "127.0.0.8", (_good("storm", phantoms),), pause_s=12.0),
        Group("jobs", 2, "127.0.0.12", _jobs(phantoms), pause_s=1.0),
        Group("operator", 1, "127.0.0.9", _reloads(), pause_s=2.0),
        Group(
            "faults",
            1,
            "127.0.0.10",
            (*_faults(), _good("halved", halved)),
            pause_s=3.0 if fast else 10.0,
        ),
        Group("watch", 1, "127.0.0.11", _watch(), pause_s=0.1),
    )
    return Chaos({**small, **huge, **heads, **halved}, groups)


def _scans(name: str, model: str, contents: list[bytes]) -> dict[str, Scan]:
    target = f"/v1/landmarks?model={model}"
    return {f"{name} {number}": Scan(target, body) for number, body in enumerate(contents)}


def _choose(scans: Mapping[str, Scan], random: Random) -> tuple[str, Scan]:
    name = list(scans)[random.integers(len(scans))]
    return name, scans[name]


def _good(kind: str, scans: Mapping[str, Scan], weight: int = 1) -> Kind:
    def make(request_id: str, random: Random) -> Attempt:
        name, scan = _choose(scans, random)
        way = random.integers(6)
        then: Then = "read"
        if way == 0:
            content = post(scan.target, scan.body, request_id, chunked=True)
        elif way == 1 and "landmarks" in scan.target:
            body, headers = multipart(scan.body)
            content = post(scan.target, body, request_id, headers)
        elif way == 2 and "landmarks" in scan.target:
            content = post(scan.target, scan.body, request_id, {"Accept": EVENT_STREAM})
        else:
            content = post(scan.target, scan.body, request_id)
            then = "close half" if way == 3 else "read"
        return Attempt(content, then=then, known=name)

    return Kind(kind, make, frozenset({200}), weight=weight)


def _jobs(scans: Mapping[str, Scan]) -> tuple[Kind, ...]:
    """Leave scans with the service, which owes their answers from then on."""

    def make(request_id: str, random: Random) -> Attempt:
        name, scan = _choose(scans, random)
        if random.integers(2):
            content = post(scan.target, scan.body, request_id, {"Prefer": "respond-async"})
        else:
            target = scan.target.replace("/landmarks", "/jobs")
            content = post(target, scan.body, request_id)
        return Attempt(content, known=name)

    return (Kind("job", make, frozenset({202})),)


def _careless(scans: Mapping[str, Scan]) -> tuple[Kind, ...]:
    """Requests with a mistake each: most are refused before any work."""
    body = next(iter(scans.values())).body
    raw = "/v1/landmarks?model=phantom"
    # Of 700³ voxels nothing but the header is ever sent; it would be longer than a body may be.
    endless = post(raw, nifti(dim=[3, 700, 700, 700, 1, 1, 1, 1]) + bytes(70_000), "ID")
    endless = endless.replace(b"Content-Length: ", b"Content-Length: 31")
    cases = {
        "unknown model": (post("/v1/landmarks?model=nobody", body, "ID"), 404),
        "unknown query": (post(f"{raw}&colour=red", body, "ID"), 422),
        "unknown format": (post(f"{raw}&format=dwg", body, "ID"), 406),
        "media type": (post(raw, body, "ID", {"Content-Type": "text/html"}), 415),
        "no scan": (post(raw, b"no scan", "ID"), 400),
        "cut": (post(raw, body[: len(body) // 2], "ID"), 400),
        "late": (post(f"{raw}&timeout_s=0.001", body, "ID"), 504),
        "long": (post(raw, b"x", "ID", {"Content-Length": str(BODY_LIMIT + 1)}), 413),
        "too many voxels": (endless, 413),
        "giant grid": (post(raw, _coarse(), "ID"), 422),
        "no key": (post("/v1/models/phantom/reload", b"x", "ID"), 401),
        "another site": (post(raw, body, "ID", {"Sec-Fetch-Site": "cross-site"}), 403),
    }
    return tuple(_fixed(name, content, status) for name, (content, status) in cases.items())


def _fixed(name: str, content: bytes, status: int, attempt: Attempt | None = None) -> Kind:
    """Make a kind that is always the same but for its id."""

    def make(request_id: str, _random: Random) -> Attempt:
        named = content.replace(
            b"X-Request-ID: ID\r\n", b"X-Request-ID: %b\r\n" % request_id.encode()
        )
        return replace(attempt or Attempt(b""), content=named)

    return Kind(name, make, frozenset({status}), logged=b"X-Request-ID: ID" in content)


def _coarse() -> bytes:
    """Make a scan of 8 voxels that are 800 mm wide."""
    wide = np.diag([800.0, 800.0, 800.0])
    rows: dict[str, Any] = {f"srow_{axis}": [*wide[row], 0.0] for row, axis in enumerate("xyz")}
    return nifti(np.arange(8, dtype="int16").reshape(2, 2, 2), **rows)


def _leaving(scans: Mapping[str, Scan], then: Then) -> Kind:
    def make(request_id: str, random: Random) -> Attempt:
        _, scan = _choose(scans, random)
        headers = {"Accept": EVENT_STREAM} if random.random() < 0.5 else None
        share = 1.0 if random.random() < 0.7 else float(random.random())
        wait_s = float(random.exponential(0.3))
        content = post(scan.target, scan.body, request_id, headers)
        return Attempt(content, share=share, then=then, wait_s=wait_s)

    return Kind(then, make, frozenset({LEFT}), frozenset())


def _damaged() -> tuple[Kind, ...]:
    """Damaged scans and archives; some of them can be answered nevertheless."""
    refused = frozenset({400, 406, 413, 422})
    kinds = []
    for name, files, target in (
        ("damaged scan", sound_scans(), "/v1/landmarks?model=phantom&timeout_s=5"),
        ("damaged archive", sound_archives(), "/v1/votes?timeout_s=5"),
    ):

        def make(
            request_id: str,
            random: Random,
            files: tuple[bytes, ...] = files,
            target: str = target,
        ) -> Attempt:
            mutant = mutate(files, int(random.integers(1 << 32)))
            return Attempt(post(target, mutant.content or b"\0", request_id))

        kinds.append(Kind(name, make, refused, BUSY | {200}))
    return tuple(kinds)


def _slow(scans: Mapping[str, Scan]) -> tuple[Kind, ...]:
    """Clients that send slowly, never to the end, or more than anybody needs."""
    scan = next(iter(scans.values()))
    whole = post(scan.target, scan.body, "ID")
    fields = b"".join(b"x-%d: %b\r\n" % (number, b"a" * 1000) for number in range(90))
    trailers = post(scan.target, scan.body, "ID", chunked=True, trailers=fields)
    many = post("/v1/models", b"", "ID", {f"x-{number}": "a" for number in range(200)})
    twice = b"GET /v1/models HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n"

    def trickle(request_id: str, random: Random) -> Attempt:
        name, scan = _choose(scans, random)
        return Attempt(post(scan.target, scan.body, request_id), pieces=8, pause_s=0.3, known=name)

    stalled = replace(_fixed("stalled body", whole, 408, Attempt(b"", share=0.5)), weight=3)
    return (
        Kind("slow body", trickle, frozenset({200}), BUSY | {408}),
        stalled,
        _fixed("stalled head", whole[:60], CLOSED),
        _fixed("silent", b"", CLOSED),
        # Its scan is whole, and may be answered before the trailers are too many.
        replace(_fixed("endless trailers", trailers, 431), others=BUSY | {200}),
        replace(_fixed("endless head", many, 431), logged=False),
        _fixed("two hosts", twice, 400),
        _fixed("no HTTP", b"\x16\x03\x01\x02\0\x01\0\x01\xfc\x03\x03\r\n\r\n", 400),
    )


def _unread(wait_s: float) -> Kind:
    """Ask for megabytes, and read nothing."""
    arrays = {
        "probs": np.ones((UNREAD_EDGE,) * 3 + (1,), np.float16),
        "offsets": np.zeros((UNREAD_EDGE,) * 3 + (3,), np.float16),
    }
    archive = npz(arrays)
    target = "/v1/votes?format=rows.csv&threshold=0"

    def make(request_id: str, _random: Random) -> Attempt:
        content = post(target, archive, request_id, {"Accept": "*/*"})
        return Attempt(content, then="do not read", wait_s=wait_s)

    # All of it arrives if the service was late with it, so that the client reads in time.
    own = LOST if wait_s >= STALL_S else LEFT
    return Kind("unread", make, frozenset({own}), BUSY | {LEFT, 200})


def _reloads() -> tuple[Kind, ...]:
    key = {"Authorization": f"Bearer {ADMIN_KEY}"}
    busy = frozenset({503})
    return tuple(
        replace(
            _fixed(f"reload {name}", post(f"/v1/models/{name}/reload", b"x", "ID", key), status),
            others=busy | others,
        )
        for name, status, others in (
            ("phantom", 200, frozenset[int]()),
            # Its folder is half-copied from time to time.
            ("mouse-skull", 200, frozenset({409})),
            ("broken", 409, frozenset()),
            ("nobody", 404, frozenset()),
        )
    )


def _faults() -> tuple[Kind, ...]:
    """End the device's thread, or ask for more memory than there is."""
    target = "/v1/landmarks?model=faulty"
    return tuple(
        _fixed(name, post(target, command_scan(command, shape=TILE), "ID"), status)
        for name, command, status in (
            ("thread killed", commands.DIE, 503),
            ("tile that does not fit", commands.TOO_LARGE, 507),
        )
    )


def _watch() -> tuple[Kind, ...]:
    always: tuple[tuple[str, bool, frozenset[int], frozenset[int]], ...] = (
        ("/livez", False, frozenset({200}), frozenset()),
        ("/readyz", False, frozenset({200}), frozenset({503})),
        ("/metrics", False, frozenset({200}), frozenset()),
        ("/v1/models", True, frozenset({200}), frozenset()),
        ("/page/phantom.nii.gz", True, frozenset({200}), frozenset({429})),
    )
    return tuple(
        replace(_fixed(path, post(path, b"", "ID"), 200), own=own, others=others, logged=logged)
        for path, logged, own, others in always
    )

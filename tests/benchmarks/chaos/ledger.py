"""Everything that was sent and answered -> which promises were broken.

Every request must end in one of the outcomes of its kind, every good answer must be right, and what
the clients saw must be what the service has logged: one line for every request that it answered.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from tests.benchmarks.chaos.attempt import CLOSED, REFUSED, Answer
from tests.benchmarks.chaos.clients import Kind
from tests.benchmarks.harness import DisagreementError
from tests.benchmarks.loads import LEFT, LOST
from tests.benchmarks.servers import check_same

DOCUMENTED: Final = frozenset({503, 504, 507})
"""What a service may answer above 500: it is full or stops, it is late, it does not fit."""

WHILE_STOPPING: Final = frozenset({503, CLOSED, LOST, REFUSED})
"""How any request may end while the service stops or is started again."""

PROBES: Final = ("/livez", "/readyz", "/metrics")

NAMES: Final = {LEFT: "left", LOST: "lost", CLOSED: "closed", REFUSED: "refused"}


@dataclass(frozen=True, slots=True)
class Entry:
    """One request.

    Attributes:
        request_id: Sent along.
        kind: Of request.
        status: In which it ended: in a stream of events, that of the last one.
        logged_status: That the service must have logged.
        start_s: When it was sent.
        seconds: Until it ended.
        mistake: What is wrong with its answer; empty: nothing.
    """

    request_id: str
    kind: Kind
    status: int
    logged_status: int
    start_s: float
    seconds: float
    mistake: str = ""


@dataclass(slots=True)
class Ledger:
    """All requests, and what the service says about them.

    Attributes:
        entries: All requests that have ended.
        stops: From when to when the service was stopping or away.
        log: Lines of the service, one per request.
        expected: Right answers, by the name of their scan.
    """

    entries: list[Entry] = field(default_factory=list)
    stops: list[tuple[float, float]] = field(default_factory=list)
    log: list[Mapping[str, Any]] = field(default_factory=list)
    expected: dict[str, bytes] = field(default_factory=dict)

    def add(
        self, request_id: str, kind: Kind, answer: Answer, known: str, start_s: float, end_s: float
    ) -> None:
        """Enter a request that has ended.

        Args:
            request_id: That it was sent with.
            kind: Of request.
            answer: What came back.
            known: Name of its scan, if its answer is known.
            start_s: When it was sent.
            end_s: When it had ended.
        """
        status, content = answer.settle()
        mistake = ""
        if status == 200 and known:
            mistake = self._compare(content, known)
        elif status == 429 and "retry-after" not in answer.headers and answer.status == 429:
            mistake = "no Retry-After"
        elif status >= 400 and not _is_problem(content, status):
            mistake = f"no problem of status {status}"
        times = start_s, end_s - start_s
        self.entries.append(Entry(request_id, kind, status, answer.status, *times, mistake))

    def _compare(self, content: object, known: str) -> str:
        if known not in self.expected:
            return f"no answer to compare {known} with"
        try:
            check_same(json.dumps(content).encode(), self.expected[known], "alone")
        except (DisagreementError, KeyError, TypeError) as error:
            return f"{known}: {error}"
        return ""

    def odd_outcomes(self) -> list[str]:
        """List requests that ended as they must not."""
        return [
            f"{entry.kind.name}: {NAMES.get(entry.status, entry.status)}"
            for entry in self.entries
            if not self._may_end_so(entry)
        ]

    def _may_end_so(self, entry: Entry) -> bool:
        if entry.status in entry.kind.own | entry.kind.others:
            return True
        return entry.status in WHILE_STOPPING and self._in_a_stop(entry)

    def _in_a_stop(self, entry: Entry) -> bool:
        end_s = entry.start_s + entry.seconds
        return any(entry.start_s <= last and first <= end_s for first, last in self.stops)

    def undocumented(self) -> list[str]:
        """List answers above 500 that are not documented."""
        return [
            f"{entry.kind.name}: {entry.status}"
            for entry in self.entries
            if entry.status >= 500 and entry.status not in DOCUMENTED
        ]

    def mistakes(self) -> list[str]:
        """List answers that are wrong."""
        return [f"{entry.kind.name}: {entry.mistake}" for entry in self.entries if entry.mistake]

    def imbalances(self) -> list[str]:
        """List requests that clients and the service tell differently."""
        lines: dict[str, list[int]] = {}
        for line in self.log:
            lines.setdefault(str(line["request_id"]), []).append(int(line["status"]))
        found = []
        unnamed, unnamed_lost = 0, 0
        for entry in self.entries:
            if entry.kind.logged:
                statuses = lines.pop(entry.request_id, [])
                if not self._balances(entry, statuses):
                    seen = NAMES.get(entry.logged_status, entry.logged_status)
                    found.append(f"{entry.kind.name}: {seen}, logged {statuses}")
            elif not entry.kind.name.startswith(PROBES):
                unnamed += entry.logged_status > 0
                unnamed_lost += entry.logged_status in {LOST, CLOSED}
        others = sum(len(statuses) for statuses in lines.values())
        if not unnamed <= others <= unnamed + unnamed_lost:
            found.append(f"{unnamed} answers without an id, {others} logged")
        return found

    def _balances(self, entry: Entry, statuses: Sequence[int]) -> bool:
        if entry.logged_status > 0:
            return statuses == [entry.logged_status]
        if entry.logged_status in entry.kind.own | entry.kind.others:
            return len(statuses) <= 1
        return not statuses  # The service must answer what it has accepted, stopping or not.

    def missing(self) -> list[str]:
        """List kinds of requests that never ended as they are meant to."""
        reached: dict[str, bool] = {}
        for entry in self.entries:
            name = entry.kind.name
            reached[name] = reached.get(name, False) or entry.status in entry.kind.own
        return [name for name, found in reached.items() if not found]

    def outcomes(self) -> Counter[str]:
        """Count the requests by how they ended."""
        return Counter(str(NAMES.get(entry.status, entry.status)) for entry in self.entries)


def _is_problem(content: object, status: int) -> bool:
    return isinstance(content, dict) and content.get("status", status) == status

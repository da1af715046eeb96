"""A typed client for a service elsewhere; it needs no torch."""

import io
import os
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from typing import Any, Final, TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from app.cli.scan_files import Scan, open_scan, read_scan
from app.errors import BrokenVolume, LandmarkdError, TooLarge
from app.io import (
    CaseAnswer,
    JobAnswer,
    JobsAnswer,
    LandmarksAnswer,
    ModelsAnswer,
    Problem,
    ReadinessAnswer,
)
from app.settings import API_KEY, NO_PROXY, bearer, hide_password, service_url

T = TypeVar("T")
Answer = TypeVar("Answer", bound=BaseModel)
OnProgress = Callable[[float], None]
"""Takes the share that is done, from 0 to 1."""

TUS: Final = {"Tus-Resumable": "1.0.0"}
PART: Final = TUS | {"Content-Type": "application/offset+octet-stream"}
PART_BYTES: Final = 8 << 20
POLL_S: Final = 1.0
GIVE_UP_S: Final = 10.0
"""For removing what has arrived of a file that is not sent on."""

RETRY_S: Final = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0)
"""Waits between attempts, of which each may get further than the one before."""

FULL: Final = 429
"""Status of a service with as many requests, or bytes of them, in work as it takes."""

PASSING: Final = (408, FULL, 503)
"""Statuses of a service that is busy, restarting, or at the other end of a slow line."""


class ProblemError(LandmarkdError, code="problem"):
    """The service answered with a problem."""

    title = "The service refused the request"

    def __init__(self, problem: Problem) -> None:
        # Arguments are what a copy is made of, as where another process raises it.
        super().__init__(problem)
        self.problem = problem

    def __str__(self) -> str:
        return f"{self.problem.title}: {self.problem.detail}"


class Unreachable(LandmarkdError):
    """No service answers at the address, or something else does, such as a proxy; it says why."""

    title = "No service"


class Client:
    """A connection to one service; use it as a context manager. Threads and forks may share it.

    All methods raise ``ProblemError`` if the service refuses what they ask, whose problem says why,
    and ``Unreachable`` if no service answers.

    Args:
        url: Base address, such as ``http://127.0.0.1:8000``; ``http://`` may be left out.
        api_key: Sent with every request; None: that in ``LANDMARKD_API_KEY``, if there is one.
        timeout_s: Time to wait for an answer.

    Raises:
        Unreachable: The address is none, or certificates to trust cannot be read.
        Unauthorized: The key is not one line of text.
    """

    def __init__(self, url: str, *, api_key: str | None = None, timeout_s: float = 600.0) -> None:
        headers = bearer(os.environ.get(API_KEY) if api_key is None else api_key)
        base = service_url(url)
        self._address = hide_password(base)
        self._connect = partial(
            httpx.Client, base_url=base, headers=headers, timeout=timeout_s, mounts=NO_PROXY
        )
        try:
            self._connections = {os.getpid(): self._connect()}
        except OSError as error:
            raise Unreachable(
                f"expected certificates in SSL_CERT_FILE and SSL_CERT_DIR, got: {error}"
            ) from error
        except (httpx.InvalidURL, ImportError, ValueError) as error:
            # Proxies raise all of them: one of SOCKS the second, where the package for it lacks.
            raise Unreachable(
                f"expected the address of a service, got {hide_password(url)} (or those of "
                f"proxies in the environment, such as ALL_PROXY and NO_PROXY): {error}"
            ) from error
        if not self._http.base_url.host:
            raise Unreachable(f"expected the address of a service, got {self._address}")

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_error: object) -> None:
        self._http.close()

    def detect(
        self,
        content: Scan,
        *,
        model: str | None = None,
        frame: int | None = None,
        series: int | None = None,
    ) -> LandmarksAnswer:
        """Find the landmarks of a scan.

        Args:
            content: The scan.
            model: Name of the model; None for the service's default model.
            frame: Which frame of a 4D file, from 0.
            series: Which series of a DICOM archive, from 0.

        Raises:
            NotAVolume: There are no DICOM files in the folder.
        """
        response = self._send(
            "POST",
            "/v1/landmarks",
            content=read_scan(content),
            params=_query(model=model, frame=frame, series=series),
            headers={"Content-Type": "application/octet-stream", "Accept": "application/json"},
        )
        return self._parse(LandmarksAnswer, response)

    def detect_in_turn(self, content: Scan, **options: Any) -> LandmarksAnswer:
        """Do as ``detect``; wait some minutes for room in a service that is full."""
        return _persist(partial(self.detect, content, **options), _is_full)

    def detect_patiently(self, content: Scan, **options: Any) -> LandmarksAnswer:
        """Do as ``detect_in_turn``; of a service that restarts, wait until it is ready again.

        The scan is worked on twice at most, as it may be what ended the service.
        """
        try:
            return self.detect_in_turn(content, **options)
        except (Unreachable, ProblemError) as error:
            if not _is_passing(error):
                raise
        _persist(partial(self._send, "GET", "/readyz"))
        return self.detect_in_turn(content, **options)

    def submit(
        self,
        content: Scan,
        *,
        model: str | None = None,
        frame: int | None = None,
        series: int | None = None,
        on_progress: OnProgress = lambda _: None,
    ) -> JobAnswer:
        """Leave a scan with the service, or a ZIP archive of many, for ``wait`` and ``result``.

        It is sent in parts: after a broken connection, or while the service restarts, sending goes
        on where it was, unless that lasts for some minutes. Whatever else ends the call, Ctrl-C
        included, what has arrived is removed.

        Args:
            content: The scan or archive; a file is not read as a whole.
            model: Name of the model; None for the service's default model.
            frame: Which frame of 4D files, from 0.
            series: Which series of a DICOM archive, from 0.
            on_progress: Called after each part.

        Returns:
            The job, whose id is what the other methods want.

        Raises:
            BrokenVolume, NotAVolume: The file has become shorter; the folder has no DICOM files.
        """
        with open_scan(content) as file:
            size = file.seek(0, os.SEEK_END)
            response = self._send(
                "POST",
                "/v1/uploads",
                params=_query(model=model, frame=frame, series=series),
                headers=TUS | {"Upload-Length": str(size)},
            )
            job = self._header(response, "Location").rpartition("/")[2]
            try:
                sent = 0
                while sent < size:
                    sent = _persist(lambda: self._send_part(job, file, size))
                    on_progress(sent / size)
                return self._job(job)
            except BaseException:
                # Nobody could go on with it, and a client may have few that are not finished.
                with suppress(ProblemError, Unreachable):
                    self._send("DELETE", f"/v1/uploads/{job}", headers=TUS, timeout=GIVE_UP_S)
                raise

    def wait(self, job: str, on_progress: OnProgress = lambda _: None) -> JobAnswer:
        """Wait until each scan of a job is done or has failed, also while the service restarts.

        ``on_progress`` is called every second.
        """
        while (found := self._job(job)).state != "finished":
            running = [one.tile / one.tiles for one in found.scans if one.tiles]
            on_progress((found.done + found.failed + sum(running)) / found.total)
            time.sleep(POLL_S)
        on_progress(1.0)
        return found

    def result(self, job: str, number: int = 0) -> LandmarksAnswer:
        """Get the landmarks of a scan of a job.

        Args:
            job: Its id.
            number: Which of its scans, in the order of ``JobAnswer.scans``.

        Raises:
            ProblemError: The scan has failed, or is not done yet; the problem says which.
        """
        path = f"/v1/jobs/{job}/scans/{number}"
        return self._parse(LandmarksAnswer, self._send("GET", path, params={"format": "json"}))

    def jobs(self) -> JobsAnswer:
        """List all jobs of this key, or without one of this address; the newest first."""
        part = self._parse(JobsAnswer, self._send("GET", "/v1/jobs"))
        jobs = part.jobs
        while part.next is not None:
            params = {"after": part.next}
            part = self._parse(JobsAnswer, self._send("GET", "/v1/jobs", params=params))
            jobs += part.jobs
        return JobsAnswer(jobs=jobs)

    def remove(self, job: str) -> None:
        """Cancel a job, or forget its results."""
        self._send("DELETE", f"/v1/jobs/{job}")

    def keep(
        self,
        content: Scan,
        answer: LandmarksAnswer,
        *,
        frame: int | None = None,
        series: int | None = None,
    ) -> CaseAnswer:
        """Keep a scan with its corrected landmarks, for the service's models to learn from.

        Args:
            content: The scan, as it was given to ``detect``.
            answer: That of ``detect``, corrected; see ``landmarkd.correct``.
            frame: As it was given to ``detect``.
            series: Likewise.

        Returns:
            The case. One that was kept of this scan before is replaced.
        """
        response = self._send(
            "POST",
            "/v1/cases",
            files={"volume": read_scan(content), "answer": answer.model_dump_json().encode()},
            params=_query(frame=frame, series=series),
        )
        return self._parse(CaseAnswer, response)

    def models(self) -> ModelsAnswer:
        """List the service's models."""
        return self._parse(ModelsAnswer, self._send("GET", "/v1/models"))

    def readiness(self) -> ReadinessAnswer:
        """Ask whether the service is ready; "not ready" is an answer, too."""
        return self._parse(ReadinessAnswer, self._request("GET", "/readyz"))

    @property
    def _http(self) -> httpx.Client:
        """The connection of this process: on its parent's, a fork would get others' answers."""
        if os.getpid() not in self._connections:
            self._connections[os.getpid()] = self._connect()
        return self._connections[os.getpid()]

    def _job(self, job: str) -> JobAnswer:
        return _persist(lambda: self._parse(JobAnswer, self._send("GET", f"/v1/jobs/{job}")))

    def _send_part(self, upload: str, file: io.BufferedIOBase, size: int) -> int:
        """Send the next bytes that the service has not got; returns how many it has got then."""
        path = f"/v1/uploads/{upload}"
        # By GET, as the answer to HEAD would not say what is wrong.
        offset = self._header(self._send("GET", path, headers=TUS), "Upload-Offset")
        if int(offset) < size:
            file.seek(int(offset))
            headers = PART | {"Upload-Offset": offset}
            part = file.read(PART_BYTES)
            if not part:
                raise BrokenVolume(f"expected a file of {size} bytes, as it was, got {offset}")
            response = self._send("PATCH", path, content=part, headers=headers)
            offset = self._header(response, "Upload-Offset")
        return int(offset)

    def _send(self, method: str, path: str, **options: Any) -> httpx.Response:
        response = self._request(method, path, **options)
        if not response.is_success:  # Nor of a redirection: it has done nothing.
            raise ProblemError(self._parse(Problem, response))
        return response

    def _request(self, method: str, path: str, **options: Any) -> httpx.Response:
        try:
            return self._http.request(method, path, **options)
        except (httpx.RequestError, UnicodeError) as error:
            # Such as a certificate that is not trusted, a refused connection, the time, or a name
            # of a host that cannot be one.
            why = str(error) or type(error).__name__
            if "certificate verify failed" in why:
                why += "; SSL_CERT_FILE names the file of the authorities to trust"
            raise Unreachable(
                f"expected a service at {self._address}, got no answer: {why}"
            ) from error

    def _parse(self, kind: type[Answer], response: httpx.Response) -> Answer:
        try:
            return kind.model_validate_json(response.content)
        except ValidationError as error:
            raise self._stranger(response) from error

    def _header(self, response: httpx.Response, name: str) -> str:
        if name not in response.headers:
            raise self._stranger(response)
        return response.headers[name]

    def _stranger(self, response: httpx.Response) -> LandmarkdError:
        if response.status_code == HTTPStatus.REQUEST_ENTITY_TOO_LARGE:  # For good, unlike others.
            return TooLarge(
                f"expected a proxy at {self._address} that lets requests of this size pass, "
                "got HTTP status 413"
            )
        return Unreachable(
            f"expected a service at {self._address}, got HTTP status "
            f"{response.status_code} with a body that is not landmarkd's"
        )


def _is_full(error: Unreachable | ProblemError) -> bool:
    return isinstance(error, ProblemError) and error.problem.status == FULL


def _is_passing(error: Unreachable | ProblemError) -> bool:
    return isinstance(error, Unreachable) or error.problem.status in PASSING


def _persist(
    attempt: Callable[[], T],
    is_passing: Callable[[Unreachable | ProblemError], bool] = _is_passing,
) -> T:
    """Try until it succeeds, for some minutes; a refusal is final."""
    for wait_s in RETRY_S:
        try:
            return attempt()
        except (Unreachable, ProblemError) as error:
            if not is_passing(error):
                raise
        time.sleep(wait_s)
    return attempt()


def _query(**values: str | int | None) -> dict[str, str | int]:
    return {key: value for key, value in values.items() if value is not None}

"""A typed client for a service elsewhere; it needs no torch."""

from pathlib import Path
from typing import Any, TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from app.errors import LandmarkdError
from app.io import CaseAnswer, LandmarksAnswer, ModelsAnswer, Problem, ReadinessAnswer

Answer = TypeVar("Answer", bound=BaseModel)


class ProblemError(LandmarkdError):
    """The service answered with a problem.

    Attributes:
        problem: The problem details.
    """

    code = "problem"
    title = "The service refused the request"

    def __init__(self, problem: Problem) -> None:
        super().__init__(f"{problem.title}: {problem.detail}")
        self.problem = problem


class Unreachable(LandmarkdError):
    """No service answers at the address, or something else does, such as a proxy."""

    code = "unreachable"
    title = "No service"


class Client:
    """A connection to one service; use it as a context manager.

    Args:
        url: Base address, such as ``http://127.0.0.1:8000``.
        api_key: Sent with every request; None if the service needs none.
        timeout_s: Time to wait for an answer.
    """

    def __init__(self, url: str, *, api_key: str | None = None, timeout_s: float = 600.0) -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._http = httpx.Client(base_url=url, headers=headers, timeout=timeout_s)

    def __enter__(self) -> "Client":
        """Keep the connection open for the context."""
        return self

    def __exit__(self, *_error: object) -> None:
        """Close the connection."""
        self._http.close()

    def detect(
        self,
        content: bytes | Path,
        *,
        model: str | None = None,
        frame: int | None = None,
        series: int | None = None,
    ) -> LandmarksAnswer:
        """Find the landmarks of a scan.

        Args:
            content: A file of any format that the service reads, or where it lies.
            model: Name of the model; None for the service's default model.
            frame: Which frame of a 4D file, from 0.
            series: Which series of a DICOM archive, from 0.

        Raises:
            ProblemError: The service refused the request; the problem says why.
            Unreachable: No service answers.
        """
        response = self._send(
            "POST",
            "/v1/landmarks",
            content=_read(content),
            params=_query(model=model, frame=frame, series=series),
            headers={"Content-Type": "application/octet-stream", "Accept": "application/json"},
        )
        return self._parse(LandmarksAnswer, response)

    def keep(
        self,
        content: bytes | Path,
        answer: LandmarksAnswer,
        *,
        frame: int | None = None,
        series: int | None = None,
    ) -> CaseAnswer:
        """Keep a scan with its corrected landmarks, for the service's models to learn from.

        Args:
            content: The scan, as it was given to ``detect``.
            answer: That of ``detect``, corrected; see ``app.io.correct``.
            frame: As it was given to ``detect``.
            series: Likewise.

        Returns:
            The case. One that was kept of this scan before is replaced.

        Raises:
            ProblemError: The service refused the case, or keeps none; the problem says why.
            Unreachable: No service answers.
        """
        response = self._send(
            "POST",
            "/v1/cases",
            files={"volume": _read(content), "answer": answer.model_dump_json().encode()},
            params=_query(frame=frame, series=series),
        )
        return self._parse(CaseAnswer, response)

    def models(self) -> ModelsAnswer:
        """List the service's models.

        Raises:
            ProblemError: The service refused the request; the problem says why.
            Unreachable: No service answers.
        """
        return self._parse(ModelsAnswer, self._send("GET", "/v1/models"))

    def readiness(self) -> ReadinessAnswer:
        """Ask whether the service is ready; "not ready" is an answer, too.

        Raises:
            Unreachable: No service answers.
        """
        return self._parse(ReadinessAnswer, self._request("GET", "/readyz"))

    def _send(self, method: str, path: str, **options: Any) -> httpx.Response:
        response = self._request(method, path, **options)
        if response.is_error:
            raise ProblemError(self._parse(Problem, response))
        return response

    def _request(self, method: str, path: str, **options: Any) -> httpx.Response:
        try:
            return self._http.request(method, path, **options)
        except httpx.RequestError as error:
            raise Unreachable(f"expected a service at {self._http.base_url}, got none") from error

    def _parse(self, kind: type[Answer], response: httpx.Response) -> Answer:
        try:
            return kind.model_validate_json(response.content)
        except ValidationError as error:
            raise Unreachable(
                f"expected a service at {self._http.base_url}, got HTTP status "
                f"{response.status_code} with a body that is not landmarkd's"
            ) from error


def _read(content: bytes | Path) -> bytes:
    return content.read_bytes() if isinstance(content, Path) else content


def _query(**values: str | int | None) -> dict[str, str | int]:
    return {key: value for key, value in values.items() if value is not None}

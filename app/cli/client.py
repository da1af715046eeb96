"""A typed client for a service elsewhere; it needs no torch."""

from pathlib import Path
from typing import Any, TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from app.errors import LandmarkdError
from app.io import LandmarksAnswer, ModelsAnswer, Problem, ReadinessAnswer

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

        Returns:
            The answer.

        Raises:
            ProblemError: The service refused the request; the problem says why.
            Unreachable: No service answers.
        """
        query = {"model": model, "frame": frame, "series": series}
        response = self._send(
            "POST",
            "/v1/landmarks",
            content=content.read_bytes() if isinstance(content, Path) else content,
            params={key: value for key, value in query.items() if value is not None},
            headers={"Content-Type": "application/octet-stream", "Accept": "application/json"},
        )
        return self._parse(LandmarksAnswer, response)

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

"""scan -> answer, by a service elsewhere: a typed client that needs no torch."""

from types import TracebackType

import httpx

from app.errors import LandmarkdError
from app.io import LandmarksAnswer, ModelsAnswer, Problem, ReadinessAnswer


class ProblemError(LandmarkdError):
    """The service answered with a problem.

    Attributes:
        problem: What it said.
    """

    code = "problem"
    title = "The service refused"

    def __init__(self, problem: Problem) -> None:
        """Args: what the service said."""
        super().__init__(f"{problem.title}: {problem.detail}")
        self.problem = problem


class Unreachable(LandmarkdError):
    """No service answers at the address."""

    code = "unreachable"
    title = "No service"


class Client:
    """A connection to one landmarkd."""

    def __init__(self, url: str, *, api_key: str | None = None, timeout_s: float = 600.0) -> None:
        """Args: base address, key if the service wants one, and seconds to wait for an answer."""
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._http = httpx.Client(base_url=url, headers=headers, timeout=timeout_s)

    def __enter__(self) -> "Client":
        """Keep the connection for the context."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the connection."""
        self._http.close()

    def detect(
        self, content: bytes, *, model: str | None = None, frame: int | None = None
    ) -> LandmarksAnswer:
        """Find the landmarks of a scan.

        Args:
            content: A NIfTI file, plain or gzip.
            model: Name of the model; None for the default one.
            frame: Which frame of a 4D file.

        Returns:
            The answer.

        Raises:
            ProblemError: The service refused; the problem says why.
            Unreachable: No service answers.
        """
        query = {"model": model, "frame": frame}
        response = self._send(
            "POST",
            "/v1/landmarks",
            content=content,
            params={key: value for key, value in query.items() if value is not None},
            headers={"Content-Type": "application/octet-stream", "Accept": "application/json"},
        )
        return LandmarksAnswer.model_validate_json(response.content)

    def models(self) -> ModelsAnswer:
        """List the service's models."""
        return ModelsAnswer.model_validate_json(self._send("GET", "/v1/models").content)

    def readiness(self) -> ReadinessAnswer:
        """Ask whether the service is ready; an answer that says no is no error."""
        try:
            return ReadinessAnswer.model_validate_json(self._http.get("/readyz").content)
        except httpx.TransportError as error:
            raise Unreachable(f"expected a service at {self._http.base_url}, got none") from error

    def _send(self, method: str, path: str, **options: object) -> httpx.Response:
        try:
            response = self._http.request(method, path, **options)  # type: ignore[arg-type]
        except httpx.TransportError as error:
            raise Unreachable(f"expected a service at {self._http.base_url}, got none") from error
        if response.is_error:
            raise ProblemError(Problem.model_validate_json(response.content))
        return response

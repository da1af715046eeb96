"""Bodies arrive whole whether or not the server can receive them in place."""

import asyncio
from collections.abc import Callable
from hashlib import sha256

import httpx
import numpy as np
import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send
from uvicorn import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from app.api.upload.direct import fill_body_of
from app.api.upload.plan import plan_upload
from app.api.upload.receive import MIN_DIRECT_BYTES, UploadLimits, read_upload
from app.server.http_protocol import HttpProtocol

BODY = np.random.default_rng(8).bytes(3 * MIN_DIRECT_BYTES + 5)


async def echo_digest(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with the digest of an upload, and whether the server offered the extension."""
    request = Request(scope, receive)
    plan = plan_upload(request.headers, len(BODY))
    upload = await read_upload(request, plan, UploadLimits(len(BODY), 30))
    offered = fill_body_of(scope) is not None
    answer = PlainTextResponse(f"{sha256(upload.content).hexdigest()} {offered}")
    await answer(scope, receive, send)


@pytest.mark.parametrize(
    ("protocol", "offered"),
    [(H11Protocol, False), (HttpToolsProtocol, False), (HttpProtocol, True)],
)
def test_large_body_arrives_whole_with_and_without_the_extension(
    protocol: Callable[[Config, ServerState, dict[str, object]], asyncio.Protocol], offered: bool
) -> None:
    async def upload() -> str:
        config = Config(echo_digest, lifespan="off", log_config=None)
        server = await asyncio.get_running_loop().create_server(
            lambda: protocol(config, ServerState(), {}), "127.0.0.1", 0
        )
        port = server.sockets[0].getsockname()[1]
        async with server, httpx.AsyncClient() as client:
            response = await client.post(f"http://127.0.0.1:{port}/", content=BODY)
        return response.text

    assert asyncio.run(upload()) == f"{sha256(BODY).hexdigest()} {offered}"

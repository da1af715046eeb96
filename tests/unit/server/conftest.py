"""Fixtures of the server's tests."""

import asyncio

import pytest
import uvloop

from tests.support.body_services import RunClient, client_runner


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def run_client(request: pytest.FixtureRequest) -> RunClient:
    """Run a client with a new service, on either event loop."""
    return client_runner(request.param)

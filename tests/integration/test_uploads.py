"""Uploads to real services over connections that break: what has arrived has arrived."""

import io
import socket
from contextlib import AbstractContextManager, closing
from functools import partial
from pathlib import Path

import httpx
import pytest
from blake3 import blake3
from tusclient.client import TusClient
from tusclient.uploader.uploader import Uploader

from tests.support.services import PATIENCE_S, ServiceProcess, ended, toy_models, toy_scan, until

TUS = {"Tus-Resumable": "1.0.0"}
SCAN = toy_scan((90, 80, 100))
DIGEST = blake3(SCAN).hexdigest()
BLOCK = 1 << 20


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy_models(tmp_path_factory.mktemp("uploads"))


def serving(
    models: Path, folder: Path, **environment: str
) -> AbstractContextManager[ServiceProcess]:
    return ended(ServiceProcess(models, JOBS=str(folder), **environment))


def begin(service: ServiceProcess) -> str:
    """Begin an upload; gives its path."""
    headers = TUS | {"Upload-Length": str(len(SCAN))}
    path: str = httpx.post(f"{service.url}/v1/uploads", headers=headers).headers["location"]
    return path


def send_some(service: ServiceProcess, path: str, offset: int, size: int) -> socket.socket:
    """Announce all of the rest, and send some of it over a connection that stays open."""
    connection = socket.create_connection(("127.0.0.1", service.port))
    connection.sendall(
        f"PATCH {path} HTTP/1.1\r\nHost: localhost\r\nUpload-Offset: {offset}\r\n"
        f"Content-Type: application/offset+octet-stream\r\n"
        f"Content-Length: {len(SCAN) - offset}\r\n\r\n".encode()
        + SCAN[offset : offset + size]
    )
    return connection


def offset_of(service: ServiceProcess, path: str) -> int:
    response = httpx.head(service.url + path, headers=TUS, timeout=PATIENCE_S)
    assert response.status_code == 200
    return int(response.headers["upload-offset"])


def reaches(file: Path, size: int) -> bool:
    return file.stat().st_size >= size


def resume(service: ServiceProcess, path: str) -> None:
    """Go on as another client does, which knows the address of the upload."""
    client = TusClient(f"{service.url}/v1/uploads")
    uploader: Uploader = client.uploader(
        file_stream=io.BytesIO(SCAN), url=service.url + path, chunk_size=BLOCK
    )
    uploader.upload()


def digest_of(service: ServiceProcess, path: str) -> str:
    """Wait for the job of an upload; gives the digest of the file in which it was found."""
    job = service.url + path.replace("uploads", "jobs")
    until(lambda: httpx.get(job).json()["state"] == "finished")
    digest: str = httpx.get(f"{job}/scans/0").json()["volume"]["digest"]
    return digest


def test_client_of_tus_uploads_a_scan_in_parts(models: Path, tmp_path: Path) -> None:
    with serving(models, tmp_path / "kept") as service:
        client = TusClient(f"{service.url}/v1/uploads?format=json")
        uploader: Uploader = client.uploader(
            file_stream=io.BytesIO(SCAN), chunk_size=BLOCK // 3, metadata={"filename": "scan.nii"}
        )
        uploader.upload()
        assert uploader.url is not None
        path = uploader.url.removeprefix(service.url)
        assert digest_of(service, path) == DIGEST


def test_upload_goes_on_after_kills(models: Path, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    path, offset = "", 0
    for _ in range(2):
        with serving(models, kept) as service:
            path = path or begin(service)
            file = kept / "scans" / path.rpartition("/")[2]
            with closing(send_some(service, path, offset, BLOCK + 5)):
                # A whole block is written before the part has ended.
                until(partial(reaches, file, offset + BLOCK))
                service.kill()
        with serving(models, kept) as service:
            offset = offset_of(service, path)
            assert file.read_bytes() == SCAN[:offset]
    assert offset >= 2 * BLOCK
    with serving(models, kept) as service:
        resume(service, path)
        assert digest_of(service, path) == DIGEST
    assert list((kept / "scans").iterdir()) == []


def test_client_that_comes_back_does_not_wait_for_its_lost_connection(
    models: Path, tmp_path: Path
) -> None:
    with serving(models, tmp_path / "kept", MIN_UPLOAD_RATE="0") as service:
        path = begin(service)
        file = tmp_path / "kept" / "scans" / path.rpartition("/")[2]
        # Its connection is open, as far as the service can know, and nothing comes any more.
        with closing(send_some(service, path, 0, BLOCK + 5)) as lost:
            until(partial(reaches, file, BLOCK))
            offset = offset_of(service, path)
            assert BLOCK <= offset <= BLOCK + 5
            assert b" 408 " in lost.recv(4096)
        with closing(send_some(service, path, offset, 100)):
            resume(service, path)
        assert digest_of(service, path) == DIGEST


def test_what_arrived_before_a_connection_broke_stays(models: Path, tmp_path: Path) -> None:
    with serving(models, tmp_path / "kept") as service:
        path = begin(service)
        file = tmp_path / "kept" / "scans" / path.rpartition("/")[2]
        with closing(send_some(service, path, 0, BLOCK + 5)):
            until(partial(reaches, file, BLOCK))
        service.wait_for(route="/v1/uploads/{upload}", code="client-left")
        assert BLOCK <= offset_of(service, path) <= BLOCK + 5


def test_part_that_stops_is_ended_and_stays(models: Path, tmp_path: Path) -> None:
    with serving(models, tmp_path / "kept", BODY_TIMEOUT_S="0.2") as service:
        path = begin(service)
        with closing(send_some(service, path, 0, 1000)) as slow:
            service.wait_for(route="/v1/uploads/{upload}", code="slow-upload")
            assert b"LANDMARKD_BODY_TIMEOUT_S" in slow.recv(4096)
        assert offset_of(service, path) == 1000


SLOW_DISK = """
import logging, time
from app.api.scans import uploads
from app.api.upload import receive
from app.jobs.files import ScanFiles

append, next_chunk = ScanFiles.append, uploads._next_chunk

async def wait_longer(request, unwanted, wait_s):
    # A busy machine may take longer to send the rest; one with time to spare had sent it before.
    assert wait_s > 0
    return await next_chunk(request, unwanted, 60.0)

def append_slowly(*arguments):
    append(*arguments)
    time.sleep(2.5)
    ScanFiles.append = append
    logging.getLogger("disk").warning("written")

receive.GRACE_S = 2.0
uploads._next_chunk = wait_longer
ScanFiles.append = append_slowly
"""


def test_time_that_the_disk_takes_is_not_the_clients(models: Path, tmp_path: Path) -> None:
    settings = {"JOBS": str(tmp_path / "kept"), "MIN_UPLOAD_RATE": "1GiB"}
    with ended(ServiceProcess(models, SLOW_DISK, **settings)) as service:
        path = begin(service)
        with closing(send_some(service, path, 0, BLOCK)) as connection:
            service.wait_for(message="written")
            connection.sendall(SCAN[BLOCK:])
            assert connection.recv(99).startswith(b"HTTP/1.1 204")


def test_stop_ends_a_part_and_the_next_start_goes_on(models: Path, tmp_path: Path) -> None:
    with serving(models, tmp_path / "kept") as service:
        path = begin(service)
        file = tmp_path / "kept" / "scans" / path.rpartition("/")[2]
        with closing(send_some(service, path, 0, BLOCK + 7)):
            until(partial(reaches, file, BLOCK))
            service.terminate()
            assert service.wait() == 0
    with serving(models, tmp_path / "kept") as service:
        assert BLOCK <= offset_of(service, path) <= BLOCK + 7
        assert httpx.delete(service.url + path).status_code == 204

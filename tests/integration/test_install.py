"""What is pinned agrees with what a new user gets from PyPI, which is not what a mirror has."""

from email.parser import HeaderParser
from typing import Final

import httpx
import pytest
from packaging.requirements import Requirement
from packaging.utils import NormalizedName, canonicalize_name

from tests.support.documents import ROOT

PYPI: Final = "https://pypi.org/simple/torch/"
AS_JSON: Final = {"Accept": "application/vnd.pypi.simple.v1+json"}
LINUX: Final = {"sys_platform": "linux", "platform_system": "Linux", "platform_machine": "x86_64"}


def pinned_versions() -> dict[NormalizedName, str]:
    """Read the exact versions that are installed."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = (line.partition("==") for line in lines if "==" in line)
    return {canonicalize_name(name): version.split()[0] for name, _, version in pins}


def requirements_of_torch(version: str) -> list[Requirement]:
    """Ask PyPI what its torch for Linux needs, which is the one for CUDA."""
    with httpx.Client(headers=AS_JSON, follow_redirects=True, timeout=20) as pypi:
        files = pypi.get(PYPI).raise_for_status().json()["files"]
        wheel = next(
            one["url"]
            for one in files
            if one["filename"].startswith(f"torch-{version}-")
            and one["filename"].endswith("x86_64.whl")
        )
        metadata = HeaderParser().parsestr(pypi.get(f"{wheel}.metadata").raise_for_status().text)
    return [Requirement(line) for line in metadata.get_all("Requires-Dist", [])]


def test_pinned_versions_agree_with_torch_for_cuda() -> None:
    """It has requirements of its own, such as one Triton, that torch for CPUs alone lacks."""
    pinned = pinned_versions()
    try:
        requirements = requirements_of_torch(pinned[canonicalize_name("torch")])
    except httpx.HTTPError:
        pytest.skip("no connection to PyPI")
    needed = {
        canonicalize_name(one.name): one.specifier
        for one in requirements
        if one.marker is None or one.marker.evaluate(LINUX | {"extra": ""})
    }
    assert {"sympy", "triton"} <= needed.keys() & pinned.keys()
    assert [
        name for name in needed.keys() & pinned.keys() if pinned[name] not in needed[name]
    ] == []

"""The device that was asked for, or an error."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from app.compute import device
from app.compute.device import (
    CPU_PASSES,
    HOST,
    choose_device,
    choose_devices,
    core_limit,
    fast_precisions,
    is_out_of_memory,
    total_memory,
)
from app.errors import StartupError


def test_auto_is_cuda_exactly_when_there_is_one() -> None:
    assert choose_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")


def test_cpu_is_always_there() -> None:
    assert choose_device("cpu") == torch.device("cpu")


def test_absent_device_is_an_error_not_a_fall_back() -> None:
    with pytest.raises(StartupError, match="expected a CUDA device cuda:99"):
        choose_device("cuda:99")


@pytest.mark.parametrize("name", ["gpu", "", "mps", "cuda:x"])
def test_other_names_are_refused_with_what_is_known(name: str) -> None:
    with pytest.raises(StartupError, match="auto, cpu, cuda or cuda:N"):
        choose_device(name)


def test_one_name_is_one_device() -> None:
    assert choose_devices("cpu") == (replace(HOST, passes=CPU_PASSES),)
    assert choose_devices("auto")[0].device == choose_device("auto")


def test_several_names_are_several_devices_though_torch_knows_only_one_cpu() -> None:
    found = choose_devices("cpu:0, cpu:1")
    assert [one.name for one in found] == ["cpu:0", "cpu:1"]
    assert {one.device for one in found} == {torch.device("cpu")}
    assert choose_device("cpu:0, cpu:1") == torch.device("cpu")


@pytest.mark.parametrize("name", ["cpu:0,cpu:0", "cpu,cpu"])
def test_device_named_twice_is_refused(name: str) -> None:
    with pytest.raises(StartupError, match="expected every device once, got cpu"):
        choose_devices(name)


@pytest.mark.parametrize("name", ["cpu:0,cuda:99", "cpu,", "cpu:0,auto,mps"])
def test_list_with_a_device_that_is_not_there_is_refused(name: str) -> None:
    with pytest.raises(StartupError, match="expected a"):
        choose_devices(name)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there are CUDA devices")
def test_all_is_no_cpu() -> None:
    with pytest.raises(StartupError, match="CUDA devices for all, got one with none"):
        choose_devices("all")


@pytest.mark.gpu
def test_all_is_every_cuda_device() -> None:
    names = [one.name for one in choose_devices("all")]
    assert names == [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    with pytest.raises(StartupError, match="every device once"):
        choose_devices("cuda,cuda:0")


def test_fast_precisions_of_a_host_are_those_it_has_instructions_for() -> None:
    fast = fast_precisions(HOST.device)
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    if "avx512_bf16" not in flags and "amx_bf16" not in flags:
        assert "bfloat16" not in fast or not flags
    assert set(fast) <= {"bfloat16", "float16"}


@pytest.mark.parametrize(
    "message",
    [
        "CUDA error: out of memory",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
        "[enforce fail at alloc_cpu.cpp:125] err == 0. DefaultCPUAllocator: can't allocate memory",
    ],
)
def test_memory_that_runs_out_is_known_by_the_words_of_whoever_wants_it(message: str) -> None:
    assert is_out_of_memory(RuntimeError(message))


def test_other_errors_are_not_taken_for_memory_that_ran_out() -> None:
    for status in ("CUBLAS_STATUS_EXECUTION_FAILED", "CUDNN_STATUS_BAD_PARAM"):
        assert not is_out_of_memory(RuntimeError(f"CUDA error: {status}"))


@pytest.mark.parametrize(
    ("groups", "limited"),
    [
        ("0::/system.slice/landmarkd.service\n", "system.slice/landmarkd.service/memory.max"),
        ("0::/system.slice/landmarkd.service\n", "system.slice/memory.max"),
        ("0::/\n", "memory.max"),
        ("0::/größe\n", "größe/memory.max"),
        (
            "5:memory:/slurm/uid_7/job_1/step_0\n4:cpu:/slurm\n0::/\n",
            "memory/slurm/uid_7/job_1/memory.limit_in_bytes",
        ),
        ("5:memory:/docker/3f\n0::/system.slice/a:b\n", "memory/memory.limit_in_bytes"),
    ],
    ids=["unit", "slice", "container", "not ASCII", "Slurm", "container of version 1"],
)
def test_limit_of_a_control_group_counts_in_those_within_it(
    groups: str, limited: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "CGROUPS", str(tmp_path))
    monkeypatch.setattr(device, "OWN_GROUPS", str(tmp_path / "groups"))
    (tmp_path / "groups").write_text(groups)
    whole = total_memory(HOST.device)
    (tmp_path / limited).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / limited).write_text(f"{whole // 3}\n")
    assert total_memory(HOST.device) == whole // 3


@pytest.mark.parametrize(
    ("groups", "files", "cores"),
    [
        ("0::/\n", {"cpu.max": "150000 100000\n"}, 1.5),
        ("0::/\n", {"cpu.max": "50000 100000\n"}, 1),
        ("0::/\n", {"cpu.max": "max 100000\n"}, math.inf),
        ("0::/a.slice/b\n", {"a.slice/cpu.max": "200000 50000", "a.slice/b/cpu.max": "max 1"}, 4),
        (
            "3:cpu,cpuacct:/docker/3f\n0::/\n",
            {"cpu/cpu.cfs_quota_us": "300000\n", "cpu/cpu.cfs_period_us": "100000\n"},
            3,
        ),
        (
            "3:cpu:/\n",
            {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"},
            math.inf,
        ),
        ("3:cpuset:/\n", {"cpu/cpu.cfs_quota_us": "1", "cpu/cpu.cfs_period_us": "1"}, math.inf),
    ],
    ids=["container", "half", "unlimited", "slice", "version 1", "unlimited 1", "other"],
)
def test_time_of_cores_is_limited_by_any_control_group_around(
    groups: str,
    files: dict[str, str],
    cores: float,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device, "CGROUPS", str(tmp_path))
    monkeypatch.setattr(device, "OWN_GROUPS", str(tmp_path / "groups"))
    (tmp_path / "groups").write_text(groups)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert core_limit() == cores

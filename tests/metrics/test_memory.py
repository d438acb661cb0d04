from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch

from elastictrainer.errors import ConfigError
from elastictrainer.metrics import Peak, PeakMemory
from elastictrainer.metrics.memory import available_bytes

STATUS = "Name:\tpython\nVmPeak:\t  900 kB\nVmHWM:\t  {high} kB\nVmRSS:\t  {now} kB\n"


def test_the_kernels_mark(tmp_path: Path) -> None:
    (tmp_path / "status").write_text(STATUS.format(high=500, now=300))
    memory = PeakMemory("cpu", proc=tmp_path)
    memory.begin()
    assert (tmp_path / "clear_refs").read_text() == "5"
    (tmp_path / "status").write_text(STATUS.format(high=700, now=350))
    peak = memory.end()
    assert peak == Peak(700 * 1024, 300 * 1024, "resident")
    assert peak.growth_bytes == 400 * 1024


def test_a_mark_that_cannot_be_set_back_says_so(tmp_path: Path) -> None:
    (tmp_path / "status").write_text(STATUS.format(high=500, now=300))
    (tmp_path / "clear_refs").mkdir()  # not a file: writing fails, for root too
    memory = PeakMemory("cpu", proc=tmp_path)
    memory.begin()
    assert memory.end() == Peak(500 * 1024, 300 * 1024, "resident, since the process began")


def test_where_nothing_is_kept_nothing_is_told(tmp_path: Path) -> None:
    for device, proc in (("cpu", tmp_path / "absent"), ("mps", tmp_path)):
        memory = PeakMemory(device, proc=proc)
        with pytest.raises(ConfigError, match="call begin"):
            memory.end()
        memory.begin()
        assert memory.end() is None


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux")
def test_a_real_allocation_is_seen() -> None:
    memory = PeakMemory("cpu")
    memory.begin()
    # From the system itself: an allocator may have as much left from what other tests have freed.
    size = 64 * 2**20
    with mmap.mmap(-1, size) as block:
        block[:: mmap.PAGESIZE] = b"1" * (size // mmap.PAGESIZE)
    peak = memory.end()
    if peak is None:
        pytest.skip("this kernel keeps no mark")
    assert peak.peak_bytes >= peak.start_bytes
    if peak.source == "resident":
        assert peak.growth_bytes >= 60 * 2**20


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_the_allocators_mark() -> None:
    held = torch.ones(2**20, dtype=torch.uint8, device="cuda")
    memory = PeakMemory("cuda")
    memory.begin()
    torch.ones(64 * 2**20, dtype=torch.uint8, device="cuda")
    peak = memory.end()
    assert peak is not None
    assert peak.source == "cuda allocator"
    assert peak.start_bytes >= held.nbytes
    assert peak.growth_bytes == 64 * 2**20


def test_what_is_available_is_the_systems_estimate_within_the_containers_limit(tmp_path):
    assert available_bytes(root=tmp_path) is None
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal:  4000 kB\nMemFree: 1 kB\nMemAvailable:    3000 kB\n")
    assert available_bytes(root=tmp_path) == 3000 * 1024
    limit = tmp_path / "sys/fs/cgroup/memory.max"
    limit.parent.mkdir(parents=True)
    for text, free in (("max\n", 3000 * 1024), ("2048000\n", 2048000), ("9999999999\n", 3000 * 1024)):
        limit.write_text(text)
        assert available_bytes(root=tmp_path) == free

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastictrainer.errors import ConfigError, ElasticTrainerError
from elastictrainer.metrics import EnergyMeter, NoMeter, NvmlMeter, RaplMeter, ReplayMeter, find_meter
from elastictrainer.metrics.rapl import Zone

RANGE_UJ = 262_143_328_850


def write_zone(root: Path, zone: str, name: str, energy_uj: int, *, range_uj: int = RANGE_UJ) -> Path:
    path = root / zone
    path.mkdir(exist_ok=True)
    (path / "name").write_text(f"{name}\n")
    (path / "max_energy_range_uj").write_text(f"{range_uj}\n")
    (path / "energy_uj").write_text(f"{energy_uj}\n")
    return path


def write_machine(root: Path, energy_uj: int) -> None:
    """Two sockets as a server shows them, with every zone that must not be counted twice."""
    (root / "intel-rapl").mkdir(exist_ok=True)
    for socket in range(2):
        write_zone(root, f"intel-rapl:{socket}", f"package-{socket}", energy_uj)
        write_zone(root, f"intel-rapl:{socket}:0", "core", energy_uj)
        write_zone(root, f"intel-rapl:{socket}:1", "dram", energy_uj)
        write_zone(root, f"intel-rapl-mmio:{socket}", f"package-{socket}", energy_uj)
    write_zone(root, "intel-rapl:2", "psys", energy_uj)


def test_rapl_adds_packages_and_their_memory_once(tmp_path: Path) -> None:
    write_machine(tmp_path, 1_000_000)
    meter = RaplMeter.of_system(tmp_path)
    assert meter.covers == "package-0, dram, package-1, dram, by RAPL"
    meter.begin()
    write_machine(tmp_path, 3_500_000)
    assert meter.end() == pytest.approx(4 * 2.5)
    meter.begin()
    assert meter.end() == 0.0


@given(start=st.integers(0, RANGE_UJ - 1), moves=st.lists(st.integers(0, RANGE_UJ - 1), min_size=1, max_size=6))
def test_rapl_counts_on_over_any_number_of_wraps(start: int, moves: list[int], tmp_path_factory: Any) -> None:
    """As long as it is sampled before a counter can go round twice."""
    path = write_zone(tmp_path_factory.mktemp("zone"), "zone", "package-0", start)
    meter = RaplMeter([Zone(path, "package-0", RANGE_UJ)])
    meter.begin()
    counter = start
    for move in moves:
        counter = (counter + move) % RANGE_UJ
        (path / "energy_uj").write_text(str(counter))
        meter.sample()
    assert meter.end() == pytest.approx(sum(moves) / 1e6)


def test_rapl_keeps_up_by_itself(tmp_path: Path) -> None:
    """A tiny range makes its thread sample at once; the counter goes round twice between begin and end."""
    path = write_zone(tmp_path, "zone", "package-0", 0, range_uj=100)
    seen: list[int] = []

    class Watched(RaplMeter):
        def sample(self) -> None:
            super().sample()
            seen.append(1)

    meter = Watched([Zone(path, "package-0", 100)])
    meter.begin()
    for value in (60, 20, 80, 40):
        (path / "energy_uj.new").write_text(str(value))
        (path / "energy_uj.new").rename(path / "energy_uj")
        count = len(seen)
        while len(seen) < count + 2:  # one whole sample after the write
            pass
    assert meter.end() == pytest.approx(240 / 1e6)


def test_rapl_says_why_it_cannot(tmp_path: Path) -> None:
    with pytest.raises(ElasticTrainerError, match="no processor counts its energy"):
        RaplMeter.of_system(tmp_path / "absent")
    write_zone(tmp_path, "intel-rapl:0", "package-0", 5)
    meter = RaplMeter.of_system(tmp_path)
    with pytest.raises(ConfigError, match="call begin"):
        meter.end()
    (tmp_path / "intel-rapl:0" / "energy_uj").write_text("?")
    with pytest.raises(ElasticTrainerError, match="cannot read"):
        RaplMeter.of_system(tmp_path)


def test_rapl_for_root_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_zone(tmp_path, "intel-rapl:0", "package-0", 5)
    read_text = Path.read_text

    def refuse(path: Path) -> str:
        if path.name == "energy_uj":
            raise PermissionError(13, "Permission denied", str(path))
        return read_text(path)

    monkeypatch.setattr(Path, "read_text", refuse)  # a mode of 0 would stop nobody where tests run as root
    with pytest.raises(ElasticTrainerError, match=r"only root .* sudo chmod a\+r .*energy_uj"):
        RaplMeter.of_system(tmp_path)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_counter_that_goes_away_measures_nothing_and_stops_nothing(tmp_path: Path, when: str) -> None:
    path = write_zone(tmp_path, "intel-rapl:0", "package-0", 5)
    meter = RaplMeter.of_system(tmp_path)
    if when == "before":
        (path / "energy_uj").unlink()
        meter.begin()
        write_zone(tmp_path, "intel-rapl:0", "package-0", 5)
    else:
        meter.begin()
        (path / "energy_uj").unlink()
    assert meter.end() is None


class FakeNvml:
    """The four functions of the driver's library, over a counter that the test sets."""

    def __init__(self, *, fails: str = "") -> None:
        self.millijoules = 0
        self.fails = fails
        self.nvmlErrorString = lambda code: b"Not Supported"

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            if name == self.fails:
                return 3
            if name == "nvmlDeviceGetHandleByUUID":
                assert arguments[0] == b"GPU-1234"
                arguments[1]._obj.value = 7
            if name == "nvmlDeviceGetTotalEnergyConsumption":
                assert isinstance(arguments[0], ctypes.c_void_p)
                assert arguments[0].value == 7
                arguments[1]._obj.value = self.millijoules
            return 0

        return call


def test_nvml() -> None:
    library = FakeNvml()
    meter = NvmlMeter("GPU-1234", name="NVIDIA H200", library=library)
    assert meter.covers == "the whole NVIDIA H200 board, by NVML"
    with pytest.raises(ConfigError, match="call begin"):
        meter.end()
    library.millijoules = 2**40
    meter.begin()
    library.millijoules += 12_345
    assert meter.end() == 12.345
    meter.begin()
    library.millijoules = 0
    assert meter.end() is None  # the driver was reloaded
    meter.begin()
    library.fails = "nvmlDeviceGetTotalEnergyConsumption"
    assert meter.end() is None


@pytest.mark.parametrize(
    "function", ["nvmlInit_v2", "nvmlDeviceGetHandleByUUID", "nvmlDeviceGetTotalEnergyConsumption"]
)
def test_nvml_says_why_it_cannot(function: str) -> None:
    with pytest.raises(ElasticTrainerError, match=f"{function}: Not Supported"):
        NvmlMeter("GPU-1234", library=FakeNvml(fails=function))


@pytest.mark.parametrize("device", ["cpu", "cuda", "mps"])
def test_find_meter_measures_or_says_why_not(device: str) -> None:
    meter = find_meter(device)
    assert isinstance(meter, EnergyMeter)
    meter.begin()
    joules = meter.end()
    if isinstance(meter, NoMeter):
        assert joules is None
        assert meter.covers == f"nothing: {meter.reason}"
        assert len(meter.reason) > 10
    else:
        assert joules is not None
        assert joules >= 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_a_real_gpu_draws_power() -> None:
    meter = find_meter("cuda")
    assert isinstance(meter, NvmlMeter), meter
    meter.begin()
    a = torch.rand(4096, 4096, device="cuda")
    for _ in range(200):
        a = (a @ a).clamp(0, 1)
    torch.cuda.synchronize()
    joules = meter.end()
    assert joules is not None
    assert joules > 0


def test_replay() -> None:
    meter = ReplayMeter([2.0])
    assert isinstance(meter, EnergyMeter)
    with pytest.raises(ConfigError, match="call begin"):
        meter.end()
    meter.begin()
    assert meter.end() == 2.0
    meter.begin()
    with pytest.raises(ConfigError, match="no more"):
        meter.end()

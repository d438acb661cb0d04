"""`elastictrainer doctor`: what this machine has, what works on it, and what to install for the rest."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from elastictrainer.budget import format_bytes
from elastictrainer.cli import options
from elastictrainer.cli.app import app
from elastictrainer.cli.output import Output

if TYPE_CHECKING:
    import torch

__all__ = ["Check", "doctor", "examine"]

_NOT_FOR_USERS = ("dev", "docs")


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the examination. Only `broken` makes the command fail; what is `missing` is a choice."""

    name: str
    status: Literal["ok", "missing", "broken"]
    found: str
    advice: str = ""


@app.command()
def doctor(
    device: options.Device = "auto",
    quick: Annotated[bool, typer.Option("--quick", help="Leave out the trials, which take up to a minute.")] = False,
    as_json: options.Json = False,
) -> None:
    """Say what this machine has, what works, and what to install.

    Really compiles and really repeats a small training step, each in a process of its own: up to a minute, --quick
    leaves it out. Exits with 1 if something that everything else needs is broken.

    \b
    elastictrainer doctor
    elastictrainer doctor --device cuda --json
    """
    if not (quick or as_json):
        print("trying compiled and deterministic training, up to a minute (--quick leaves it out)", file=sys.stderr)
    checks = list(examine(device, quick=quick))
    out = Output(as_json)
    out.table(("check", "status", "found"), [(check.name, check.status, check.found) for check in checks])
    advice = [check for check in checks if check.advice]
    if advice:
        out.say()
    for check in advice:
        out.say(f"{check.name}: {check.advice}")
    broken = [check.name for check in checks if check.status == "broken"]
    out.document({"ok": not broken, "checks": [asdict(check) for check in checks]})
    if broken:
        raise typer.Exit(1)


def examine(device: str = "auto", *, quick: bool = False) -> Iterator[Check]:
    """All checks, each made as it is asked for. Costs torch's import; without `quick` also the trials."""
    yield _python()
    broken = _broken_torch()
    if broken is not None:
        yield broken
        return
    import torch

    from elastictrainer.cli.machine import resolve_device

    cuda = f"CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
    yield Check("torch", "ok", f"{torch.__version__}, {cuda}")
    place = resolve_device(device)
    yield Check("device", "ok", _device_words(place))
    yield Check("threads", "ok", f"{torch.get_num_threads()} for torch, {_cores()} cores for this process")
    yield _memory()
    yield _disk()
    yield from _energy(place)
    if not quick:
        yield from _trials(str(place))
    yield from _extras()


def _python() -> Check:
    found = f"{platform.python_version()} at {sys.executable}, {platform.platform(terse=True)}, {platform.machine()}"
    return Check("python", "ok", found)


def _broken_torch() -> Check | None:
    try:
        import torch

        torch.ones(2, requires_grad=True).sum().backward()
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        return Check("torch", "broken", reason, "install it again: pip install --force-reinstall torch")
    return None


def _device_words(device: object) -> str:
    import torch

    place = torch.device(str(device))
    if place.type == "cuda":
        properties = torch.cuda.get_device_properties(place)
        return (
            f"{place} ({properties.name}, {format_bytes(properties.total_memory)}; {torch.cuda.device_count()} in all)"
        )
    return f"{place} ({_processor()})"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    fields = dict(re.split(r"\s*:\s*", line, maxsplit=1) for line in lines if ":" in line)
    return fields.get("model name") or fields.get("Model") or platform.processor() or platform.machine()


def _cores() -> int:
    # A container or taskset may allow fewer than the machine has.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _memory() -> Check:
    if not hasattr(os, "sysconf"):  # Windows
        return Check(
            "memory", "missing", "this system does not tell it", "leave room for what `profile` says of a step"
        )
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    with contextlib.suppress(OSError, ValueError):  # no cgroup, or one that says "max"
        total = min(total, int(limit.read_text()))
    return Check("memory", "ok", f"{format_bytes(total)} for this process")


def _disk() -> Check:
    free = shutil.disk_usage(".").free
    if free < 2**30:
        return Check(
            "disk", "missing", f"{format_bytes(free)} free in {Path.cwd()}", "runs keep checkpoints; make room"
        )
    return Check("disk", "ok", f"{format_bytes(free)} free in {Path.cwd()}")


def _energy(device: torch.device) -> Iterator[Check]:
    """The meters of the device and of the processor that feeds it."""
    from elastictrainer.metrics import NoMeter, find_meter

    for kind in dict.fromkeys((str(device), "cpu")):
        meter = find_meter(kind)
        if isinstance(meter, NoMeter):
            yield Check(f"energy of {kind}", "missing", meter.reason, "without a meter energy_j is null, never a guess")
        else:
            yield Check(f"energy of {kind}", "ok", meter.covers)


def _trials(device: str) -> Iterator[Check]:
    from elastictrainer.cli.trials import attempt

    advice = {
        "compile": "training works without it; torch.compile needs a C++ compiler (Debian, Ubuntu: apt install g++)",
        "deterministic": "--deterministic cannot be kept on this device; use --device cpu for runs that must repeat",
    }
    for name, what in advice.items():
        problem = attempt(name, device)
        yield Check(name, "ok", f"tried on {device}") if problem is None else Check(name, "missing", problem, what)


def _extras() -> Iterator[Check]:
    """Which optional packages are there, extra by extra, as this package's own metadata lists them."""
    for extra, packages in sorted(optional_packages().items()):
        absent = [package for package in packages if not _installed(package)]
        if absent:
            advice = f"pip install 'elastictrainer[{extra}]'"
            yield Check(f"extra {extra}", "missing", f"without {', '.join(absent)}", advice)
        else:
            yield Check(f"extra {extra}", "ok", ", ".join(packages))


def optional_packages() -> dict[str, list[str]]:
    """The packages of every extra that a user may want, without their versions."""
    extras: dict[str, list[str]] = {}
    for requirement in importlib.metadata.requires("elastictrainer") or ():
        match = re.match(r"""([\w.-]+).*;\s*extra\s*==\s*['"]([\w-]+)['"]""", requirement)
        # An extra may name others of this package: those have lines of their own.
        if match and match[1] != "elastictrainer" and match[2] not in _NOT_FOR_USERS:
            extras.setdefault(match[2], []).append(match[1])
    return extras


def _installed(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True

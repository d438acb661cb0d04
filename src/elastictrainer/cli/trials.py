"""Things of torch that either work on this machine or do not: `doctor` tries them rather than guess.

Each trial runs in a process of its own, `python -m elastictrainer.cli.trials NAME DEVICE`: a compiler may crash or
hang, and determinism has to be asked for before CUDA starts.
"""

from __future__ import annotations

import subprocess
import sys

__all__ = ["TRIALS", "attempt"]


def attempt(name: str, device: str, *, timeout_s: float = 180.0) -> str | None:
    """Run a trial; returns None if it works, or the reason why not in one line. Costs torch's import and the trial."""
    command = [sys.executable, "-m", "elastictrainer.cli.trials", name, device]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        return f"gave up after {timeout_s:g} s"
    if done.returncode == 0:
        return None
    said = [line.strip() for line in (done.stderr or done.stdout).splitlines() if line.strip()]
    return said[-1] if said else f"ended with exit code {done.returncode}"


def _compile(device: str) -> None:
    """One compiled training step agrees with the plain one."""
    import torch

    def loss(weight: torch.Tensor) -> torch.Tensor:
        return (weight.sin() @ weight.cos()).relu().sum()

    weight = torch.linspace(-1, 1, 64, device=device).reshape(8, 8).requires_grad_()
    (plain,) = torch.autograd.grad(loss(weight), weight)
    (compiled,) = torch.autograd.grad(torch.compile(loss)(weight), weight)
    if not torch.allclose(plain, compiled, atol=1e-5):
        raise RuntimeError("a compiled step computes other gradients than a plain one")


def _deterministic(device: str) -> None:
    """Two training steps of a small convolutional network from one seed are the same, bit by bit."""
    import torch

    from elastictrainer.cli.machine import prepare

    def train() -> list[torch.Tensor]:
        place = prepare(device, seed=0, deterministic=True)
        model = torch.nn.Sequential(
            torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(2),
            torch.nn.Flatten(), torch.nn.Linear(32, 4),
        ).to(place)  # fmt: skip
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        images, labels = torch.randn(8, 3, 16, 16, device=place), torch.arange(8, device=place) % 4
        for _ in range(2):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
        return [parameter.detach() for parameter in model.parameters()]

    if not all(torch.equal(once, again) for once, again in zip(train(), train())):
        raise RuntimeError("two runs from one seed differ")


TRIALS = {"compile": _compile, "deterministic": _deterministic}


if __name__ == "__main__":
    try:
        TRIALS[sys.argv[1]](sys.argv[2])
    except Exception as error:
        # The first line says what is wrong; torch.compile adds pages about how to debug it.
        sys.exit(f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}")

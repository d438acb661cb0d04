"""Real, un-instrumented steps of given plans, on copies of the optimizer's state, so that no weight ever moves."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer

from elastictrainer.profiling.timing import clock_of, sleep
from elastictrainer.profiling.trace import LossFn
from elastictrainer.runtime.optimizer_copy import bring_home, look_through, plain_step, twin_of

__all__ = ["Stepper", "Timed", "nonnegative_fit"]

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Timed:
    """Seconds of a step, of the host's part in it, and of the host's forward pass. On a CPU the host does it all."""

    step_s: float
    host_s: float
    forward_s: float


class Stepper:
    """Forward, backward and the optimizer's step of one batch under the plan that stands, as a training loop runs.

    The optimizer steps a deep copy of the parameters with the real gradients: the same work on the same shapes. On CUDA
    a few steps are issued back to back and the clock is read when the device has finished them, as in a loop that does
    not wait for its loss.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFn,
        batch: Any,
        optimizer: Optimizer | None,
        parameters: Sequence[nn.Parameter],
    ) -> None:
        self.model, self.loss_fn, self.batch = model, loss_fn, batch
        self.parameters = list(parameters)
        device = self.parameters[0].device
        self.cuda = device.type == "cuda"
        self._now = time.perf_counter if self.cuda else clock_of(device)  # on CUDA a part is timed without waiting
        self.optimizer: Optimizer | None = None
        self.pairs: list[tuple[nn.Parameter, nn.Parameter]] = []
        self._sparse: dict[int, Tensor] = {}  # a sparse gradient of each parameter that has them: no dense one will do
        if optimizer is not None:
            inner = look_through(optimizer)
            plain_step(inner)  # one that needs a closure is refused here, in words
            self.optimizer = twin_of(inner, dict(vars(inner)), {})
            bring_home(self.optimizer)
            ours = (p for group in inner.param_groups for p in group["params"])
            copies = (p for group in self.optimizer.param_groups for p in group["params"])
            self.pairs = list(zip(ours, copies))

    def step(self) -> float:
        """One step; returns the seconds of its forward part (the host's, on CUDA)."""
        start = self._now()
        loss = self.loss_fn(self.model, self.batch)
        forward_s = self._now() - start
        loss.backward()
        self.move()
        return forward_s

    def forward(self) -> None:
        self.loss_fn(self.model, self.batch)

    def gradients(self) -> None:
        """The step's first half alone: forward and backward."""
        self.loss_fn(self.model, self.batch).backward()

    def move(self) -> None:
        """Its second half: the optimizer's step on the gradients that are there, and their end."""
        if self.optimizer is not None:
            for ours, copied in self.pairs:
                copied.grad = ours.grad
                if ours.grad is not None and ours.grad.layout is not torch.strided and id(ours) not in self._sparse:
                    self._sparse[id(ours)] = ours.grad.clone()
            self.optimizer.step()
        for parameter in self.parameters:
            parameter.grad = None
        for _, copied in self.pairs:
            copied.grad = None

    def take_gradients(self) -> list[Tensor | None]:
        """The parameters' gradients, which they no longer hold."""
        gradients = [parameter.grad for parameter in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None
        return gradients

    def put_gradients(self, gradients: Sequence[Tensor | None]) -> None:
        for parameter, gradient in zip(self.parameters, gradients):
            parameter.grad = gradient

    def timed(self, steps: int = 1) -> Timed:
        """The plan that stands, a step at a time; on CUDA after one step of warm-up, `steps` back to back."""
        if not self.cuda:
            start = self._now()
            forward_s = self.step()
            step_s = self._now() - start
            return Timed(step_s, step_s, forward_s)
        self.step()
        torch.cuda.synchronize()
        start = time.perf_counter()
        forward_s = self.step()
        host_s = time.perf_counter() - start  # from an empty queue: nothing held the host back
        for _ in range(steps - 1):
            self.step()
        torch.cuda.synchronize()
        return Timed((time.perf_counter() - start) / steps, host_s, forward_s)

    def optimizer_s(
        self, names: Sequence[int], *, clock: Callable[[Callable[[], Any]], float] | None = None, repeats: int = 3
    ) -> float:
        """The optimizer's step alone, with gradients for these parameters (by position) only; the fastest counts.

        `clock`: what times a part; by default the host's time.
        """
        if self.optimizer is None:
            return 0.0
        best = float("inf")
        for _ in range(repeats):
            with self.pretending(names):
                best = min(best, (clock or self.host_s)(self.optimizer.step))
        return best

    @contextmanager
    def pretending(self, names: Sequence[int]) -> Iterator[None]:
        """Inside, the optimizer finds gradients of zeros for these parameters (by position), and for no other."""
        wanted = {id(self.parameters[k]) for k in names}
        for ours, copied in self.pairs:
            kept = self._sparse.get(id(ours))
            gradient = torch.zeros_like(copied) if kept is None else kept
            copied.grad = gradient if id(ours) in wanted else None
        try:
            yield
        finally:
            for _, copied in self.pairs:
                copied.grad = None

    def host_s(self, part: Callable[[], Any]) -> float:
        """The host's own time for a part, from an empty queue."""
        if self.cuda:
            torch.cuda.synchronize()
        start = self._now()
        part()
        return self._now() - start

    def device_s(self, part: Callable[[], Any]) -> float:
        """CUDA only: the device's own time for a part, behind a sleeping kernel so that it never waits for the host.

        Runs the part twice: the first time shows how long the kernel must sleep.
        """
        host_s = self.host_s(part)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        sleep(host_s)
        begin.record()
        part()
        end.record()
        torch.cuda.synchronize()
        return float(begin.elapsed_time(end)) * 1e-3

    def state_bytes(self) -> list[int]:
        """Optimizer state per parameter, in bytes (after a step in which each had a gradient)."""
        if self.optimizer is None:
            return [0] * len(self.parameters)
        by_id = {
            id(ours): sum(
                v.numel() * v.element_size()
                for v in self.optimizer.state[copied].values()
                if isinstance(v, torch.Tensor)
            )
            for ours, copied in self.pairs
            if copied in self.optimizer.state
        }
        return [by_id.get(id(parameter), 0) for parameter in self.parameters]


def nonnegative_fit(features: Floats, target: Floats, *, prior: Floats, trust: Floats) -> Floats:
    """Least squares of `features @ x = target` with x >= 0, drawn to `prior` with weight `trust` per coefficient.

    A handful of unknowns: coordinate descent is exact enough and needs no scipy.
    """
    gram = features.T @ features + np.diag(trust)
    moment = features.T @ target + trust * prior
    x = np.maximum(prior.astype(np.float64), 0.0)
    for _ in range(500):
        for j in range(len(x)):
            if gram[j, j] > 0:
                x[j] = max(0.0, x[j] + (moment[j] - gram[j] @ x) / gram[j, j])
    return x

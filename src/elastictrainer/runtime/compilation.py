"""`torch.compile` under plans that change: how often it compiled, and that it never gives up.

Compiled code is guarded by the `requires_grad` flag of every parameter it touches, so each new plan compiles anew, a
plan seen before reuses its code, and the right tensors move. But once one function was compiled `recompile_limit` times
(8 by default), `torch.compile` runs it uncompiled for ever after, with a log line. So before that happens the caches
are cleared, which costs one compilation of whatever is used next.
"""

from __future__ import annotations

import sys

import torch

__all__ = ["Compilations"]

# For each plan: a training step, an evaluation step, and a last batch of another size.
GRAPHS_PER_PLAN = 3


class Compilations:
    """Follows `torch.compile` from now on. Costs nothing where it is not used."""

    def __init__(self) -> None:
        self._start = _graphs()
        self._plans: set[frozenset[str]] = set()

    def count(self) -> int:
        """Graphs compiled since, by anything in this process."""
        return max(0, _graphs() - self._start)

    def moving_to(self, plan: frozenset[str]) -> None:
        """Make room for the code of a plan that has none yet. Call it before the flags change.

        Clearing is all that torch offers: it forgets compiled code of the whole process, and so happens only if
        something was compiled under these plans, and only when the room is used up.
        """
        if plan in self._plans:
            return
        if self.count() and len(self._plans) >= _room():
            torch.compiler.reset()
            self._plans.clear()
        self._plans.add(plan)


def _graphs() -> int:
    # Not imported here: to import dynamo takes a second, and whoever compiles has done so.
    utils = sys.modules.get("torch._dynamo.utils")
    return 0 if utils is None else int(utils.counters["stats"]["unique_graphs"])


def _room() -> int:
    """How many plans' code fits before torch.compile gives up."""
    config = sys.modules["torch._dynamo.config"]
    # Its name before torch 2.7 is the second one.
    limit: int = getattr(config, "recompile_limit" if hasattr(config, "recompile_limit") else "cache_size_limit", 8)
    return max(1, limit // GRAPHS_PER_PLAN)

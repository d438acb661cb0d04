"""Put a plan on a model: what it names trains, what it does not name rests, and all of it can be undone."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from types import TracebackType
from typing import Any, Protocol, runtime_checkable

from torch import nn
from torch.optim import Optimizer

from elastictrainer.errors import ConfigError, ModelError
from elastictrainer.runtime.compilation import Compilations
from elastictrainer.runtime.fused import FusedStart
from elastictrainer.runtime.lean import make_lean, make_plain
from elastictrainer.runtime.norms import NormPolicy, check_norm_policy, release_statistics, set_statistics
from elastictrainer.runtime.reentrant import unwatch_checkpoints, watch_checkpoints
from elastictrainer.runtime.state import RestingPolicy, RestingState, check_resting_policy

__all__ = ["Applied", "apply", "unwrap"]


@runtime_checkable
class _HasTrainable(Protocol):
    @property
    def trainable(self) -> Iterable[str]: ...


def apply(
    model: nn.Module,
    plan: _HasTrainable | Iterable[str],
    *,
    optimizer: Optimizer | None = None,
    bn: NormPolicy = "frozen",
    resting_state: RestingPolicy = "keep",
) -> Applied:
    """Train the tensors that the plan names and let every other one rest, until `undo()`.

        applied = et.apply(model, plan, optimizer=optimizer)
        ...                        # any loop: loss.backward(); optimizer.step(); optimizer.zero_grad()
        applied.update(next_plan)  # cheap: flags, and what follows from them
        applied.undo()             # or use it as a context manager

    Resting tensors get `requires_grad=False` and `grad=None`; the optimizer's param groups are never edited, so its
    checkpoints stay loadable whatever the plan. Candidates are the parameters that require a gradient now, and those
    that a plan names. A plan that already stands on the model is undone first.

    Args:
        plan: a `Plan`, or names as in `model.named_parameters()`; a tied tensor goes by any of its names.
        optimizer: give it, so that a plan which names a tensor that it does not hold is refused, its state of resting
            tensors is dealt with, and a fused one can start tensors that wake.
        bn: what running statistics do: `"frozen"`, `"track"` or `"with_owner"`; see `runtime/norms.py`.
        resting_state: what the optimizer's state of resting tensors does: `"keep"`, `"drop"` (freed, and gone) or
            `"offload"` (to host memory; on a CPU model the same as keep).

    Raises:
        ConfigError: unknown names (all are listed), or tensors that the optimizer does not hold.

    Costs: microseconds a tensor; with `"offload"`, the copies.
    """
    check_norm_policy(bn)
    check_resting_policy(resting_state)
    model = unwrap(model)
    names = _Names(model, optimizer)
    trainable = names.resolve(plan)
    standing = _STANDING.get(model)
    if standing is not None:
        standing.undo()
    applied = Applied(model, names, optimizer, bn, resting_state)
    _STANDING[model] = applied
    try:
        applied._put(trainable)
    except BaseException:
        applied.undo()
        raise
    return applied


class Applied:
    """A plan that stands on a model. Made by `apply`; `undo()` restores what was there."""

    def __init__(
        self,
        model: nn.Module,
        names: _Names,
        optimizer: Optimizer | None,
        bn: NormPolicy,
        resting_state: RestingPolicy,
    ) -> None:
        # Weakly: _STANDING maps the model to this object and must not keep it alive.
        self._model = weakref.ref(model)
        self._names = names
        self._bn: NormPolicy = bn
        self._before = {name: p.requires_grad for name, p in names.params.items()}
        self._state = RestingState(optimizer, resting_state)
        self._fused = FusedStart(optimizer) if optimizer is not None and FusedStart.needed(optimizer) else None
        self._trainable: tuple[str, ...] = ()
        self._undone = False
        self._compilations = Compilations()
        make_lean(model)

    @property
    def trainable(self) -> tuple[str, ...]:
        """The tensors that train now, by their names in `model.named_parameters()`, in the plan's order."""
        return self._trainable

    def update(self, plan: _HasTrainable | Iterable[str]) -> None:
        """Move to another plan.

        A tensor that goes to rest loses the gradient it had accumulated; one that stays keeps it; one that wakes
        accumulates from the next backward pass on. Call it, with the same plan, after `optimizer.load_state_dict`.
        """
        if self._undone:
            raise ConfigError("this plan was undone (or replaced by a later apply); call apply(model, plan) again")
        self._put(self._names.resolve(plan))

    def undo(self) -> None:
        """Restore flags and running-statistics modes as they were, and bring offloaded state back.

        What was dropped does not come back: gradients of tensors that went to rest, their state under `"drop"`.
        Calling it again does nothing.
        """
        if self._undone:
            return
        self._undone = True
        for name, param in self._names.params.items():
            param.requires_grad_(self._before[name])
        self._trainable = ()
        self._state.settle(self._names.params.values(), ())
        if self._fused is not None:
            self._fused.remove()
        model = self._model()
        if model is not None:
            release_statistics(model)
            make_plain(model)
            unwatch_checkpoints(model)
            _STANDING.pop(model, None)

    def state_bytes(self) -> dict[str, int]:
        """The optimizer's state of the tensors that rest now, in bytes: `kept` in place, `dropped`, `offloaded`."""
        return self._state.bytes()

    def compilations(self) -> int:
        """How many graphs `torch.compile` has built since `apply`: at most one a plan, mode and batch shape."""
        return self._compilations.count()

    def __enter__(self) -> Applied:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.undo()

    def __repr__(self) -> str:
        state = "undone" if self._undone else f"{len(self._trainable)} of {len(self._names.params)} tensors train"
        return f"Applied({state}, bn={self._bn!r})"

    def _put(self, trainable: tuple[str, ...]) -> None:
        model = self._model()
        if model is None:
            raise ModelError("the model that this plan stood on is gone; call apply on the model in use")
        chosen = frozenset(trainable)
        self._compilations.moving_to(chosen)
        for name, param in self._names.params.items():
            if name in chosen:
                param.requires_grad_(True)
            else:
                # None, not zeros: optimizers still apply decay and momentum to a zero gradient.
                param.requires_grad_(False)
                param.grad = None
        self._trainable = trainable
        self._state.settle(
            active=[p for name, p in self._names.params.items() if name in chosen],
            resting=[p for name, p in self._names.params.items() if name not in chosen],
        )
        set_statistics(model, self._bn)
        watch_checkpoints(model)


_STANDING: weakref.WeakKeyDictionary[nn.Module, Applied] = weakref.WeakKeyDictionary()


def unwrap(model: nn.Module) -> nn.Module:
    """The user's own module inside `torch.compile`, DataParallel or DistributedDataParallel, whose names plans use."""
    while True:
        if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            model = model.module
        elif isinstance(inner := model._modules.get("_orig_mod"), nn.Module):
            model = inner
        else:
            return model


class _Names:
    """The parameters of one model by name, and what may be asked of them."""

    def __init__(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        self.params: dict[str, nn.Parameter] = dict(model.named_parameters())
        canonical = {id(param): name for name, param in self.params.items()}
        self._aliases = {n: canonical[id(p)] for n, p in model.named_parameters(remove_duplicate=False)}
        self._held = None if optimizer is None else {id(p) for group in optimizer.param_groups for p in group["params"]}

    def resolve(self, plan: _HasTrainable | Iterable[str]) -> tuple[str, ...]:
        """The plan's tensors by their one name each, in its order; everything wrong with it in one error."""
        wanted: Any = plan.trainable if isinstance(plan, _HasTrainable) else plan
        if isinstance(wanted, str):
            raise ConfigError(f"a plan is a collection of names, not the one string {wanted!r}; write [{wanted!r}]")
        wanted = tuple(wanted)
        unknown = [name for name in wanted if name not in self._aliases]
        if unknown:
            raise ConfigError(
                f"the model has no parameter {', '.join(map(repr, unknown))}; "
                "a plan's names are those of model.named_parameters()"
            )
        names = tuple(dict.fromkeys(self._aliases[name] for name in wanted))
        fixed = [
            name for name in names if not (self.params[name].is_floating_point() or self.params[name].is_complex())
        ]
        if fixed:
            raise ConfigError(f"{', '.join(fixed)}: integer tensors cannot be trained; leave them out of the plan")
        absent = [name for name in names if self._held is not None and id(self.params[name]) not in self._held]
        if absent:
            raise ConfigError(
                f"the optimizer does not hold {', '.join(absent)}: they would get gradients and never move; "
                "build it over all the tensors that any plan may name (model.parameters()), before applying a plan"
            )
        return names

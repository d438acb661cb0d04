"""Put a plan on a model: what it names trains, what it does not name rests, and all of it can be undone."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Protocol, runtime_checkable

from torch import nn
from torch.optim import Optimizer

from elastictrainer.errors import ConfigError, ModelError
from elastictrainer.runtime.bits import keep_bits, keep_values
from elastictrainer.runtime.compilation import Compilations
from elastictrainer.runtime.fused import FusedStart
from elastictrainer.runtime.lean import make_lean, make_plain
from elastictrainer.runtime.norms import NormPolicy, check_norm_policy, release_statistics, set_statistics
from elastictrainer.runtime.optimizer_copy import look_through
from elastictrainer.runtime.reentrant import unwatch_checkpoints, watch_checkpoints
from elastictrainer.runtime.rows import RowsStanding, check_channels
from elastictrainer.runtime.state import RestingPolicy, RestingState, check_resting_policy

__all__ = ["Applied", "apply", "lifted", "unwrap"]

Channels = Mapping[str, tuple[int, ...]]


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
    bits: bool | None = None,
) -> Applied:
    """Train the tensors that the plan names and let every other one rest, until `undo()`.

        applied = et.apply(model, plan, optimizer=optimizer)
        ...                        # any loop: loss.backward(); optimizer.step(); optimizer.zero_grad()
        applied.update(next_plan)  # cheap: flags, and what follows from them
        applied.undo()             # or use it as a context manager

    Resting tensors get `requires_grad=False` and `grad=None`; the optimizer's param groups are never edited, so its
    checkpoints stay loadable whatever the plan. Candidates are the parameters that require a gradient now, and those
    that a plan names. A plan that already stands on the model gives way, and stands again after `undo()`.

    A plan with channels trains of these tensors the chosen output channels alone: their gradients, by a smaller kernel,
    and nothing else is computed, kept or moved (see `runtime/rows.py`). Build the optimizer over all parameters, as
    ever; while the plan stands such a parameter is as large as what trains of it.

    Args:
        plan: a `Plan`, or names as in `model.named_parameters()`; a tied tensor goes by any of its names.
        optimizer: give it, so that a plan which names a tensor that it does not hold is refused, its state of resting
            tensors is dealt with, and a fused one can start tensors that wake.
        bn: what running statistics do: `"frozen"`, `"track"` or `"with_owner"`; see `runtime/norms.py`.
        resting_state: what the optimizer's state of resting tensors does: `"keep"`, `"drop"` (freed, and gone) or
            `"offload"` (to host memory; on a CPU model the same as keep).
        bits: keep one bit an element of ReLUs for backward (`runtime/bits.py`), slower and smaller; by default where
            the plan has channels.

    Raises:
        ConfigError: unknown names (all are listed), tensors that the optimizer does not hold, or channels that cannot
            train apart.

    Costs: microseconds a tensor; with `"offload"`, the copies.
    """
    check_norm_policy(bn)
    check_resting_policy(resting_state)
    wrapped, model = model, unwrap(model)
    if _channels_of(plan) and isinstance(wrapped, nn.parallel.DistributedDataParallel):
        raise ConfigError("a plan with channels changes shapes, which DistributedDataParallel cannot follow; unwrap it")
    # Hooks and state are the optimizer's own: a framework's wrapper (accelerate's) forwards to it and has neither.
    optimizer = None if optimizer is None else look_through(optimizer)
    trainable, channels = _resolve(plan, model, optimizer)
    standing = _STANDING.get(model)
    if standing is not None:
        standing._take_off()
    applied = Applied(model, optimizer, bn, resting_state, bits, below=standing)
    try:
        applied._put_on(trainable, channels)
    except BaseException:
        applied.undo()
        raise
    return applied


class Applied:
    """A plan that stands on a model. Made by `apply`; `undo()` restores what was there."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        bn: NormPolicy,
        resting_state: RestingPolicy,
        bits: bool | None,
        *,
        below: Applied | None,
    ) -> None:
        # Weakly: _STANDING maps the model to this object and must not keep it alive.
        self._model = weakref.ref(model)
        self._optimizer = optimizer
        self._bn: NormPolicy = bn
        self._before: dict[nn.Parameter, bool] = {}
        self._trainable: tuple[str, ...] = ()
        self._channels: Channels = {}
        self._bits = bits
        self._rows: RowsStanding | None = None
        self._state = RestingState(optimizer, resting_state)
        self._fused: FusedStart | None = None
        self._compilations = Compilations()
        self._undone = False
        # Weakly too: a handle that nobody kept cannot be asked to go on, and a loop that calls `apply` over and over
        # must not pile them up.
        self._below = weakref.ref(below) if below is not None else None

    @property
    def trainable(self) -> tuple[str, ...]:
        """The tensors that train, by their names in `model.named_parameters()`, in the plan's order."""
        return self._trainable

    @property
    def channels(self) -> Channels:
        """Of tensors that train in part, the output channels that do."""
        return self._channels

    def update(self, plan: _HasTrainable | Iterable[str]) -> None:
        """Move to another plan.

        A tensor that goes to rest loses the gradient it had accumulated; one that stays keeps it; one that wakes
        accumulates from the next backward pass on. Call it, with the same plan, after `optimizer.load_state_dict`.
        """
        model = self._standing_on()
        self._put_on(*_resolve(plan, model, self._optimizer))

    def undo(self) -> None:
        """Restore flags and running-statistics modes as they were, bring offloaded state back.

        A plan that this one was applied on top of stands again, if its handle was kept. What was dropped does not come
        back: gradients of tensors that went to rest, their state under `"drop"`. Calling it again does nothing.
        """
        if self._undone:
            return
        self._undone = True
        model = self._model()
        if model is None or _STANDING.get(model, self) is self:
            self._take_off()
            below = self._next_below()
            if below is not None:
                below._put_on(below._trainable, below._channels)

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
        state = "undone" if self._undone else f"{len(self._trainable)} of {len(self._before)} tensors train"
        return f"Applied({state}, bn={self._bn!r})"

    def _standing_on(self) -> nn.Module:
        model = self._model()
        if model is None:
            raise ModelError("the model that this plan stood on is gone; call apply on the model in use")
        if self._undone:
            raise ConfigError("this plan was undone; call apply(model, plan) again")
        if _STANDING.get(model) is not self:
            raise ConfigError("another plan was applied on top of this one; undo that one first")
        return model

    def _put_on(self, trainable: tuple[str, ...], channels: Channels) -> None:
        model = self._model()
        if model is None:
            return
        _STANDING[model] = self
        same_rows = self._rows is not None and channels == self._channels
        if not same_rows:
            self._take_rows_off()
        chosen = frozenset(trainable)
        self._compilations.moving_to(chosen)
        active, resting = [], []
        for name, param in model.named_parameters():
            self._before.setdefault(param, param.requires_grad)
            if name in chosen:
                param.requires_grad_(True)
                active.append(param)
            else:
                # None, not zeros: optimizers still apply decay and momentum to a zero gradient.
                param.requires_grad_(False)
                param.grad = None
                resting.append(param)
        self._trainable, self._channels = trainable, channels
        self._state.settle(active, resting)
        if channels and not same_rows:
            self._rows = RowsStanding(model, self._optimizer, channels)
            self._rows.put_on()
        if self._fused is None and self._optimizer is not None and FusedStart.needed(self._optimizer):
            self._fused = FusedStart(self._optimizer)
        set_statistics(model, self._bn)
        make_lean(model)
        if bool(channels) if self._bits is None else self._bits:
            keep_bits(model)
        else:
            keep_values(model)
        watch_checkpoints(model)

    def _take_rows_off(self) -> None:
        if self._rows is not None:
            self._rows.take_off()
            self._rows = None

    def _take_off(self) -> None:
        self._take_rows_off()
        for param, flag in self._before.items():
            param.requires_grad_(flag)
        self._state.settle(self._before, ())
        if self._fused is not None:
            self._fused.remove()
            self._fused = None
        model = self._model()
        if model is not None:
            release_statistics(model)
            make_plain(model)
            keep_values(model)
            unwatch_checkpoints(model)
            _STANDING.pop(model, None)

    def _next_below(self) -> Applied | None:
        below = self._below() if self._below is not None else None
        return below._next_below() if below is not None and below._undone else below


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


@contextmanager
def lifted(model: nn.Module) -> Iterator[None]:
    """Inside, tensors of which a standing plan trains some channels are whole, as who looks at all tensors needs them.

    Gradients of such tensors are gone on entry and exit: use it inside `untouched`. Costs a copy of the rows each way.
    """
    standing = _STANDING.get(model)
    rows = standing._rows if standing is not None else None
    if rows is None:
        yield
        return
    rows.take_off()
    make_lean(model)
    try:
        yield
    finally:
        rows.put_on()


def _channels_of(plan: object) -> Channels:
    return dict(getattr(plan, "channels", None) or {})


def _resolve(
    plan: _HasTrainable | Iterable[str], model: nn.Module, optimizer: Optimizer | None
) -> tuple[tuple[str, ...], Channels]:
    """The plan's tensors and channels by the one name that `named_parameters()` gives each, in the plan's order.

    Everything that could make it train less than it says is an error: unknown names, tensors that no one will step.
    """
    wanted = plan.trainable if isinstance(plan, _HasTrainable) else plan
    if isinstance(wanted, str):
        raise ConfigError(f"a plan is a collection of names, not the one string {wanted!r}; write [{wanted!r}]")
    wanted = tuple(wanted)
    canonical = {param: name for name, param in model.named_parameters()}
    params = dict(model.named_parameters(remove_duplicate=False))
    unknown = [name for name in wanted if name not in params]
    if unknown:
        raise ConfigError(
            f"the model has no parameter {', '.join(map(repr, unknown))}; "
            "a plan's names are those of model.named_parameters()"
        )
    fixed = [name for name in wanted if not (params[name].is_floating_point() or params[name].is_complex())]
    if fixed:
        raise ConfigError(f"{', '.join(fixed)}: integer tensors cannot be trained; leave them out of the plan")
    if optimizer is not None:
        held = {param for group in optimizer.param_groups for param in group["params"]}
        absent = [name for name in wanted if params[name] not in held]
        if absent:
            raise ConfigError(
                f"the optimizer does not hold {', '.join(absent)}: they would get gradients and never move; "
                "build it over all the tensors that any plan may name (model.parameters()), before applying a plan"
            )
    channels = {canonical[params[name]]: tuple(rows) for name, rows in _channels_of(plan).items() if name in params}
    check_channels(model, channels)
    return tuple(dict.fromkeys(canonical[params[name]] for name in wanted)), channels

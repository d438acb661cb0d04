"""Find what stays the same while a plan stands: the calls of modules that no trained tensor reaches, and what crosses.

One forward pass is watched from above autograd: every call of a module and every operation, with what goes into it and
what comes out. A value is *live* if a trained tensor had a part in it, and constant otherwise. The outermost calls of
constant values only are the prefix. Of what they return, only what a live operation reads must be known in order to
train: that is the crossing, one tensor for a plain chain, two where the cut goes through a residual block. All else in
the prefix need not be computed at all, so a step can be run with stand-ins for those calls (`runtime/standin.py`).

Nothing is looked up by layer name or type, and no graph has to be exported: whatever runs as modules can be cut between
any two of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves

from elastictrainer.runtime.folding import is_convolution, is_norm
from elastictrainer.runtime.untouched import untouched

__all__ = ["Call", "Crossing", "Cut", "find_cut"]

LossFn = Callable[[nn.Module, Any], Tensor]
# What turns a tensor into a number of the host's, which may then decide anything.
_ESCAPES = frozenset(("item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__", "__array__"))


@dataclass(frozen=True, slots=True)
class Call:
    """A call of the prefix: the `number`-th of this module in a forward pass, and the form of what it returns.

    `outs` has, for each leaf of the returned structure, a tensor on the meta device, or the thing itself if it is none.
    `read`: what reads its tensors besides other calls of the prefix. `"live"`: what trains, so they must be known;
    `"glue"`: operations between modules that lead nowhere, so any values of that shape do; `"none"`: nobody.
    """

    module: str
    number: int
    read: Literal["live", "glue", "none"]
    outs: tuple[Any, ...]
    spec: TreeSpec


@dataclass(frozen=True, slots=True)
class Crossing:
    """A tensor that goes from the prefix into what trains. `places`: (position in the prefix, leaf) of each call that
    returns it; several where calls hand it through."""

    places: tuple[tuple[int, int], ...]
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Cut:
    """Where a model divides under a plan. `made_from` are the leaves of the batch that the crossings depend on,
    `live_reads` those that the live part reads for itself. `obstacle` says in words why nothing can be divided off."""

    prefix: tuple[Call, ...] = ()
    crossings: tuple[Crossing, ...] = ()
    made_from: frozenset[int] = frozenset()
    live_reads: frozenset[int] = frozenset()
    folds: tuple[tuple[str, str], ...] = ()
    """Convolutions of the prefix, each with the batch norm that alone reads what it returns."""
    rest_folds: tuple[tuple[str, str], ...] = ()
    """The same of the live part, where neither trains: gradients pass through them."""
    rest_norms: tuple[str, ...] = ()
    """Batch norms of the live part that do not train and stand alone."""
    obstacle: str = ""

    @property
    def crossing_bytes(self) -> int:
        """Bytes that cross in one batch."""
        return sum(crossing.nbytes for crossing in self.crossings)


def find_cut(model: nn.Module, loss_fn: LossFn, batch: Any) -> Cut:
    """Divide the model by its `requires_grad` flags as they stand.

    The pass is made in evaluation mode, as the prefix will run, and leaves no trace. Costs one forward pass, slowed
    down by some microseconds an operation, and holds every activation of it.
    """
    trained = {parameter for parameter in model.parameters() if parameter.requires_grad}
    with untouched(model), torch.no_grad():
        model.eval()
        streams = _streams()
        with _Watch(model, trained, tree_leaves(batch)) as watch:
            loss_fn(model, batch)
        drew = any(not torch.equal(before, now) for before, now in zip(streams, _streams()))
    if drew:
        return Cut(obstacle="the model draws random numbers even in evaluation mode, so nothing of it is constant")
    return watch.cut()


def _streams() -> list[Tensor]:
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return [torch.get_rng_state(), *cuda]


@dataclass(slots=True)
class _Value:
    """A tensor as an operation left it. `of` holds it, so that its identity is not given away while watching."""

    of: Tensor
    call: int
    inputs: tuple[int, ...] = ()
    live: bool = False
    leaf: int | None = None  # of the batch
    held: bool = False  # a parameter or a buffer


@dataclass(slots=True)
class _Called:
    module: str
    number: int
    parent: int
    live: bool = False
    outs: tuple[Any, ...] = ()
    spec: Any = None
    returned: dict[int, int] = field(default_factory=dict)  # leaf -> value


class _Watch(TorchFunctionMode):
    """While it is on, notes calls, operations and values; afterwards divides them."""

    def __init__(self, model: nn.Module, trained: set[nn.Parameter], leaves: list[Any]) -> None:
        super().__init__()
        self.model, self.trained = model, trained
        self.values: list[_Value] = []
        self.index: dict[int, int] = {}
        self.calls = [_Called("", 0, -1, live=True)]  # the loss function, which is always live
        self.stack = [0]
        self.reads: list[tuple[int, int, int | None]] = []  # by which call, what, into which value (None: the host's)
        for number, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                self._note(leaf, leaf=number)
        self._times: Counter[str] = Counter()
        self._handles: list[Any] = []

    def __enter__(self) -> _Watch:
        for name, module in self.model.named_modules():
            self._handles += [
                module.register_forward_pre_hook(lambda *_, name=name: self._enter(name)),
                module.register_forward_hook(lambda _, __, out: self._leave(out)),
            ]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for handle in self._handles:
            handle.remove()

    def _enter(self, name: str) -> None:
        number = self._times[name]
        self._times[name] += 1
        self.calls.append(_Called(name, number, self.stack[-1]))
        self.stack.append(len(self.calls) - 1)

    def _leave(self, out: Any) -> None:
        call = self.calls[self.stack.pop()]
        leaves, call.spec = tree_flatten(out)
        call.returned = {n: self._seen(leaf) for n, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
        call.outs = tuple(leaves)

    def _note(self, tensor: Tensor, **about: Any) -> int:
        self.values.append(_Value(tensor, self.stack[-1], **about))
        self.index[id(tensor)] = len(self.values) - 1
        return len(self.values) - 1

    def _seen(self, tensor: Tensor) -> int:
        """The value that a tensor now is; one never seen before is a parameter or a buffer."""
        if id(tensor) in self.index:
            return self.index[id(tensor)]
        return self._note(tensor, held=True, live=isinstance(tensor, nn.Parameter) and tensor in self.trained)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        inputs = tuple(dict.fromkeys(self._seen(tensor) for tensor in tensors))
        out = func(*args, **kwargs)
        made = [args[0]] if name == "__setitem__" else [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        live = any(self.values[value].live for value in inputs)
        for tensor in made:  # an operation in place makes a new value of the same tensor
            value = self._note(tensor, inputs=inputs, live=live)
            self.reads += [(self.stack[-1], read, value) for read in inputs]
        if not made and name in _ESCAPES:
            self.reads += [(self.stack[-1], read, None) for read in inputs]
        return out

    # -- dividing ------------------------------------------------------------------------------------------------------

    def cut(self) -> Cut:
        for value in self.values:
            if value.live and not value.held:
                self._mark_live(value.call)
        for position, call in enumerate(self.calls):
            if not call.returned or any(self.values[value].live for value in call.returned.values()):
                self._mark_live(position)
        prefix = sorted({call for call in map(self._outermost, range(len(self.calls))) if call is not None})
        exits: dict[int, list[tuple[int, int]]] = {}
        for position, at in enumerate(prefix):
            for leaf, returned in self.calls[at].returned.items():
                exits.setdefault(returned, []).append((position, leaf))
        crossing, live_reads, leak = self._read_by_live(exits)
        if leak:
            return Cut(obstacle=f"{leak} hands a value on by another way than returning it")
        if not crossing:
            return Cut(obstacle="a trained tensor reaches every module")
        glued = {place[0] for reader, value, _ in self.reads if self._outermost(reader) is None
                 for place in exits.get(value, ())}  # fmt: skip
        live = {position for value in crossing for position, _ in exits[value]}
        calls = []
        for position, index in enumerate(prefix):
            called = self.calls[index]
            read: Literal["live", "glue", "none"] = (
                "live" if position in live else "glue" if position in glued else "none"
            )
            outs = tuple(leaf.to("meta") if isinstance(leaf, Tensor) else leaf for leaf in called.outs)
            calls.append(Call(called.module, called.number, read, outs, called.spec))
        tensors = [(value, self.values[value].of) for value in crossing]
        return Cut(
            prefix=tuple(calls),
            crossings=tuple(Crossing(tuple(exits[value]), tuple(t.shape), t.dtype) for value, t in tensors),
            made_from=self._leaves_under(crossing),
            live_reads=live_reads,
            folds=tuple(self._folds()),
            rest_folds=(at_rest := tuple(self._folds(live=True))),
            rest_norms=tuple(self._norms_at_rest({norm for _, norm in at_rest})),
        )

    def _norms_at_rest(self, folded: set[str]) -> Iterator[str]:
        modules = dict(self.model.named_modules())
        times = Counter(call.module for call in self.calls[1:])
        for call in self.calls:
            if call.parent < 0 or not call.live or call.module in folded or times[call.module] > 1:
                continue
            if is_norm(modules[call.module]) and self._rests(modules[call.module]):
                yield call.module

    def _rests(self, module: nn.Module) -> bool:
        return not any(parameter in self.trained for parameter in module.parameters())

    def _folds(self, *, live: bool = False) -> Iterator[tuple[str, str]]:
        """Of the prefix, or of the live part."""
        modules = dict(self.model.named_modules())
        readers: dict[int, set[int]] = {}
        for reader, value, _ in self.reads:
            readers.setdefault(value, set()).add(reader)
        times = Counter(call.module for call in self.calls[1:])
        for call in self.calls:
            if call.parent < 0 or call.live != live or not is_convolution(modules[call.module]):
                continue
            if live and not self._rests(modules[call.module]):
                continue
            by = readers.get(next(iter(call.returned.values()), -1), set())
            if len(by) != 1 or self.calls[reader := next(iter(by))].live != live:
                continue
            norm = self.calls[reader].module
            if live and reader and not self._rests(modules[norm]):
                continue
            if reader and is_norm(modules[norm]) and times[call.module] == times[norm] == 1:
                yield call.module, norm

    def _mark_live(self, call: int) -> None:
        while call >= 0 and not self.calls[call].live:
            self.calls[call].live = True
            call = self.calls[call].parent

    def _outermost(self, call: int) -> int | None:
        """The call of the prefix that this one is, or is inside of; None for live code."""
        if self.calls[call].live:
            return None
        while not self.calls[self.calls[call].parent].live:
            call = self.calls[call].parent
        return call

    def _read_by_live(self, exits: dict[int, Any]) -> tuple[list[int], frozenset[int], str]:
        """What live code reads, directly or through constant operations between modules, which are run each time."""
        crossing: list[int] = []
        leaves: set[int] = set()
        waiting = [
            value
            for reader, value, into in self.reads
            if (self._outermost(reader) is None if into is None else self.values[into].live)
        ]
        seen: set[int] = set()
        while waiting:
            value = waiting.pop()
            about = self.values[value]
            if value in seen or about.live:
                continue
            seen.add(value)
            if value in exits:
                crossing.append(value)
            elif about.leaf is not None:
                leaves.add(about.leaf)
            elif not about.held:
                inside = self._outermost(about.call)
                if inside is not None:
                    return [], frozenset(), self.calls[inside].module
                waiting += about.inputs
        return sorted(crossing), frozenset(leaves), ""

    def _leaves_under(self, values: Iterable[int]) -> frozenset[int]:
        waiting, seen = list(values), set()
        while waiting:
            value = waiting.pop()
            if value not in seen:
                seen.add(value)
                waiting += self.values[value].inputs
        return frozenset(leaf for value in seen if (leaf := self.values[value].leaf) is not None)

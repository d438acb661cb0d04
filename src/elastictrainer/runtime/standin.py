"""Run a model's prefix alone, or everything but the prefix.

Both leave the model as it is. To run the prefix, a forward pass is made and stopped as soon as everything that crosses
has come by. To run the rest, the calls of the prefix get stand-ins for the time of one pass, which return what crosses
from where it was kept, and blanks of the right shape where nobody who trains will look.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from elastictrainer.errors import ModelError
from elastictrainer.runtime.cut import Call, Cut, LossFn
from elastictrainer.runtime.folding import fold, passed_on
from elastictrainer.runtime.patch import replaced

__all__ = ["StandIns", "agree", "evaluating"]


class _Enough(BaseException):
    """Everything that crosses has been seen; not an error, and nothing of the user's should catch it."""


class StandIns:
    """A cut put to use on its model, for batches of any size, for as long as no tensor of the prefix changes.

    Args:
        batch_size: of the batch that the cut was found with.
        precision: `"bf16"` runs the prefix under autocast.
    """

    def __init__(
        self, model: nn.Module, cut: Cut, *, batch_size: int, precision: Literal["bf16"] | None = None
    ) -> None:
        assert cut.crossings, "nothing crosses, so there is nothing to stand in for"
        self.model, self.cut, self.batch_size, self.precision = model, cut, batch_size, precision
        modules = dict(model.named_modules())
        self._folded: list[tuple[nn.Module, Callable[..., Any]]] = []
        for convolution, norm in cut.folds:
            self._folded.append((modules[convolution], fold(modules[convolution], modules[norm])))
            self._folded.append((modules[norm], passed_on))
        self._calls: dict[nn.Module, dict[int, tuple[int, Call]]] = {}
        for position, call in enumerate(cut.prefix):
            self._calls.setdefault(modules[call.module], {})[call.number] = (position, call)
        self._sources = [crossing.places[0] for crossing in cut.crossings]
        self._crossing = {place: n for n, crossing in enumerate(cut.crossings) for place in crossing.places}

    # -- the prefix alone ----------------------------------------------------------------------------------------------

    def collect(self, loss_fn: LossFn, batch: Any) -> list[Tensor]:
        """What crosses for this batch: the prefix in evaluation mode, without autograd, and nothing after it.

        Norms are folded into convolutions, images go through in channels_last, and the passes after the last tensor
        that crosses are not run.
        """
        found: dict[int, Tensor] = {}
        wanted = {place: n for n, place in enumerate(self._sources)}
        counts: dict[nn.Module, int] = {}

        def note(module: nn.Module, _: Any, out: Any) -> None:
            number = counts.get(module, 0)
            counts[module] = number + 1
            if number not in self._calls[module]:
                return
            position, _call = self._calls[module][number]
            for leaf, value in enumerate(tree_flatten(out)[0]):
                if (position, leaf) in wanted:
                    found[wanted[position, leaf]] = value
            if len(found) == len(wanted):
                raise _Enough

        handles = [module.register_forward_hook(note) for module in self._calls]
        handles.append(self.model.register_forward_pre_hook(_channels_last))
        device = next(self.model.parameters()).device.type
        half = torch.autocast(device, dtype=torch.bfloat16, enabled=self.precision == "bf16")
        try:
            with evaluating(self.model), replaced(self._folded), torch.inference_mode(), half:
                loss_fn(self.model, batch)
        except _Enough:
            pass
        finally:
            for handle in handles:
                handle.remove()
        if len(found) < len(wanted):
            raise ModelError(
                "the model did not make the calls it made when it was cut in two; its control flow must depend on "
                "shapes only for features to be kept (keep='never' does without)"
            )
        # Under autocast they come in half precision, and what trains is to be given what it always was.
        return [found[n].to(crossing.dtype) for n, crossing in enumerate(self.cut.crossings)]

    # -- everything but the prefix -------------------------------------------------------------------------------------

    @contextmanager
    def standing_in(self, crossing: Sequence[Tensor]) -> Iterator[None]:
        """Inside, a forward pass takes these tensors where it would have run the prefix."""
        size = self._size_of(crossing)
        counts: dict[nn.Module, int] = {}
        with replaced([(m, self._stand_in(m, calls, crossing, counts, size)) for m, calls in self._calls.items()]):
            yield

    def _stand_in(
        self,
        module: nn.Module,
        calls: dict[int, tuple[int, Call]],
        crossing: Sequence[Tensor],
        counts: dict[nn.Module, int],
        size: int,
    ) -> Callable[..., Any]:
        original = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            number = counts.get(module, 0)
            counts[module] = number + 1
            if number not in calls:
                return original(*args, **kwargs)
            position, call = calls[number]
            leaves = []
            for leaf, out in enumerate(call.outs):
                at = self._crossing.get((position, leaf))
                if at is not None:
                    leaves.append(crossing[at])
                elif isinstance(out, Tensor):
                    leaves.append(self._blank(out, call, crossing[0].device, size))
                else:
                    leaves.append(out)
            return tree_unflatten(leaves, call.spec)

        return forward

    def _blank(self, like: Tensor, call: Call, device: torch.device, size: int) -> Tensor:
        if call.read == "none":  # only calls of the prefix would look, and they do not
            return torch.empty(0, dtype=like.dtype, device=device)
        return torch.zeros(scaled(like.shape, self.batch_size, size), dtype=like.dtype, device=device)

    def _size_of(self, crossing: Sequence[Tensor]) -> int:
        return len(crossing[0]) * self.batch_size // self.cut.crossings[0].shape[0]


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Inside, every module is in evaluation mode."""
    training = [module for module in model.modules() if module.training]  # to set one is ten times dearer than to ask
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _channels_last(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(
        arg.contiguous(memory_format=torch.channels_last) if isinstance(arg, Tensor) and arg.dim() == 4 else arg
        for arg in args
    )


def scaled(shape: Sequence[int], traced: int, size: int) -> tuple[int, ...]:
    """A shape seen with `traced` samples, for `size` of them."""
    if not shape or shape[0] % traced:
        return tuple(shape)
    return (shape[0] // traced * size, *shape[1:])


def agree(model: nn.Module, stand_ins: StandIns, loss_fn: LossFn, batch: Any, *, shuffled: Any) -> str:
    """Why what was collected must not be trained on instead of the whole; empty if it may.

    Two things are tried: that the loss comes out the same, and that a sample's row does not depend on the samples
    beside it (`shuffled` is the batch with its samples in reverse order), since rows are kept by sample.
    """
    there = stand_ins.collect(loss_fn, batch)
    here = stand_ins.collect(loss_fn, shuffled)
    for crossing, one, other in zip(stand_ins.cut.crossings, there, here):
        if crossing.shape[0] % stand_ins.batch_size:
            return f"a tensor of shape {crossing.shape} crosses, which does not divide into the samples of a batch"
        rows = one.reshape(stand_ins.batch_size, -1)
        if not torch.allclose(rows, other.reshape(rows.shape).flip(0), rtol=0.0, atol=1e-3 * _scale(rows)):
            return "what crosses for a sample depends on the samples beside it"
    with evaluating(model), torch.no_grad():
        whole = loss_fn(model, batch)
        try:
            with stand_ins.standing_in([value.clone() for value in there]):
                rest = loss_fn(model, batch)
        except RuntimeError as error:  # a module that matters by what it does to its input, for one
            return f"what trains cannot run alone: {str(error).splitlines()[0]}"
    close = 1e-3 if stand_ins.precision is None else 3e-2
    if not torch.allclose(whole, rest, rtol=close, atol=close / 10):
        return f"the loss with stand-ins is {rest.item():g} and {whole.item():g} without"
    return ""


def _scale(rows: Tensor) -> float:
    return float(rows.abs().max()) if rows.numel() else 0.0

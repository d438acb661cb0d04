"""Run a model's forward and backward for the sake of measuring, and leave no trace of it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from elastictrainer.errors import ModelError
from elastictrainer.runtime.norms import ASKED

__all__ = ["untouched"]


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Whatever runs inside, the model and every random stream are afterwards as they were, error or not.

    Restored: buffers (the same objects with the same bits, BatchNorm's statistics and non-persistent ones included),
    each module's training flag, each parameter's `requires_grad` and `.grad` (the same objects; None inside), and the
    generators of python, numpy, torch and every initialised accelerator. Not watched: the values of parameters and the
    optimizer. Nothing inside may write either; work on copies. Global switches (cuDNN's, deterministic algorithms,
    thread counts) are not touched.

    Example:
        >>> norm = nn.BatchNorm1d(2)
        >>> with untouched(norm):
        ...     norm(torch.randn(8, 2)).sum().backward()
        >>> norm.num_batches_tracked.item(), norm.weight.grad
        (0, None)

    Raises:
        ModelError: a lazy module has no shapes yet, so its first forward pass could not be undone.

    Cost: one copy of the buffers and of the generators' states; nothing per parameter.
    """
    lazy = [name for name, tensor in [*model.named_parameters(), *model.named_buffers()] if is_lazy(tensor)]
    if lazy:
        raise ModelError(
            f"{lazy[0]} is lazy and has no shape yet ({len(lazy)} such tensors); run one batch through the model first"
        )
    with ExitStack() as restore:  # each part is put back even if putting back another one fails
        for keep in (_keep_random_streams, _keep_gradients, _keep_training_flags, _keep_buffers):
            keep(model, restore)
        yield


def _keep_gradients(model: nn.Module, restore: ExitStack) -> None:
    kept = [(parameter, parameter.requires_grad, parameter.grad) for parameter in model.parameters()]

    def put_back() -> None:
        for parameter, requires_grad, grad in kept:
            parameter.requires_grad_(requires_grad)
            parameter.grad = grad

    restore.callback(put_back)
    for parameter, _, _ in kept:
        parameter.grad = None


def _keep_training_flags(model: nn.Module, restore: ExitStack) -> None:
    kept = [(module, module.training, module.__dict__.get(ASKED)) for module in model.modules()]

    def put_back() -> None:
        for module, training, asked in kept:
            module.training = training
            if asked is not None:  # a layer that a plan holds in evaluation mode
                module.__dict__[ASKED] = asked

    restore.callback(put_back)


def _keep_buffers(model: nn.Module, restore: ExitStack) -> None:
    registered = [
        (module, dict(module._buffers), set(module._non_persistent_buffers_set)) for module in model.modules()
    ]
    # `data` is a second view of the same memory: it finds the old bits even if `buffer.data = ...` swaps them inside,
    # and writing through it leaves autograd's version counter alone.
    kept = [(buffer, buffer.data, _compact(buffer.data).clone()) for buffer in model.buffers()]

    def put_back() -> None:
        for buffer, data, bits in kept:
            with torch.inference_mode(data.is_inference()):  # an inference tensor may only be written in that mode
                _compact(data).copy_(bits)
            buffer.data = data
        for module, buffers, non_persistent in registered:
            module._buffers.clear()
            module._buffers.update(buffers)
            module._non_persistent_buffers_set.clear()
            module._non_persistent_buffers_set.update(non_persistent)

    restore.callback(put_back)


def _compact(tensor: Tensor) -> Tensor:
    """The elements behind an expanded tensor, each once: `copy_` refuses to write one place several times."""
    if tensor.layout is not torch.strided:
        return tensor
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride())):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _keep_random_streams(model: nn.Module, restore: ExitStack) -> None:
    restore.callback(random.setstate, random.getstate())
    # The global generator is what data augmentation uses, whatever numpy recommends for new code.
    restore.callback(np.random.set_state, np.random.get_state(legacy=False))  # noqa: NPY002
    restore.callback(torch.set_rng_state, torch.get_rng_state())
    if torch.cuda.is_initialized():  # asking an uninitialised device would initialise it
        restore.callback(torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all())
    if torch.backends.mps.is_available():
        restore.callback(torch.mps.set_rng_state, torch.mps.get_rng_state())

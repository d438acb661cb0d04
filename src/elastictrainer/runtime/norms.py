"""What happens to running statistics (BatchNorm and its kin) while a plan stands.

A tensor that rests is not all there is to a layer at rest: in training mode a BatchNorm layer normalises by the batch
and moves its running mean and variance at every forward pass, whatever `requires_grad` says. So there is a policy:

- `"frozen"` (the default): no statistics move; every such layer normalises by what it had, as in `eval()`. Right for
  fine-tuning, where the pretrained statistics are better than those of a batch of four.
- `"track"`: as PyTorch does by itself: all of them move in training mode.
- `"with_owner"`: a layer's statistics move if one of its own tensors is being trained, and are frozen otherwise.

Which layers that concerns is asked of the layer (does it own a `running_mean` or `running_var` that is in use?), so
SyncBatchNorm, InstanceNorm with statistics and timm's fused norm-and-activation layers follow the same policy.
"""

from __future__ import annotations

from typing import Literal, get_args

from torch import nn

from elastictrainer.errors import ConfigError
from elastictrainer.runtime.patch import shadow, shadowed, unshadow

__all__ = ["NormPolicy", "asked_mode", "check_norm_policy", "release_statistics", "set_statistics", "tracks_statistics"]

NormPolicy = Literal["frozen", "track", "with_owner"]

# What the last train()/eval() asked of a layer that is held in evaluation mode: the mode it gets back when released.
ASKED = "_elastictrainer_asked_mode"


def check_norm_policy(bn: str) -> None:
    if bn not in get_args(NormPolicy):
        raise ConfigError(
            f"bn={bn!r} is not a policy for running statistics; use one of {', '.join(get_args(NormPolicy))}"
        )


def tracks_statistics(module: nn.Module) -> bool:
    """Whether this module itself (not a child of it) moves running statistics in training mode."""
    return any(module._buffers.get(name) is not None for name in ("running_mean", "running_var"))


def set_statistics(model: nn.Module, bn: NormPolicy) -> None:
    """Make every layer with running statistics follow the policy, given the `requires_grad` flags as they stand.

    Holds through any later `model.train()`. Costs microseconds a layer, here and at each `train()`; nothing in forward.
    """
    for module in model.modules():
        if not tracks_statistics(module):
            continue
        owned = any(p is not None and p.requires_grad for p in module._parameters.values())
        if bn == "frozen" or (bn == "with_owner" and not owned):
            _hold(module)
        else:
            _release(module)


def release_statistics(model: nn.Module) -> None:
    """Give every layer back to `train()` and `eval()`, in the mode that was last asked of it."""
    for module in model.modules():
        _release(module)


def asked_mode(module: nn.Module) -> bool:
    """Training (True) or evaluation, as the last `train()` or `eval()` asked of a layer, held or not."""
    return bool(module.__dict__.get(ASKED, module.training))


def train(self: nn.Module, mode: bool = True) -> nn.Module:
    """Stands in for `Module.train` (and so `eval`) of a held layer: remembers the wish, stays in evaluation."""
    type(self).train(self, mode)
    self.__dict__[ASKED] = mode
    self.training = False
    return self


def _hold(module: nn.Module) -> None:
    if shadowed(module, train):
        module.training = False  # whoever set the flag by hand
        return
    if not shadow(module, train):
        name = type(module).__name__
        raise ConfigError(
            f"a {name} layer has its train() replaced by other code; its statistics cannot be held: use bn='track'"
        )
    module.__dict__[ASKED] = module.training
    module.training = False


def _release(module: nn.Module) -> None:
    if shadowed(module, train):
        unshadow(module, train)
        module.training = module.__dict__.pop(ASKED)

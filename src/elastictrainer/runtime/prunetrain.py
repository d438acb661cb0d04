"""PruneTrain: channels driven towards zero by group lasso while training, and taken out of the network at intervals.

S. Lym et al., PruneTrain: Fast Neural Network Training by Dynamic Sparse Model Reconfiguration, SC 2019. As published:

- from the first step on, the loss has the term `strength * sum of ||w_g||` over the input channels and over the output
  channels of every convolution (not the images' channels), with one strength for all groups, set at the first step so
  that the term is a fifth of the whole loss;
- at intervals, channels all of whose weights are below 1e-4, in every layer that shares them (so those of a residual
  stream go together or not at all), are taken out of the network, which is then really smaller and faster;
- what is left goes on with its momentum.

The published batch size that grows as memory frees up is left out: comparisons here are at equal batches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from elastictrainer.errors import ConfigError
from elastictrainer.runtime.apply import unwrap
from elastictrainer.runtime.interval import Interval
from elastictrainer.runtime.resize import cut, follow, resize
from elastictrainer.runtime.untouched import untouched

__all__ = ["PruneTrain"]

SHARE = 0.2  # of the whole loss, that the lasso is at first; published: 0.2 to 0.25
THRESHOLD = 1e-4  # a weight below it is zero; as published
# What divides by the number of its channels: taking one out would change what becomes of the others.
_MIXING = (nn.GroupNorm, nn.LayerNorm, nn.MultiheadAttention)


class PruneTrain:
    """Group lasso in every optimizer step, and the rebuilding when it is due. Needs the package torch-pruning.

    The lasso's gradient is added to the weights' own just before the optimizer steps, after unscaling and clipping:
    what autograd would compute, without a second way through the graph. The loss that is reported is the task's alone.

    Raises:
        ConfigError: torch-pruning is not installed, or the network has no convolution, or is compiled or distributed.

    Costs two norms of every convolution's weight a step; at a rebuilding one forward pass and some seconds.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, *, interval: Interval) -> None:
        try:
            import torch_pruning  # noqa: F401
        except ImportError as error:
            raise ConfigError(
                "policy 'prunetrain' needs the package torch-pruning: pip install 'elastictrainer[prunetrain]'"
            ) from error
        if unwrap(model) is not model:
            raise ConfigError(
                "policy 'prunetrain' rebuilds the network, which must be neither compiled nor distributed"
            )
        self.model, self.optimizer, self.interval = model, optimizer, interval
        if not self._weights():
            raise ConfigError("policy 'prunetrain' prunes channels of convolutions, and this network has none")
        self.strength: float | None = None
        self._handle = optimizer.register_step_pre_hook(self._add_lasso)

    def close(self) -> None:
        self._handle.remove()

    # -- the lasso ---------------------------------------------------------------------------------------------------

    def saw(self, loss: Tensor) -> None:
        """The task's loss of the step in progress: the first one sets the strength. Waits for the device, once."""
        if self.strength is None:
            with torch.no_grad():
                self.strength = float(SHARE / (1 - SHARE) * loss.detach() / self.lasso())

    def lasso(self) -> Tensor:
        """The sum of the groups' norms, without its strength."""
        terms = [_norm(weight, 0).sum() for weight, _ in self._weights()]
        terms += [_norm(weight, 1).sum() for weight, inputs in self._weights() if inputs]
        return torch.stack(terms).sum()

    @torch.no_grad()
    def _add_lasso(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self.strength is None:
            return
        for weight, inputs in self._weights():
            if weight.grad is None:
                continue
            weight.grad.addcmul_(weight, _pull(weight, inputs=inputs), value=self.strength)

    def _weights(self) -> list[tuple[Tensor, bool]]:
        """Every convolution's weight, and whether its input channels are groups: not those of images, nor of a
        depthwise convolution, which has but one for each output."""
        found = []
        first = True
        for module in self.model.modules():
            if isinstance(module, nn.modules.conv._ConvNd) and not module.transposed:
                found.append((module.weight, module.groups == 1 and not first))
                first = False
        return found

    # -- state -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {"strength": self.strength}

    def load_state_dict(self, state: dict[str, Any], weights: dict[str, Tensor]) -> None:
        """Go on: the network shrinks to the weights that are about to be loaded, and the optimizer follows."""
        self.strength = state["strength"]
        follow(self.optimizer, resize(self.model, weights), {})

    # -- the rebuilding ----------------------------------------------------------------------------------------------

    def due(self, *, epoch: int, batch: int, step: int) -> bool:
        """Whether to rebuild before this batch: at every interval's end, not at the run's beginning."""
        if self.interval.kind == "steps":
            return step > 0 and step % int(self.interval.value) == 0
        every = 1 if self.interval.kind == "auto" else max(1, round(self.interval.value))
        return batch == 0 and epoch > 0 and epoch % every == 0

    def rebuild(self, loss_fn: Callable[[nn.Module, Any], Tensor], batch: Any) -> int:
        """Take the channels that are zero out of the network and the optimizer. Returns how many went.

        Without a plan on the model. What is removed was multiplied by zeros (weights below the threshold) in every
        layer that read it, so the network computes what it did.
        """
        cuts, gone = self._find(loss_fn, batch)
        if not gone:
            return 0
        tensors = dict(self.model.state_dict())
        smaller = {name: cut(tensor, cuts.get(name, ())) for name, tensor in tensors.items()}
        by_parameter: dict[Tensor, Any] = {p: cuts[name] for name, p in self.model.named_parameters() if name in cuts}
        replaced = resize(self.model, smaller)
        follow(self.optimizer, replaced, by_parameter)
        for old, new in replaced.items():  # of batches that are being accumulated
            new.grad = None if old.grad is None else cut(old.grad, by_parameter.get(old, ()))
        self.model.load_state_dict(smaller)
        return gone

    def _find(self, loss_fn: Callable[[nn.Module, Any], Tensor], batch: Any) -> tuple[dict[str, Any], int]:
        """What stays of every tensor that shrinks, and how many channels go."""
        import torch_pruning

        gone = 0
        removed: dict[tuple[nn.Module, bool], set[int]] = {}
        with untouched(self.model):
            for parameter in self.model.parameters():
                parameter.requires_grad_(True)  # the dependencies are read from autograd's graph
            graph = torch_pruning.DependencyGraph().build_dependency(
                self.model, batch, forward_fn=loss_fn, verbose=False
            )
            for group in graph.get_all_groups(root_module_types=[nn.modules.conv._ConvNd]):
                members = [_Member.of(graph, item) for item in group]
                dead = _dead_channels([m for m in members if m is not None], len(group[0].idxs))
                if dead is None or None in members:
                    continue
                gone += len(dead)
                for member in members:
                    assert member is not None
                    places = [i for i, root in zip(member.places, member.roots) if root in dead]
                    removed.setdefault((member.module, member.inputs), set()).update(places)
        return self._cuts(removed), gone

    def _cuts(self, removed: dict[tuple[nn.Module, bool], set[int]]) -> dict[str, list[tuple[int, Tensor]]]:
        names = {module: name for name, module in self.model.named_modules()}
        cuts: dict[str, list[tuple[int, Tensor]]] = {}
        for (module, inputs), places in removed.items():
            if not places:
                continue
            for key, tensor in [*module._parameters.items(), *module._buffers.items()]:
                if tensor is None or tensor.dim() == 0 or (inputs and key != "weight"):
                    continue
                dim = 1 if inputs else 0
                kept = torch.tensor([i for i in range(tensor.shape[dim]) if i not in places])
                cuts.setdefault(f"{names[module]}.{key}" if names[module] else key, []).append((dim, kept))
        return cuts


class _Member:
    """A layer that shares a group of channels: on which side, and which of its places are which of the group's."""

    def __init__(self, module: nn.Module, inputs: bool, places: list[int], roots: list[int]) -> None:
        self.module, self.inputs, self.places, self.roots = module, inputs, places, roots

    @classmethod
    def of(cls, graph: Any, item: Any) -> _Member | None:
        """None for a layer of which it is not known how its channels could go."""
        module = item.dep.target.module
        if not isinstance(module, nn.Module) or isinstance(module, _MIXING):
            return None
        inputs = not graph.is_out_channel_pruning_fn(item.dep.handler)
        if isinstance(module, nn.modules.conv._ConvNd):
            if module.transposed or module.groups not in (1, module.in_channels):
                return None
            inputs = inputs and module.groups == 1  # a depthwise convolution has its channels on one side
        elif not isinstance(module, (nn.Linear, nn.modules.batchnorm._BatchNorm)):
            # Concatenations, sums and the like hold no tensors; anything else that does cannot be cut here.
            return None if any(True for _ in module.parameters()) else cls(module, False, [], [])
        elif isinstance(module, nn.modules.batchnorm._BatchNorm):
            inputs = False
        return cls(module, inputs, list(item.idxs), list(item.root_idxs))


def _dead_channels(members: list[_Member], count: int) -> set[int] | None:
    """Channels below the threshold in every convolution and linear layer that shares them; one is always left.

    None where outputs of the whole network are among the channels: its last layer makes a group that no layer reads.
    """
    largest: list[float] = [0.0] * count
    read = False
    for member in members:
        if isinstance(member.module, (nn.modules.conv._ConvNd, nn.Linear)):
            dim = 1 if member.inputs else 0
            size = member.module.weight.detach().abs().transpose(0, dim).flatten(1).amax(1).tolist()
            for place, root in zip(member.places, member.roots):
                largest[root] = max(largest[root], size[place])
            read = read or member.inputs
    if not read:
        return None
    dead = {channel for channel, value in enumerate(largest) if value < THRESHOLD}
    if len(dead) == count:
        dead.discard(max(range(count), key=lambda channel: largest[channel]))
    return dead


def _pull(weight: Tensor, *, inputs: bool) -> Tensor:
    """One over the norms of each weight's groups, added: what the lasso pulls a weight towards zero by, for its size.

    The same as by `_norm`, but that reads the weight with strides for its input channels: on a CPU that took as long as
    two fifths of ResNet18's whole step at 64 pixels, and a product with ones a tenth of that.
    """
    squares = weight.flatten(1).square()
    pull = squares.sum(1).sqrt_().clamp_min_(1e-12).reciprocal_().view(-1, *(1,) * (weight.dim() - 1))
    if not inputs:
        return pull
    columns = torch.mv(squares.t(), squares.new_ones(len(squares)))
    norms = columns.view(weight.shape[1], -1).sum(1).sqrt_().clamp_min_(1e-12)
    return pull + norms.reciprocal_().view(1, -1, *(1,) * (weight.dim() - 2))


def _norm(weight: Tensor, dim: int) -> Tensor:
    """Of each channel on one side of a convolution, in a shape that broadcasts against it."""
    others = [d for d in range(weight.dim()) if d != dim]
    norm: Tensor = torch.linalg.vector_norm(weight, dim=others, keepdim=True)
    return norm

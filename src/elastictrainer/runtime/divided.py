"""A network in two parts under the plan that stands, each run as fast as it may be.

What no trained tensor reaches (the prefix, see `cut.py`) runs without autograd, its norms folded into convolutions, in
channels_last; for images that come again at every step it runs once. In the rest, a convolution and the norm after it
are one operation where both rest, and a norm at rest is a scale and a shift. Weights, gradients of what trains and what
backward keeps are those of the plain network; results differ by rounding.

Costs, while it is in use, a folded copy of the weights of the convolutions that rest (`nbytes`), and about eight passes
of two images to divide and to see that the parts do what the whole does. Where they do not, nothing is divided.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from elastictrainer.fewshot.heads import Prototypes, Queries
from elastictrainer.runtime.apply import lifted
from elastictrainer.runtime.cut import find_cut
from elastictrainer.runtime.folding import fold, passed_on, scaled_and_shifted
from elastictrainer.runtime.lean import convolution_saving
from elastictrainer.runtime.patch import replaced
from elastictrainer.runtime.standin import StandIns, agree

__all__ = ["Divided"]

Forward = Callable[..., Tensor]


class Divided:
    """The two parts of one model for one head, for as long as the plan stands that it was made under.

        divided = Divided(model, head, few)
        with divided.rest(divided.ahead(images)):
            head.loss(model, Queries(images, labels, prototypes)).backward()

    Args:
        few: some images, with labels and prototypes, on which the division is made and tried.
    """

    def __init__(self, model: nn.Module, head: Prototypes, few: Queries) -> None:
        self.model, self.head = model, head
        with lifted(model):
            self.cut = find_cut(model, head.loss, few)
        self._shortcuts = self._of_the_rest()
        self._prefix: StandIns | None = None
        if not self.cut.obstacle and self.cut.made_from <= {0}:
            prefix = StandIns(model, self.cut, batch_size=len(few.images))
            turned = Queries(few.images.flip(0), few.labels.flip(0), few.prototypes)
            if not agree(model, prefix, head.loss, few, shuffled=turned):
                self._prefix = prefix
        if not self._holds(few):
            self._shortcuts = []

    @property
    def nbytes(self) -> int:
        """Of the folded weights."""
        modules = dict(self.model.named_modules())
        folds = [
            *(self.cut.folds if self._prefix is not None else ()),
            *(self.cut.rest_folds if self._shortcuts else ()),
        ]
        weights = (modules[convolution].get_parameter("weight") for convolution, _ in folds)
        return sum((weight.numel() + weight.shape[0]) * weight.element_size() for weight in weights)

    def ahead(self, images: Tensor) -> list[Tensor]:
        """What the prefix hands to the rest for these images; nothing if there is no prefix."""
        if self._prefix is None:
            return []
        blank = Queries(images, images.new_zeros(len(images), dtype=torch.int64), self._any_prototype(images))
        # Plain tensors: autograd keeps none that was made in inference mode. On a CPU they stay in channels_last, in
        # which what follows goes on: few small images are convolved up to five times faster, both ways.
        layout = torch.preserve_format if images.is_cpu else torch.contiguous_format
        return [x.clone(memory_format=layout) for x in self._prefix.collect(self.head.loss, blank)]

    @staticmethod
    def some(crossing: list[Tensor], first: int, count: int, *, of: int) -> list[Tensor]:
        """Of what was given for `of` images, that for `count` of them; copies, since what follows may work in place."""
        rows = [len(x) // of for x in crossing]
        return [x[first * n : (first + count) * n].clone() for x, n in zip(crossing, rows)]

    @contextmanager
    def rest(self, crossing: list[Tensor]) -> Iterator[None]:
        """Inside, a forward pass of the images that `ahead` was given takes what it gave, and works it over."""
        with replaced(self._shortcuts):
            if self._prefix is None:
                yield
                return
            with self._prefix.standing_in(crossing):
                yield

    def features(self, images: Tensor, crossing: list[Tensor]) -> Tensor:
        """Of images that `ahead` gave `crossing` for, as often as one likes."""
        with self.rest([x.clone() for x in crossing]):  # what follows may work in place
            return self.head.features(self.model, images)

    def _any_prototype(self, images: Tensor) -> Tensor:
        layer = self.model.get_submodule(self.head.head)
        return images.new_zeros(1, int(layer.in_features))  # type: ignore[arg-type]

    def _of_the_rest(self) -> list[tuple[nn.Module, Forward]]:
        modules = dict(self.model.named_modules())
        shortcuts: list[tuple[nn.Module, Forward]] = []
        for convolution, norm in self.cut.rest_folds:
            shortcuts.append((modules[convolution], _lean(modules[convolution], modules[norm])))
            shortcuts.append((modules[norm], passed_on))
        return shortcuts + [(modules[norm], scaled_and_shifted(modules[norm])) for norm in self.cut.rest_norms]

    @torch.no_grad()
    def _holds(self, few: Queries) -> bool:
        whole = self.head.loss(self.model, few)
        with self.rest(self.ahead(few.images)):
            rest = self.head.loss(self.model, few)
        return torch.allclose(whole, rest, rtol=1e-3, atol=1e-4)


def _lean(convolution: nn.Module, norm: nn.Module) -> Forward:
    """Both in one, which does not keep its input for a weight that rests."""
    folded, weight = fold(convolution, norm), convolution.get_parameter("weight")

    def forward(x: Tensor) -> Tensor:
        if not (torch.is_grad_enabled() and x.requires_grad):
            return folded(x)
        with convolution_saving(weight):
            return folded(x)

    return forward

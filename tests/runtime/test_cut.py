"""The prefix: found on any model, run alone or left out, with the very same gradients above it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from elastictrainer.runtime.cut import Cut, find_cut
from elastictrainer.runtime.folding import fold
from elastictrainer.runtime.standin import StandIns, agree

torchvision = pytest.importorskip("torchvision")
timm = pytest.importorskip("timm")

SIZE = 32


def loss_fn(model: nn.Module, batch: Any) -> Tensor:
    return cross_entropy(model(batch[0]), batch[1])


def images(count: int = 4, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 3, SIZE, SIZE, generator=generator), torch.randint(5, (count,), generator=generator)


def train_only(model: nn.Module, *wanted: str) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(wanted))


def live_statistics(model: nn.Module) -> None:
    """Running statistics that do something, so that folding them is seen."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is not None:
            module.running_mean.normal_(std=0.1)
            module.running_var.uniform_(0.5, 2.0)


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[str, ...]]] = {
    "resnet18": (
        lambda: torchvision.models.resnet18(num_classes=5),
        ("fc", "layer4.1.conv2", "layer4", "layer3.0.downsample.0", "layer1.1.conv1"),
    ),
    "mobilenet_v2": (
        lambda: torchvision.models.mobilenet_v2(num_classes=5),
        ("classifier", "features.17.conv.1", "features.10", "features.2.conv.0"),
    ),
    "densenet": (
        lambda: torchvision.models.DenseNet(8, (2, 2), 16, num_classes=5),
        ("classifier", "features.denseblock2.denselayer2.conv2", "features.denseblock2"),
    ),
    "googlenet": (
        lambda: torchvision.models.googlenet(num_classes=5, aux_logits=False, init_weights=False),
        ("fc", "inception5b.branch3.1", "inception4c"),
    ),
    "vit": (
        lambda: timm.create_model("vit_tiny_patch16_224", num_classes=5, img_size=SIZE, depth=3),
        ("head", "blocks.2.mlp.fc1", "blocks.1", "blocks.0.attn", "cls_token"),
    ),
    "swin": (
        lambda: torchvision.models.SwinTransformer([4, 4], 24, [1, 2], [2, 4], [2, 2], num_classes=5),
        ("head", "features.3.1.mlp", "features.3.0.attn.qkv", "features.2"),
    ),
}
CASES = [(name, wanted) for name, (_, depths) in MODELS.items() for wanted in depths]


@pytest.mark.parametrize(("name", "wanted"), CASES)
def test_gradients_above_the_cut_are_those_of_the_whole(name: str, wanted: str) -> None:
    """In evaluation mode, so that both sides see the same; bit for bit where no norm is folded."""
    torch.manual_seed(0)
    model = MODELS[name][0]()
    live_statistics(model)
    train_only(model, wanted, "fc.", "head.", "classifier.")
    cut = find_cut(model, loss_fn, images())
    assert cut.obstacle == ""
    stand_ins = StandIns(model, cut, batch_size=4)
    assert agree(model, stand_ins, loss_fn, images(), shuffled=tuple(t.flip(0) for t in images())) == ""
    model.eval()
    for batch in (images(4, seed=1), images(7, seed=2), images(1, seed=3)):
        whole = gradients(model, lambda batch=batch: loss_fn(model, batch))
        crossing = [value.clone() for value in stand_ins.collect(loss_fn, batch)]
        blank = (torch.full_like(batch[0], float("nan")), batch[1])
        with stand_ins.standing_in(crossing):
            rest = gradients(model, lambda blank=blank: loss_fn(model, blank))
        assert rest.keys() == whole.keys()
        for key, value in whole.items():
            if cut.folds:
                assert torch.allclose(rest[key], value, rtol=1e-3, atol=1e-4 * float(value.abs().max() + 1)), key
            else:
                assert torch.equal(rest[key], value), key


def gradients(model: nn.Module, loss: Callable[[], Tensor]) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    loss().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_the_prefix_is_as_long_as_it_can_be() -> None:
    model = torchvision.models.resnet18(num_classes=5)
    train_only(model, "fc")
    head = find_cut(model, loss_fn, images())
    assert [(c.module, c.read) for c in head.prefix][-1] == ("avgpool", "live")
    assert [c.shape for c in head.crossings] == [(4, 512, 1, 1)]
    train_only(model, "layer4")
    last = find_cut(model, loss_fn, images())
    assert {c.module for c in last.prefix} == {"conv1", "bn1", "relu", "maxpool", "layer1", "layer2", "layer3"}
    train_only(model, "layer4.1.conv2")
    inside = find_cut(model, loss_fn, images())
    assert len(inside.crossings) == 2  # the block's own path, and the one around it
    assert ("conv1", "bn1") in inside.folds


def test_nothing_changes_on_the_model() -> None:
    model = torchvision.models.resnet18(num_classes=5).train()
    train_only(model, "layer4", "fc")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    flags = [p.requires_grad for p in model.parameters()]
    modes = [m.training for m in model.modules()]
    random = torch.get_rng_state()
    cut = find_cut(model, loss_fn, images())
    stand_ins = StandIns(model, cut, batch_size=4)
    crossing = stand_ins.collect(loss_fn, images())
    with stand_ins.standing_in([value.clone() for value in crossing]), torch.no_grad():
        pass
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert flags == [p.requires_grad for p in model.parameters()]
    assert modes == [m.training for m in model.modules()]
    assert torch.equal(random, torch.get_rng_state())
    assert not any("forward" in module.__dict__ for module in model.modules())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


class Twice(nn.Module):
    """One frozen module called twice: on the input, and on what trains."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.between, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.shared(torch.tanh(self.between(torch.tanh(self.shared(x))))))


def vectors(count: int = 4) -> tuple[Tensor, Tensor]:
    return torch.randn(count, 6, generator=torch.Generator().manual_seed(count)), torch.arange(count) % 5


def test_only_the_call_that_is_constant_is_left_out() -> None:
    torch.manual_seed(0)
    model = Twice()
    train_only(model, "between", "head")
    cut = find_cut(model, loss_fn, vectors())
    assert [(c.module, c.number) for c in cut.prefix] == [("shared", 0)]
    stand_ins = StandIns(model, cut, batch_size=4)
    whole = gradients(model, lambda: loss_fn(model, vectors()))
    crossing = [value.clone() for value in stand_ins.collect(loss_fn, vectors())]
    with stand_ins.standing_in(crossing):
        rest = gradients(model, lambda: loss_fn(model, (torch.zeros(4, 6), vectors()[1])))
    assert all(torch.equal(rest[name], value) for name, value in whole.items())


class Obstinate(nn.Module):
    def __init__(self, forward: Callable[..., Tensor]) -> None:
        super().__init__()
        self.below, self.head, self.does = nn.Linear(6, 6), nn.Linear(6, 5), forward

    def forward(self, x: Tensor) -> Tensor:
        return self.does(self, x)


def random_inside(self: Any, x: Tensor) -> Tensor:
    return self.head(self.below(x) + torch.rand(1))


def test_a_model_that_draws_random_numbers_is_left_whole() -> None:
    model = Obstinate(random_inside)
    train_only(model, "head")
    assert "draws random numbers" in find_cut(model, loss_fn, vectors()).obstacle


def test_a_row_that_depends_on_its_batch_is_found_out() -> None:
    class Centred(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x - x[0]

    model = nn.Sequential(nn.Linear(6, 6), Centred(), nn.Linear(6, 5))
    train_only(model, "2")
    cut = find_cut(model, loss_fn, vectors())
    shuffled = tuple(t.flip(0) for t in vectors())
    assert "samples beside it" in agree(
        model, StandIns(model, cut, batch_size=4), loss_fn, vectors(), shuffled=shuffled
    )


def test_a_value_that_leaves_by_a_side_door_is_an_obstacle() -> None:
    class Leaky(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 6)
            self.seen: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            self.seen = torch.tanh(x)
            return self.layer(x)

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.below, self.head = Leaky(), nn.Linear(6, 5)

        def forward(self, x: Tensor) -> Tensor:
            out = self.below(x)
            assert self.below.seen is not None
            return self.head(out + self.below.seen)

    model = Whole()
    train_only(model, "head")
    assert "another way than returning it" in find_cut(model, loss_fn, vectors()).obstacle


def test_a_number_that_the_host_reads_keeps_what_it_was_read_from() -> None:
    def branch(self: Any, x: Tensor) -> Tensor:
        low = self.below(x)
        return self.head(low if low.sum().item() > 0 else -low)

    model = Obstinate(branch)
    train_only(model, "head")
    cut = find_cut(model, loss_fn, vectors())
    assert [c.read for c in cut.prefix] == ["live"]


def test_everything_trained_leaves_nothing_to_keep() -> None:
    model = torchvision.models.resnet18(num_classes=5)
    assert find_cut(model, loss_fn, images()) == Cut(obstacle="a trained tensor reaches every module")


@given(
    st.sampled_from([(nn.Conv1d, nn.BatchNorm1d), (nn.Conv2d, nn.BatchNorm2d), (nn.Conv3d, nn.BatchNorm3d)]),
    st.booleans(),
    st.booleans(),
    st.sampled_from(["zeros", "reflect"]),
    st.sampled_from([1, 2]),
)
def test_a_folded_norm_is_the_norm(kinds: Any, bias: bool, affine: bool, padding: str, groups: int) -> None:
    convolution = kinds[0](4, 6, 3, padding=1, bias=bias, padding_mode=padding, groups=groups).double()
    norm = kinds[1](6, affine=affine).double().eval()
    norm.running_mean.normal_()
    norm.running_var.uniform_(0.1, 3.0)
    if affine:
        norm.weight.data.normal_()
        norm.bias.data.normal_()
    dims = {nn.Conv1d: 1, nn.Conv2d: 2, nn.Conv3d: 3}[kinds[0]]
    x = torch.randn(2, 4, *[5] * dims, dtype=torch.float64)
    assert torch.allclose(fold(convolution, norm)(x), norm(convolution(x)), rtol=1e-9, atol=1e-9)

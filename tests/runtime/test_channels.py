"""Layers that train in some output channels: right gradients, nothing else kept, nothing else moved."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from tests.runtime.test_apply_lean import Padded, flags_only
from torch import Tensor, nn
from torch.nn import functional as F

from elastictrainer.errors import ConfigError
from elastictrainer.importance import gradient
from elastictrainer.metrics.held import held_bytes
from elastictrainer.runtime.apply import apply
from elastictrainer.runtime.optimizers import OPTIMIZERS, make_optimizer


@dataclass
class Part:
    """The least that a plan with channels is."""

    channels: dict[str, tuple[int, ...]]
    whole: tuple[str, ...] = ()
    trainable: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.trainable = (*self.channels, *self.whole)


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "conv1d": (lambda: nn.Conv1d(4, 6, 3, padding=1), (2, 4, 11)),
    "conv2d": (lambda: nn.Conv2d(4, 6, 3, stride=2, padding=1), (2, 4, 9, 9)),
    "conv2d_1x1": (lambda: nn.Conv2d(4, 6, 1, bias=False), (2, 4, 9, 9)),
    "conv3d": (lambda: nn.Conv3d(2, 6, 3), (2, 2, 5, 5, 5)),
    "grouped": (lambda: nn.Conv2d(4, 6, 3, groups=2), (2, 4, 9, 9)),
    "grouped_thirds": (lambda: nn.Conv2d(6, 6, 3, groups=3), (2, 6, 9, 9)),
    "depthwise": (lambda: nn.Conv2d(6, 6, 3, groups=6, padding=1), (2, 6, 9, 9)),
    "depthwise_twofold": (lambda: nn.Conv2d(3, 6, 3, groups=3, padding=1), (2, 3, 9, 9)),
    "dilated": (lambda: nn.Conv2d(4, 6, 3, dilation=2), (2, 4, 9, 9)),
    "same_uneven": (lambda: nn.Conv2d(4, 6, 4, padding="same"), (2, 4, 9, 9)),
    "valid": (lambda: nn.Conv2d(4, 6, (3, 1), padding="valid"), (2, 4, 9, 9)),
    "reflect": (lambda: nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect"), (2, 4, 9, 9)),
    "unbatched": (lambda: nn.Conv2d(4, 6, 3), (4, 9, 9)),
    "subclass": (lambda: Padded(4, 6, 3), (2, 4, 9, 9)),
    "linear": (lambda: nn.Linear(5, 6), (4, 5)),
    "tokens": (lambda: nn.Linear(5, 6, bias=False), (2, 3, 5)),
    "vector": (lambda: nn.Linear(5, 6), (5,)),
}
CHOICES = [(1, 4), (0,), (2, 3, 5)]


def build(name: str) -> tuple[nn.Module, Tensor]:
    make, shape = LAYERS[name]
    torch.manual_seed(0)
    return make(), torch.randn(shape)


def part_of(layer: nn.Module, rows: tuple[int, ...]) -> Part:
    return Part(dict.fromkeys([name for name, _ in layer.named_parameters()], rows))


def backward(layer: nn.Module, x: Tensor, *, autocast: bool = False) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    x = x.detach().clone().requires_grad_()
    layer.zero_grad(set_to_none=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = layer(x)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y))
    assert x.grad is not None
    return y.detach(), x.grad, {n: p.grad for n, p in layer.named_parameters() if p.grad is not None}


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("setting", ["plain", "channels_last", "autocast"])
@pytest.mark.parametrize("name", LAYERS)
def test_gradients_are_the_dense_ones_on_the_chosen_channels(name: str, setting: str) -> None:
    layer, x = build(name)
    if setting == "channels_last":
        if x.dim() != 4:
            pytest.skip("channels_last is for images")
        layer, x = layer.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
    y, to_x, dense = backward(copy.deepcopy(layer), x, autocast=setting == "autocast")
    close = {"atol": 0.1, "rtol": 0.05} if setting == "autocast" else {}
    for rows in CHOICES:
        with apply(layer, part_of(layer, rows)):
            found_y, found_to_x, found = backward(layer, x, autocast=setting == "autocast")
        torch.testing.assert_close(found_y, y, **close)
        torch.testing.assert_close(found_to_x, to_x, **close)
        assert found.keys() == dense.keys()
        for key, grad in found.items():
            assert grad.dtype == dense[key].dtype
            torch.testing.assert_close(grad, dense[key][list(rows)], **close)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("name", LAYERS)
def test_gradients_are_finite_differences(name: str) -> None:
    layer, x = build(name)
    layer, x = layer.double(), x.double().requires_grad_()
    rows = (1, 4)
    with apply(layer, part_of(layer, rows)):
        tensors = tuple(layer.parameters())
        assert all(len(t) == len(rows) for t in tensors)
        assert torch.autograd.gradcheck(lambda x, *_: layer(x), (x, *tensors))


@pytest.mark.parametrize("which", ["weight", "bias"])
def test_one_of_weight_and_bias_may_train_in_part_and_the_other_whole_or_not(which: str) -> None:
    other = "bias" if which == "weight" else "weight"
    for name in ("conv2d", "depthwise", "linear"):
        layer, x = build(name)
        _, to_x, dense = backward(copy.deepcopy(layer), x)
        for whole in ((), (other,)):
            with apply(layer, Part({which: (1, 2)}, whole)):
                _, found_to_x, found = backward(layer, x)
            torch.testing.assert_close(found_to_x, to_x)
            assert set(found) == {which, *whole}
            torch.testing.assert_close(found[which], dense[which][[1, 2]])
            for n in whole:
                torch.testing.assert_close(found[n], dense[n])


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU6(inplace=True),
        nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 12, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 5),
    )  # fmt: skip


PLAN = Part({"3.weight": (0, 5), "6.weight": (1, 2, 11), "6.bias": (1, 2, 11), "9.weight": (4,)}, whole=("9.bias",))


def loss_of(model: nn.Module) -> Tensor:
    x = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(3))
    return F.cross_entropy(model(x), torch.arange(4) % 5)


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> None:
    for _ in range(count):
        loss_of(model).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


MORE: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    **{n: lambda p, n=n: make_optimizer(n, p, lr=0.05, weight_decay=0.1) for n in OPTIMIZERS},  # type: ignore[misc]
    "sgd_coupled": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.1, nesterov=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, weight_decay=0.1, momentum=0.5, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01, weight_decay=0.1),
    "adam_fused": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1, fused=True),
    "sgd_fused": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, weight_decay=0.1, fused=True),
}


@pytest.mark.parametrize("warm", [False, True], ids=["fresh", "with_momentum"])
@pytest.mark.parametrize("preset", MORE)
def test_untouched_channels_are_bit_identical_and_so_is_their_state(preset: str, warm: bool) -> None:
    model = network()
    optimizer = MORE[preset](model.parameters())
    if warm:  # everything has momentum and would drift by it
        steps(model, optimizer, 2)
    weights = copy.deepcopy(model.state_dict())
    state = copy.deepcopy(optimizer.state_dict()["state"])
    groups = [[id(p) for p in group["params"]] for group in optimizer.param_groups]
    with apply(model, PLAN, optimizer=optimizer):
        steps(model, optimizer, 3)
    assert groups == [[id(p) for p in group["params"]] for group in optimizer.param_groups]
    after = optimizer.state_dict()["state"]
    for index, (name, param) in enumerate(model.named_parameters()):
        moved = list(PLAN.channels.get(name, range(len(param)) if name in PLAN.whole else ()))
        still = [row for row in range(len(param)) if row not in moved]
        assert torch.equal(param[still], weights[name][still])
        assert all(not torch.equal(param[row], weights[name][row]) for row in moved)
        for key, before in state.get(index, {}).items():
            if before.dim():
                assert torch.equal(after[index][key][still], before[still])


def test_a_step_is_the_dense_step_on_the_chosen_channels() -> None:
    """Elementwise optimizers cannot tell k rows from the whole tensor."""
    for preset in ("sgd", "adamw"):
        model = network()
        optimizer = MORE[preset](model.parameters())
        oracle = flags_only(model, list(PLAN.trainable))
        dense = MORE[preset](oracle.parameters())
        loss_of(oracle).backward()
        dense.step()
        with apply(model, PLAN, optimizer=optimizer):
            loss_of(model).backward()
            optimizer.step()
        for name, rows in PLAN.channels.items():
            torch.testing.assert_close(model.get_parameter(name)[list(rows)], oracle.get_parameter(name)[list(rows)])


def test_plans_change_while_a_loss_is_held() -> None:
    model = network()
    optimizer = make_optimizer("sgd", model.parameters(), lr=0.05)
    with apply(model, PLAN, optimizer=optimizer) as applied:
        held = loss_of(model)  # keeps the graph, and in it what knows the parameter's shape
        held.backward()
        optimizer.step()
        for rows in ((3,), (0, 1, 2), tuple(range(12))):
            applied.update(Part({"6.weight": rows}))
            oracle = flags_only(model, ["6.weight"])
            held = loss_of(model)
            held.backward()
            found = model[6].weight.grad.clone()
            optimizer.step()
            optimizer.zero_grad()
            expected = dense_gradient(oracle, "6.weight")
            torch.testing.assert_close(found, expected[list(rows)])
    assert {tuple(p.shape) for p in model[6].parameters()} == {(12, 8, 1, 1), (12,)}
    held = loss_of(model)
    held.backward()


def dense_gradient(model: nn.Module, name: str) -> Tensor:
    """Of a copy that may itself stand under a plan: its weights, in a plain network."""
    plain = network()
    plain.load_state_dict(model.state_dict())
    plain = flags_only(plain, [name])
    loss_of(plain).backward()
    grad = plain.get_parameter(name).grad
    assert grad is not None
    return grad


def test_nothing_is_kept_for_layers_at_rest_and_only_what_is_needed_for_others() -> None:
    model = network()
    x = torch.randn(2, 3, 16, 16)
    area, small = 2 * 16 * 16 * 4, 2048

    def held(plan: Part) -> int:
        with apply(model, plan):
            return held_bytes(lambda: model(x).sum(), model)

    assert held(Part({"9.weight": (0,)})) <= small  # the pooled features
    assert area * 8 <= held(Part({"6.weight": (0,)})) <= area * 8 + small  # its input; the pooling keeps a shape
    # Two channels of the depthwise layer's input, and a bit for each element of the ReLU above it.
    needed = area * 2 + area * 8 // 32
    assert needed <= held(Part({"3.weight": (0, 5)})) <= needed + small


def test_checkpoints_are_whole_whatever_stands() -> None:
    model = network()
    optimizer = make_optimizer("adamw", model.parameters(), lr=0.05, weight_decay=0.1)
    steps(model, optimizer, 1)
    shapes = {name: t.shape for name, t in model.state_dict().items()}
    with apply(model, PLAN, optimizer=optimizer):
        steps(model, optimizer, 2)
        weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
        steps(model, optimizer, 2)
        expected = copy.deepcopy(model.state_dict())
    assert {name: t.shape for name, t in weights.items()} == shapes
    assert network().load_state_dict(weights)
    for load_first in (True, False):
        again = network()
        other = make_optimizer("adamw", again.parameters(), lr=0.05, weight_decay=0.1)
        if load_first:
            again.load_state_dict(weights)
            other.load_state_dict(copy.deepcopy(state))
        with apply(again, PLAN, optimizer=other):
            if not load_first:
                steps(again, other, 1)
                again.load_state_dict(weights)
                other.load_state_dict(copy.deepcopy(state))
            steps(again, other, 2)
        for name, tensor in again.state_dict().items():
            assert torch.equal(tensor, expected[name])


def test_copies_and_moves_go_on_training() -> None:
    model = network()
    with apply(model, PLAN):
        twin = copy.deepcopy(model).double()
        x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
        twin(x).sum().backward()
        assert twin[6].weight.grad.shape == (3, 8, 1, 1)
        assert twin.state_dict()["6.weight"].shape == (12, 8, 1, 1)


def test_a_probe_sees_whole_tensors_and_leaves_the_plan_standing() -> None:
    model = network().eval()
    optimizer = make_optimizer("sgd", model.parameters(), lr=0.05)
    score = lambda m, o: gradient(m, o, lambda model, _: loss_of(model), [0])  # noqa: E731
    expected = score(model, optimizer)
    with apply(model, PLAN, optimizer=optimizer):
        loss_of(model).backward()
        before = model[6].weight.grad.clone()
        assert score(model, optimizer) == pytest.approx(expected)
        assert torch.equal(model[6].weight.grad, before)
        assert model[6].weight.shape[0] == 3
        optimizer.step()


def test_evaluation_uses_the_rows_as_they_are_now() -> None:
    model = network()
    optimizer = make_optimizer("sgd", model.parameters(), lr=0.5)
    with apply(model, PLAN, optimizer=optimizer):
        steps(model, optimizer, 1)
        with torch.no_grad():
            inside = loss_of(model)
    model.eval()
    assert torch.equal(loss_of(model), inside)


def test_what_cannot_train_in_part_is_refused() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ConvTranspose2d(4, 4, 3))
    for channels, message in (
        ({"1.weight": (0,)}, "cannot train in part"),
        ({"2.weight": (0,)}, "cannot train in part"),
        ({"0.weight": (4,)}, "channels 0 to 3"),
        ({"0.weight": (1, 1)}, "channels 0 to 3"),
        ({"0.weight": ()}, "channels 0 to 3"),
    ):
        with pytest.raises(ConfigError, match=message):
            apply(model, Part(channels))
        assert all(p.requires_grad for p in model.parameters())
    tied = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    tied[1].weight = tied[0].weight
    with pytest.raises(ConfigError, match="belongs to 2 layers"):
        apply(tied, Part({"0.weight": (0,)}))
    model[0].forward = lambda x: x  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match="replaced by other code"):
        apply(model, Part({"0.weight": (0,)}))


def test_timm_and_torchvision_networks() -> None:
    models = pytest.importorskip("torchvision.models")
    torch.manual_seed(0)
    model = models.mobilenet_v2(num_classes=4).eval()
    names = [n for n, m in model.named_modules() if isinstance(m, nn.Conv2d)][-6:]
    plan = Part({f"{n}.weight": (0, 2, 5) for n in names})
    x, y = torch.randn(2, 3, 64, 64), torch.tensor([0, 1])
    oracle = flags_only(model, list(plan.trainable))
    F.cross_entropy(oracle(x), y).backward()
    with apply(model, plan):
        F.cross_entropy(model(x), y).backward()
        for name, rows in plan.channels.items():
            dense = oracle.get_parameter(name).grad[list(rows)]
            torch.testing.assert_close(model.get_parameter(name).grad, dense, atol=1e-6, rtol=1e-4)

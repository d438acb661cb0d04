"""Layers at rest keep no input that nobody needs, and every gradient stays bit-equal to plain PyTorch's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from elastictrainer.metrics.held import held_bytes
from elastictrainer.runtime import lean
from elastictrainer.runtime.apply import apply


@pytest.fixture(autouse=True)
def _small_inputs_count(monkeypatch):
    """On a GPU small inputs are left alone; here all are small."""
    monkeypatch.setattr(lean, "_worth_bytes", lambda device: 0)


DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.fixture(autouse=True)
def blanks(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Fill every stand-in for an input with NaN, so that a kernel which reads one cannot go unseen; and count them."""
    made: list[Tensor] = []
    real = lean._blank

    def poisoned(*geometry: Any) -> Tensor:
        made.append(real(*geometry).fill_(float("nan")))
        return made[-1]

    monkeypatch.setattr(lean, "_blank", poisoned)
    return made


class Swish(nn.BatchNorm2d):
    """As timm's BatchNormAct2d: a batch norm that also saves things of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(super().forward(x)) * x.sigmoid()


class Padded(nn.Conv2d):
    """As timm's Conv2dSame: a convolution that does more than convolve."""

    def forward(self, input: Tensor) -> Tensor:
        return F.conv2d(F.pad(input * input, (0, 1, 0, 1)), self.weight, self.bias, self.stride)


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "conv1d": (lambda: nn.Conv1d(4, 6, 3, padding=1), (2, 4, 11)),
    "conv2d": (lambda: nn.Conv2d(4, 6, 3, stride=2, padding=1), (2, 4, 9, 9)),
    "conv2d_1x1": (lambda: nn.Conv2d(4, 6, 1, bias=False), (2, 4, 9, 9)),
    "conv3d": (lambda: nn.Conv3d(2, 3, 3), (2, 2, 5, 5, 5)),
    "grouped": (lambda: nn.Conv2d(4, 6, 3, groups=2), (2, 4, 9, 9)),
    "depthwise": (lambda: nn.Conv2d(4, 4, 3, groups=4, padding=1), (2, 4, 9, 9)),
    "dilated": (lambda: nn.Conv2d(4, 6, 3, dilation=2), (2, 4, 9, 9)),
    "same_uneven": (lambda: nn.Conv2d(4, 6, 4, padding="same"), (2, 4, 9, 9)),
    "reflect": (lambda: nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect"), (2, 4, 9, 9)),
    "unbatched": (lambda: nn.Conv2d(4, 6, 3), (4, 9, 9)),
    "transposed1d": (lambda: nn.ConvTranspose1d(4, 6, 3), (2, 4, 11)),
    "transposed2d": (lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, output_padding=1), (2, 4, 9, 9)),
    "transposed3d": (lambda: nn.ConvTranspose3d(2, 3, 3), (2, 2, 5, 5, 5)),
    "subclass": (lambda: Padded(4, 6, 3), (2, 4, 9, 9)),
    "parametrized": (lambda: nn.utils.parametrizations.weight_norm(nn.Conv2d(4, 6, 3)), (2, 4, 9, 9)),
    "batchnorm1d": (lambda: nn.BatchNorm1d(4), (5, 4)),
    "batchnorm1d_long": (lambda: nn.BatchNorm1d(4), (5, 4, 7)),
    "batchnorm2d": (lambda: nn.BatchNorm2d(4), (2, 4, 9, 9)),
    "batchnorm2d_plain": (lambda: nn.BatchNorm2d(4, affine=False), (2, 4, 9, 9)),
    "batchnorm3d": (lambda: nn.BatchNorm3d(2), (2, 2, 5, 5, 5)),
    "syncbatchnorm": (lambda: nn.SyncBatchNorm(4), (2, 4, 9, 9)),
    "norm_subclass": (lambda: Swish(4), (2, 4, 9, 9)),
}


def build(name: str) -> tuple[nn.Module, Tensor]:
    make, shape = LAYERS[name]
    torch.manual_seed(0)
    layer = make()
    for buffer in layer.buffers():
        if buffer.is_floating_point():
            buffer.uniform_(0.5, 2.0)
    for param in layer.parameters():
        param.data.uniform_(0.5, 2.0)
    return layer, torch.randn(shape)


def gradients(layer: nn.Module, x: Tensor, autocast: bool) -> list[Tensor]:
    x = x.detach().clone().requires_grad_()
    layer.zero_grad(set_to_none=True)
    with torch.autocast(x.device.type, torch.bfloat16, enabled=autocast):
        y = layer(x)
    seed = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y)
    y.backward(seed)
    assert x.grad is not None
    return [y.detach(), x.grad, *(p.grad for p in layer.parameters() if p.grad is not None)]


def flags_only(layer: nn.Module, trainable: list[str]) -> nn.Module:
    """Plain PyTorch with the same flags and the same statistics: the oracle."""
    oracle = copy.deepcopy(layer)
    for name, param in oracle.named_parameters():
        param.requires_grad_(name in trainable)
    for module in oracle.modules():
        if hasattr(module, "running_mean"):
            module.eval()
    return oracle


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("setting", ["plain", "channels_last", "autocast", "double"])
@pytest.mark.parametrize("name", LAYERS)
def test_trap_7_gradients_are_bit_equal_with_the_input_gone(
    name: str, setting: str, device: str, blanks: list[Tensor]
) -> None:
    layer, x = build(name)
    layer, x = layer.to(device), x.to(device)
    if setting == "channels_last":
        if x.dim() != 4:
            pytest.skip("channels_last is for images")
        layer, x = layer.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
    elif setting == "double":
        layer, x = layer.double(), x.double()
    biases = [n for n, _ in layer.named_parameters() if n == "bias"]
    for trainable in ([], biases):
        with torch.backends.cudnn.flags(enabled=True, deterministic=True, benchmark=False):
            expected = gradients(flags_only(layer, trainable), x, setting == "autocast")
            blanks.clear()
            with apply(layer, trainable):
                found = gradients(layer, x, setting == "autocast")
        assert len(blanks) == 1  # backward did without the input
        assert len(found) == len(expected) == 2 + len(trainable)
        for a, b in zip(found, expected):
            assert a.dtype == b.dtype
            assert a.stride() == b.stride()
            if name == "reflect" and device == "cuda":
                torch.testing.assert_close(a, b)  # the padding's own backward adds up in any order there
            else:
                assert torch.equal(a, b)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_whose_weight_trains_is_untouched(name: str, blanks: list[Tensor]) -> None:
    layer, x = build(name)
    everything = [n for n, _ in layer.named_parameters()]
    if not everything:
        pytest.skip("nothing to train")
    expected = gradients(flags_only(layer, everything), x, autocast=False)
    with apply(layer, everything):
        found = gradients(layer, x, autocast=False)
    assert not blanks
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_second_derivatives_are_right() -> None:
    for name in ("conv2d", "transposed2d", "depthwise", "batchnorm2d"):
        layer, x = build(name)

        def penalty(layer: nn.Module, x: Tensor = x) -> Tensor:
            z = x.clone().requires_grad_()
            (first,) = torch.autograd.grad(layer(z.tanh()).pow(3).sum(), z, create_graph=True)
            (second,) = torch.autograd.grad(first.square().sum(), z)
            return second

        expected = penalty(flags_only(layer, []))
        with apply(layer, []):
            assert torch.equal(penalty(layer), expected)


def test_batch_statistics_need_their_input(blanks: list[Tensor]) -> None:
    layer, x = build("batchnorm2d")
    oracle = copy.deepcopy(layer)
    oracle.requires_grad_(False)
    expected = gradients(oracle, x, autocast=False)
    with apply(layer, [], bn="track"):
        assert torch.equal(gradients(layer, x, autocast=False)[1], expected[1])
    assert not blanks


def test_compiled_and_functional_code_is_left_alone(blanks: list[Tensor]) -> None:
    layer, x = build("conv2d")
    with apply(layer, []):
        grad = torch.func.grad(lambda z: layer(z).square().sum())(x)
        assert not blanks
        compiled = torch.compile(layer, backend="aot_eager")
        found = gradients(compiled, x, autocast=False)
        assert not blanks
    z = x.clone().requires_grad_()
    layer(z).square().sum().backward()
    torch.testing.assert_close(grad, z.grad)
    torch.testing.assert_close(found[0], layer(x))


def test_nothing_below_the_deepest_trained_tensor_is_recorded() -> None:
    model = chain()
    recorded: list[Tensor] = []
    with apply(model, ["8.weight"]), torch.autograd.graph.saved_tensors_hooks(recorded.append, lambda t: t):
        x = torch.randn(2, 3, 16, 16)
        for module in model[:8]:
            x = module(x)
            assert x.grad_fn is None
        assert not recorded
        assert model[8](x).grad_fn is not None
        assert recorded


@pytest.mark.parametrize("shape", [(5, 4), (2, 5, 4)])
@pytest.mark.parametrize("bias", [True, False])
def test_a_resting_linear_layer_saves_no_input(shape: tuple[int, ...], bias: bool) -> None:
    """PyTorch itself does this right: held here, so that the day it does not is known."""
    layer = nn.Linear(4, 6, bias=bias)
    saved: list[Tensor] = []
    with apply(layer, []), torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t), lambda t: t):
        layer(torch.randn(shape, requires_grad=True))
    assert [t.numel() for t in saved] == [layer.weight.numel()]


def chain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 1),
        nn.BatchNorm2d(8),
        nn.Conv2d(8, 8, 1),
    )


def test_trap_7_bytes_held_are_those_that_are_needed() -> None:
    model = chain()
    x = torch.randn(2, 3, 16, 16)
    activation = 2 * 8 * 16 * 16 * 4

    def forward() -> Tensor:
        return model(x).sum()

    with apply(model, ["0.bias"]):
        by_plan = held_bytes(forward, model)
    oracle = flags_only(model, ["0.bias"])
    by_flags = held_bytes(lambda: oracle(x).sum(), oracle)
    small = 4 * 1024  # the loss, vectors of statistics
    # What is needed: the two ReLUs' outputs, as their masks. What flags alone also keep: the inputs of the three batch
    # norms (the outputs of convolutions) and of the last convolution (the output of a batch norm).
    assert 2 * activation <= by_plan <= 2 * activation + small
    assert by_flags >= 6 * activation


@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v2"])
def test_trap_7_real_networks_hold_less_than_under_plain_flags(name: str) -> None:
    models = pytest.importorskip("torchvision.models")
    torch.manual_seed(0)
    model = getattr(models, name)(num_classes=3)
    x = torch.randn(2, 3, 64, 64)
    names = [n for n, _ in model.named_parameters()]
    plan = [*names[len(names) // 3 : len(names) // 3 + 3], *names[-2:]]
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    oracle = flags_only(model, plan)
    with apply(model, plan):
        by_plan = held_bytes(lambda: model(x).sum(), model)
        model(x).sum().backward()
    by_flags = held_bytes(lambda: oracle(x).sum(), oracle)
    assert by_plan < 0.7 * by_flags
    oracle(x).sum().backward()
    for n in plan:
        assert torch.equal(model.get_parameter(n).grad, oracle.get_parameter(n).grad)


def test_timm_networks_with_fused_norm_and_activation(blanks: list[Tensor]) -> None:
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    model = timm.create_model("tf_mobilenetv3_small_minimal_100", num_classes=3)
    x = torch.randn(2, 3, 64, 64)
    oracle = flags_only(model, ["conv_stem.weight"])
    oracle(x).sum().backward()
    by_flags = held_bytes(lambda: oracle(x).sum(), oracle)
    with apply(model, ["conv_stem.weight"]):
        model(x).sum().backward()
        assert held_bytes(lambda: model(x).sum(), model) < 0.7 * by_flags
    assert torch.equal(model.conv_stem.weight.grad, oracle.conv_stem.weight.grad)
    convolutions = sum(isinstance(m, nn.Conv2d) for m in model.modules())
    assert len(blanks) > convolutions  # norms too


def test_inside_checkpointing_and_other_peoples_hooks() -> None:
    model = chain()
    x = torch.randn(2, 3, 16, 16)
    oracle = flags_only(model, ["0.weight", "4.bias"])
    oracle(x).square().sum().backward()
    held: list[Tensor] = []
    with apply(model, ["0.weight", "4.bias"]):
        h = checkpoint(model[:4], x, use_reentrant=False)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: (held.append(t), t)[1], lambda t: t):
            checkpoint(model[4:], h, use_reentrant=False).square().sum().backward()
        grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert set(grads) == {"0.weight", "4.bias"}
    for name, grad in grads.items():
        assert torch.equal(grad, oracle.get_parameter(name).grad)


def test_a_replaced_forward_is_left_alone() -> None:
    layer, x = build("conv2d")
    layer.forward = lambda z: z  # type: ignore[method-assign]
    with apply(layer, []):
        assert layer(x) is x
    assert layer(x) is x


def test_an_input_as_large_as_the_weight_is_not_taken_for_it() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 3, padding=1, groups=8))
    x = torch.randn(1, 3, 3, 3)  # the depthwise layer is given as many numbers as its weight has
    with apply(model, ["0.bias", "1.bias"]):
        assert held_bytes(lambda: model(x).sum(), model) <= 64
        model(x).sum().backward()
    plain = copy.deepcopy(model)
    plain.zero_grad()
    plain(x).sum().backward()
    assert torch.equal(model[0].bias.grad, plain[0].bias.grad)


class Transposed(nn.LayerNorm):
    """Over the channels of an image, as ConvNeXt's: a subclass that calls the function itself."""

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x.permute(0, 2, 3, 1), self.normalized_shape, self.weight, self.bias, self.eps)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", [nn.LayerNorm, Transposed])
def test_a_layer_norm_whose_bias_alone_trains(
    kind: type[nn.LayerNorm], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = kind(8, eps=0.01).to(device)
    nn.init.normal_(layer.weight)
    rows = (1 << 16) + 3 if device == "cuda" else 32
    x = torch.randn(rows, 8, 1, 1, device=device) if kind is Transposed else torch.randn(rows, 8, device=device)
    x.requires_grad_()
    asked: list[bool] = []
    if device == "cpu":  # as if it were a GPU with many rows

        def many(x: Tensor, weight: Any, bias: Any) -> bool:
            asked.append(not weight.requires_grad and bias.requires_grad)
            return asked[-1]

        monkeypatch.setattr(lean, "_fails_in_backward", many)
    want = torch.autograd.grad(layer(x).square().sum(), [x, layer.bias])
    with apply(layer, ["bias"]):
        out = layer(x)
        got = torch.autograd.grad(out.square().sum(), [x, layer.bias])
        assert out.grad_fn.name() == "AddBackward0"
    for a, b in zip(got, want):
        torch.testing.assert_close(a, b)
    if device == "cpu":
        assert any(asked)

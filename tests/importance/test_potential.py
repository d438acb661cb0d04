"""Fisher potential against the formula, sample by sample, and against an identity that needs no activation at all."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from elastictrainer.errors import ConfigError, ModelError, TrainingError
from elastictrainer.importance.potential import channel_norms, fisher_potential
from elastictrainer.runtime.apply import apply


class Tokens(nn.Module):
    """A little transformer: linear layers on sequences, and one that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 6, 4, stride=4)
        self.mix, self.norm, self.head = nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patch(x).flatten(2).transpose(1, 2)
        tokens = self.norm(tokens + F.gelu(self.mix(tokens)))
        return self.head(self.mix(tokens).mean(1))


class Windows(nn.Module):
    """Runs a layer on a batch of windows, as Swin does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(3, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        windows = x.unfold(2, 4, 4).unfold(3, 4, 4).permute(0, 2, 3, 4, 5, 1).reshape(-1, 16, 3)
        return self.head(self.inner(windows).tanh().reshape(len(x), -1, 4).mean(1))


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True),
        nn.Conv2d(8, 8, 3, groups=8, bias=False), nn.ReLU6(inplace=True), nn.Conv2d(8, 8, 3, groups=4),
        nn.Dropout(0.5), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3),
    )  # fmt: skip


MODELS: dict[str, Callable[[], nn.Module]] = {"convolutions": convolutions, "tokens": Tokens, "windows": Windows}


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def made(name: str) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    model = MODELS[name]()
    return model, (torch.randn(6, 3, 12, 12), torch.arange(6) % 3)


def naive(model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    """The formula, one sample at a time: every output held by hand, its gradient asked of autograd."""
    model.eval()
    sums: dict[str, Tensor] = {}
    for n in range(len(batch[1])):
        outs: dict[str, list[tuple[Tensor, Tensor]]] = {}

        def keep(name: str, outs: dict[str, list[tuple[Tensor, Tensor]]] = outs) -> Callable[..., Tensor]:
            def hook(module: nn.Module, args: object, out: Tensor) -> Tensor:
                live = out + 0
                outs.setdefault(name, []).append((out.detach().clone(), live))
                return live.clone()

            return hook

        handles = [
            m.register_forward_hook(keep(f"{name}.weight"))
            for name, m in model.named_modules()
            if isinstance(m, (nn.Conv2d, nn.Linear))
        ]
        loss = loss_fn(model, (batch[0][n : n + 1], batch[1][n : n + 1]))
        for handle in handles:
            handle.remove()
        for name, pairs in outs.items():
            inner: Tensor | float = 0.0
            for a, live in pairs:
                (g,) = torch.autograd.grad(loss, live, retain_graph=True)
                last = isinstance(model.get_submodule(name.removesuffix(".weight")), nn.Linear)
                product = (a * g).movedim(-1, 1) if last else a * g
                inner = inner + product.flatten(2).sum(2).sum(0) if product.dim() > 2 else inner + product.sum(0)
            assert isinstance(inner, Tensor)
            sums[name] = sums.get(name, torch.zeros_like(inner)) + inner.square()
    return {name: total / (2 * len(batch[1])) for name, total in sums.items()}


@pytest.mark.parametrize("name", MODELS)
def test_it_is_the_formula(name: str) -> None:
    model, batch = made(name)
    found = fisher_potential(model, loss_fn, [batch])
    expected = naive(model, batch)
    assert found.keys() == expected.keys()
    for weight, values in expected.items():
        torch.testing.assert_close(torch.tensor(found[weight]), values, rtol=1e-4, atol=1e-9)
        assert values.max() > 0


@pytest.mark.parametrize("name", MODELS)
def test_some_layers_are_measured_as_among_all_and_what_comes_before_keeps_nothing(name: str) -> None:
    model, batch = made(name)
    every = fisher_potential(model, loss_fn, [batch])
    last = next(iter(every))  # backward comes by it first
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        alone = fisher_potential(model, loss_fn, [batch], layers=[last])
    assert alone.keys() == {last}
    torch.testing.assert_close(torch.tensor(alone[last]), torch.tensor(every[last]))
    # Its output, for the product, what the loss keeps, and weights to pass a gradient through.
    assert all(tensor.numel() <= 3 * max(len(batch[1]), 8) for tensor in kept)
    with pytest.raises(ConfigError, match=r"'no.weight', which is no weight"):
        fisher_potential(model, loss_fn, [batch], layers=["no.weight"])


@pytest.mark.parametrize("name", MODELS)
def test_batched_is_one_at_a_time(name: str) -> None:
    model, (x, y) = made(name)
    whole = fisher_potential(model, loss_fn, [(x, y)])
    for size in (1, 4):  # 4 leaves a smaller last batch
        cut = fisher_potential(model, loss_fn, zip(x.split(size), y.split(size)))
        summed = fisher_potential(
            model, lambda m, b: F.cross_entropy(m(b[0]), b[1], reduction="sum"), zip(x.split(size), y.split(size)),
            averaged=False,
        )  # fmt: skip
        for weight, values in whole.items():
            assert cut[weight] == pytest.approx(values, rel=1e-3, abs=1e-10)
            assert summed[weight] == pytest.approx(values, rel=1e-3, abs=1e-10)


def test_identity_with_the_weights_own_gradients() -> None:
    """A layer is linear in its row: sum_d a g = w . dL/dw + b . dL/db. No activation needed, so a second opinion."""
    model, (x, y) = made("convolutions")
    model.eval()
    totals: dict[str, Tensor] = {}
    for n in range(len(y)):
        model.zero_grad()
        loss_fn(model, (x[n : n + 1], y[n : n + 1])).backward()
        for name, module in model.named_modules():
            if isinstance(module, (nn.Conv2d, nn.Linear)):
                inner = (module.weight * module.weight.grad).flatten(1).sum(1)
                if module.bias is not None:
                    inner = inner + module.bias * module.bias.grad
                totals[f"{name}.weight"] = totals.get(f"{name}.weight", torch.zeros(1)) + inner.detach().square()
    model.zero_grad()
    found = fisher_potential(model, loss_fn, [(x, y)])
    for name, total in totals.items():
        torch.testing.assert_close(torch.tensor(found[name]), total / (2 * len(y)), rtol=1e-3, atol=1e-10)


def test_it_leaves_no_trace_and_does_not_ask_what_trains() -> None:
    model, batch = made("convolutions")
    model.train()
    expected = fisher_potential(model, loss_fn, [batch])
    state = {k: v.clone() for k, v in model.state_dict().items()}
    with apply(model, ["9.weight"]):
        assert fisher_potential(model, loss_fn, [batch]) == expected
        assert [n for n, p in model.named_parameters() if p.requires_grad] == ["9.weight"]
    assert all(module.training for module in model.modules())
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert not any(module._forward_hooks for module in model.modules())


def test_bad_input() -> None:
    model, (x, y) = made("convolutions")
    with pytest.raises(ConfigError, match="no batch"):
        fisher_potential(model, loss_fn, [])
    with pytest.raises(TrainingError, match=r"batches\[1\] is nan"):
        fisher_potential(model, loss_fn, [(x, y), (x * float("nan"), y)])
    with pytest.raises(ModelError, match="depends on no"):
        fisher_potential(model, lambda m, b: b[0].sum(), [(x, y)])
    with pytest.raises(ModelError, match="cannot be told"):
        fisher_potential(nn.Linear(4, 2), lambda m, b: m(b.reshape(-1, 4)[:3]).sum(), [torch.randn(2, 8)])


def test_channel_norms() -> None:
    model, _ = made("convolutions")
    norms = channel_norms(model, ["0.weight"])["0.weight"]
    torch.testing.assert_close(torch.tensor(norms), model[0].weight.detach().flatten(1).norm(dim=1))

"""The score is gradient times update: against the optimizer's real step, a naive computation and closed forms."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from importance_support import DEVICES, OPTIMIZERS, Batch, Custom, Net, batches, loss_fn, trained
from torch import Tensor, nn
from torch.nn import functional

from elastictrainer.importance import elastic, trial
from elastictrainer.importance.probe import probing
from elastictrainer.importance.trial import trial_steps

deterministic = torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True)
REACHED = ("conv.weight", "norm.weight", "norm.bias", "twice.weight", "twice.bias", "head.weight", "head.bias")


def real_step(
    model: Net, optimizer: torch.optim.Optimizer, batch: Batch
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Gradients and changes of the step that training would take, taken for real."""
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    optimizer.zero_grad()
    loss_fn(model, batch).backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    optimizer.step()
    return gradients, {n: p.detach() - before[n] for n, p in model.named_parameters()}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("steps", [0, 3], ids=["fresh", "running"])
@pytest.mark.parametrize("device", DEVICES)
@deterministic
def test_the_update_is_the_one_the_optimizer_makes_next_bit_for_bit(name: str, steps: int, device: str) -> None:
    model, optimizer = trained(OPTIMIZERS[name], steps=steps, device=device)
    batch = batches(1, device=device)[0]
    with probing(model, loss_fn, list(model.parameters())) as probe:
        _, gradients = next(probe.gradients([batch]))
        changes = {p: after - p.detach() for piece in trial_steps(optimizer, gradients) for p, after in piece.items()}
    _, really = real_step(model, optimizer, batch)
    names = dict(model.named_parameters())
    assert {n for n, p in names.items() if p in changes} == set(REACHED)
    for n in REACHED:
        assert torch.equal(changes[names[n]], really[n]), n


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_score_is_gradient_times_update(name: str) -> None:
    model, optimizer = trained(OPTIMIZERS[name])
    batch = batches(1)[0]
    scores = elastic(model, optimizer, loss_fn, [batch])
    gradients, changes = real_step(model, optimizer, batch)
    assert set(scores) == set(REACHED)
    for n, score in scores.items():
        expected = -float((gradients[n].double() * changes[n].double()).sum())
        assert score == pytest.approx(expected, rel=1e-4, abs=1e-9), n


def test_the_score_is_the_first_order_fall_of_the_loss() -> None:
    """Moving one tensor by a small share of its update lowers the loss by that share of its score."""
    model, optimizer = trained(OPTIMIZERS["adamw"])
    model.double().eval()
    batch = (batches(1)[0][0].double(), batches(1)[0][1])
    for state in optimizer.state.values():
        state.update({k: v.double() for k, v in state.items() if v.dim()})
    scores = elastic(model, optimizer, loss_fn, [batch])
    _, changes = real_step(copied := copy.deepcopy(model), _moved(optimizer, model, copied), batch)
    for n, parameter in model.named_parameters():
        if n not in scores:
            continue
        share = 1e-5
        with torch.no_grad():
            parameter.add_(changes[n], alpha=share)
            lower = float(loss_fn(model, batch))
            parameter.sub_(changes[n], alpha=2 * share)
            upper = float(loss_fn(model, batch))
            parameter.add_(changes[n], alpha=share)
        assert scores[n] == pytest.approx((upper - lower) / (2 * share), rel=1e-4, abs=1e-9)


def _moved(optimizer: torch.optim.Optimizer, source: nn.Module, target: nn.Module) -> torch.optim.Optimizer:
    """The same optimizer over a copied model."""
    twins = dict(zip(source.parameters(), target.parameters()))
    groups = [{**group, "params": [twins[p] for p in group["params"]]} for group in optimizer.param_groups]
    moved = type(optimizer)(groups)
    moved.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return moved


def linear_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return functional.mse_loss(model(batch[0]), batch[1])


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    lr=st.floats(1e-3, 1.0),
    count=st.integers(1, 4),
    factor=st.floats(0.1, 10.0),
)
def test_plain_sgd_scores_the_squared_gradient(seed: int, lr: float, count: int, factor: float) -> None:
    """For SGD: lr * |g|^2, the mean over batches; so never negative, linear in lr, quadratic in the loss's scale."""
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    sgd = torch.optim.SGD(model.parameters(), lr=lr)
    data = [
        (torch.randn(5, 3, generator=generator).double(), torch.randn(5, 2, generator=generator).double())
        for _ in range(count)
    ]
    expected = dict.fromkeys(dict(model.named_parameters()), 0.0)
    for batch in data:
        gradients = torch.autograd.grad(linear_loss(model, batch), list(model.parameters()))
        for n, g in zip(expected, gradients):
            expected[n] += lr * float(g.square().sum()) / count
    scores = elastic(model, sgd, linear_loss, data)
    assert scores == pytest.approx(expected, rel=1e-6)
    assert min(scores.values()) >= 0
    scaled = elastic(model, sgd, lambda m, b: factor * linear_loss(m, b), data)
    assert scaled == pytest.approx({n: factor**2 * s for n, s in expected.items()}, rel=1e-6)


def test_momentum_against_the_gradient_scores_negative() -> None:
    """A tensor whose momentum carries it uphill would be made worse by training it now."""
    model = nn.Linear(1, 1, bias=False)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    sgd.state[model.weight]["momentum_buffer"] = torch.full((1, 1), -100.0)
    scores = elastic(model, sgd, lambda m, x: m(x).sum(), [torch.ones(1, 1)])
    assert scores["weight"] == pytest.approx(0.1 * (0.9 * -100 + 1))


def test_decoupled_decay_is_part_of_the_update() -> None:
    """AdamW moves a weight by decay even where its gradient is tiny (trap 3), and the score counts it."""
    model = nn.Linear(1, 1, bias=False).double()
    nn.init.constant_(model.weight, 2.0)
    adamw = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    scores = elastic(model, adamw, lambda m, x: 3 * m(x).sum(), [torch.ones(1, 1).double()])
    assert scores["weight"] == pytest.approx(3 * (0.1 * 1 + 0.1 * 0.5 * 2.0), rel=1e-6)  # first Adam step: lr * sign(g)


def test_the_mean_over_batches() -> None:
    model, optimizer = trained(OPTIMIZERS["adam"])
    model.eval()
    data = batches(3)
    singly = [elastic(model, optimizer, loss_fn, [batch]) for batch in data]
    together = elastic(model, optimizer, loss_fn, iter(data))
    assert together == pytest.approx({n: sum(s[n] for s in singly) / 3 for n in together}, rel=1e-6, abs=1e-12)


def test_gradients_from_other_batches() -> None:
    """`-mean gradient elsewhere . update here`, by hand for plain SGD; with the same batch it is the plain score."""
    model, optimizer = trained(OPTIMIZERS["sgd"])
    model.double().eval()
    here, *elsewhere = ((x.double(), y) for x, y in batches(3))
    names = dict(model.named_parameters())
    parameters = [names[n] for n in REACHED]
    g = torch.autograd.grad(loss_fn(model, here), parameters)
    others = [torch.autograd.grad(loss_fn(model, batch), parameters) for batch in elsewhere]
    rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    expected = {
        n: rates[id(p)] * float((g_k * (a + b) / 2).sum()) for n, p, g_k, a, b in zip(REACHED, parameters, g, *others)
    }
    scores = elastic(model, optimizer, loss_fn, [here], gradient_batches=elsewhere)
    assert scores == pytest.approx(expected, rel=1e-6)
    assert elastic(model, optimizer, loss_fn, [here], gradient_batches=[here]) == pytest.approx(
        elastic(model, optimizer, loss_fn, [here])
    )


def test_what_rests_now_does_not_matter() -> None:
    model, optimizer = trained(OPTIMIZERS["adam"])
    model.eval()
    expected = elastic(model, optimizer, loss_fn, batches(2))
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    assert elastic(model, optimizer, loss_fn, batches(2)) == expected


@pytest.mark.parametrize("name", ["sgd_fused", "sgd_foreach", "adam_fused", "adamw_foreach"])
def test_some_tensors_with_state_and_others_without(name: str) -> None:
    """Trap 14: torch's fused SGD refuses such a step; a probe still scores each tensor as if alone."""
    model, optimizer = trained(OPTIMIZERS[name], resting=("conv.weight", "norm.bias", "twice.weight"))
    model.eval()
    together = elastic(model, optimizer, loss_fn, batches(1))
    for n in REACHED:
        alone = elastic(model, optimizer, loss_fn, batches(1), names=[n])
        assert alone == pytest.approx({n: together[n]}, rel=1e-5)


@pytest.mark.parametrize("name", ["sgd_nesterov", "adamw", "adafactor"])
def test_stepping_in_pieces_changes_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = trained(OPTIMIZERS[name], resting=("conv.weight",))
    model.eval()
    whole = elastic(model, optimizer, loss_fn, batches(1))
    monkeypatch.setattr(trial, "PIECE_NUMEL", 30)
    assert elastic(model, optimizer, loss_fn, batches(1)) == whole


def test_copies_are_bounded_for_torchs_own_optimizers(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = trained(OPTIMIZERS["adam"])
    gradients = {p: torch.ones_like(p) for p in model.parameters()}
    monkeypatch.setattr(trial, "PIECE_NUMEL", 30)
    pieces = list(trial._pieces(optimizer, list(gradients)))
    assert sorted(id(p) for piece in pieces for p in piece) == sorted(map(id, gradients))
    assert all(len(piece) == 1 or sum(p.numel() for p in piece) <= 30 for piece in pieces)


def test_an_optimizer_that_looks_at_all_tensors_together() -> None:
    """`Custom` divides by the norm of all gradients: the score of one tensor depends on what else is a candidate."""
    model, optimizer = trained(OPTIMIZERS["custom"])
    model.eval()
    assert isinstance(optimizer, Custom)
    seen = list(optimizer.history)
    together = elastic(model, optimizer, loss_fn, batches(1))
    alone = elastic(model, optimizer, loss_fn, batches(1), names=["head.weight"])
    assert alone["head.weight"] > together["head.weight"] > 0
    assert optimizer.history == seen

"""What may be asked of a probe, and what it says when it cannot answer."""

from __future__ import annotations

import pytest
import torch
from importance_support import OPTIMIZERS, Net, batches, loss_fn, trained
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from elastictrainer.errors import ConfigError, ModelError, TrainingError
from elastictrainer.importance import (
    IMPORTANCES,
    elastic,
    find_importance,
    fisher,
    gradient,
    magnitude,
    random,
    uniform,
)
from elastictrainer.runtime.apply import apply
from elastictrainer.runtime.optimizer_copy import look_through


class Wrapper(torch.optim.Optimizer):
    """As accelerate wraps: an Optimizer by type, everything forwarded, a step that may do nothing."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def state(self) -> dict:  # type: ignore[type-arg, override]
        return self.optimizer.state

    @property
    def param_groups(self) -> list:  # type: ignore[type-arg, override]
        return self.optimizer.param_groups

    def step(self, closure: object = None) -> None:
        return None


class Halfway(torch.optim.Optimizer):
    """A wrapper with state of its own: after the inner step it goes back half of the way."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer.param_groups, {})
        self.optimizer = optimizer

    @torch.no_grad()
    def step(self, closure: object = None) -> None:
        parameters = [p for g in self.param_groups for p in g["params"]]
        before = [p.clone() for p in parameters]
        self.optimizer.step()
        for p, was in zip(parameters, before):
            p.lerp_(was, 0.5)


def model_and_sgd() -> tuple[Net, torch.optim.Optimizer]:
    model, optimizer = trained(OPTIMIZERS["sgd_momentum"])
    return model.eval(), optimizer


def test_wrappers_that_only_forward_are_looked_through() -> None:
    model, optimizer = model_and_sgd()
    assert look_through(Wrapper(Wrapper(optimizer))) is optimizer
    assert elastic(model, Wrapper(optimizer), loss_fn, batches(1)) == elastic(model, optimizer, loss_fn, batches(1))


def test_a_wrapper_with_state_of_its_own_is_stepped_itself() -> None:
    model, optimizer = model_and_sgd()
    expected = {n: s / 2 for n, s in elastic(model, optimizer, loss_fn, batches(1)).items()}
    assert elastic(model, Halfway(optimizer), loss_fn, batches(1)) == pytest.approx(expected, rel=1e-3)


def test_lbfgs_is_refused() -> None:
    model, _ = model_and_sgd()
    with pytest.raises(ConfigError, match=r"LBFGS .*closure"):
        elastic(model, torch.optim.LBFGS(model.parameters()), loss_fn, batches(1))


def test_an_optimizer_that_cannot_be_copied_or_stepped() -> None:
    model, _ = model_and_sgd()
    generator = (n for n in ())

    class Stuck(torch.optim.SGD):
        def step(self, closure: object = None) -> None:  # type: ignore[override]
            raise AssertionError("SAM wants a closure")

    with pytest.raises(ConfigError, match="Stuck cannot take a trial step: SAM wants a closure"):
        elastic(model, Stuck(model.parameters()), loss_fn, batches(1))
    stuck = Stuck(model.parameters())
    stuck.source = generator  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"Stuck cannot be copied .*generator"):
        elastic(model, stuck, loss_fn, batches(1))
    with pytest.raises(ConfigError, match="list is not a torch"):
        elastic(model, [], loss_fn, batches(1))  # type: ignore[arg-type]


@pytest.mark.parametrize("entry", IMPORTANCES.values(), ids=lambda entry: entry.name)
def test_one_conformance_for_all(entry: object) -> None:
    score = entry.fn  # type: ignore[attr-defined]
    model, optimizer = model_and_sgd()
    reached = {n for n, _ in model.named_parameters() if not n.startswith("unused")}
    scores = score(model, optimizer, loss_fn, batches(2))
    assert set(scores) == reached
    assert all(type(value) is float for value in scores.values())
    assert score(model, optimizer, loss_fn, batches(2)) == scores
    asked = ["head.bias", "conv.weight"]
    assert score(model, optimizer, loss_fn, batches(2), names=asked) == pytest.approx({n: scores[n] for n in asked})
    assert list(score(model, optimizer, loss_fn, batches(1), names=asked)) == asked
    # A tied tensor is scored as a whole, by whichever of its names.
    tied = score(model, optimizer, loss_fn, batches(2), names=["twice.weight", "tied.weight"])
    assert tied["twice.weight"] == pytest.approx(scores["twice.weight"])
    if entry.name != "random":  # type: ignore[attr-defined]
        assert tied["tied.weight"] == tied["twice.weight"]
    for wrong, said in (
        (["nope"], "nope are no parameters"),
        ("head.bias", r"write \['head.bias'\]"),
        ([], "names is empty"),
    ):
        with pytest.raises(ConfigError, match=said):
            score(model, optimizer, loss_fn, batches(1), names=wrong)
    only_head = torch.optim.SGD(model.head.parameters(), lr=0.1)
    assert set(score(model, only_head, loss_fn, batches(1))) == {"head.weight", "head.bias"}
    with pytest.raises(ConfigError, match=r"conv.weight are not in the optimizer"):
        score(model, only_head, loss_fn, batches(1), names=["conv.weight"])
    with pytest.raises(ConfigError, match="holds none of the model's parameters"):
        score(model, torch.optim.SGD(nn.Linear(1, 1).parameters()), loss_fn, batches(1))
    for empty, said in (([], "batch"), (batches(1)[0][0], "not a list of batches")):
        with pytest.raises(ConfigError, match=said):
            score(model, optimizer, loss_fn, empty)


@pytest.mark.parametrize("score", [elastic, gradient, fisher])
def test_losses_that_cannot_be_used(score: object) -> None:
    model, optimizer = model_and_sgd()
    data = batches(3)
    with pytest.raises(TrainingError, match=r"batches\[1\] is inf"):
        score(model, optimizer, lambda m, b: loss_fn(m, b) + (float("inf") if b is data[1] else 0), data)  # type: ignore[operator]
    with pytest.raises(ConfigError, match=r"shape \(6, 5\) for batches\[0\]"):
        score(model, optimizer, lambda m, b: m(b[0]), data)  # type: ignore[operator]
    with pytest.raises(ConfigError, match=r"returned float"):
        score(model, optimizer, lambda m, b: float(loss_fn(m, b).detach()), data)  # type: ignore[operator]
    with pytest.raises(ModelError, match="depends on none of the"):
        score(model, optimizer, lambda m, b: loss_fn(m, b).detach(), data)  # type: ignore[operator]
    with pytest.raises(ModelError, match="depends on none of the"):
        score(model, optimizer, lambda m, b: b[0].clone().requires_grad_().sum(), data)  # type: ignore[operator]
    with pytest.raises(TrainingError, match=r"importance of conv.weight on batches\[0\] is (nan|inf)"):
        score(model, optimizer, lambda m, b: loss_fn(m, b) + (m.conv.weight * 0).sum().sqrt(), data)  # type: ignore[operator]
    with pytest.raises(TrainingError, match=r"gradient_batches\[0\] is nan"):
        elastic(
            model,
            optimizer,
            lambda m, b: loss_fn(m, b) * b[2],
            [(*data[0], 1.0)],
            gradient_batches=[(*data[0], float("nan"))],
        )


def test_a_named_tensor_that_no_batch_reaches_scores_zero() -> None:
    model, optimizer = model_and_sgd()
    assert elastic(model, optimizer, loss_fn, batches(1), names=["unused.weight", "head.bias"])["unused.weight"] == 0.0


def test_a_tensor_that_some_batches_reach() -> None:
    """As in a mixture of experts: on the other batches it scores 0."""
    model, optimizer = model_and_sgd()
    data = batches(2)

    def sometimes(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return loss_fn(model, batch) + (model.unused.weight.square().sum() if batch is data[1] else 0)  # type: ignore[union-attr]

    both, second = (elastic(model, optimizer, sometimes, part)["unused.weight"] for part in (data, data[1:]))
    assert both == pytest.approx(second / 2)
    assert second > 0


def test_sparse_gradients_are_scored_like_dense_ones() -> None:
    def scores(sparse: bool) -> dict[str, float]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(10, 4, sparse=sparse), nn.Linear(4, 1))
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        data = [torch.tensor([1, 1, 7]), torch.tensor([3, 1, 2])]
        out = {}
        for score in (elastic, gradient, fisher):
            out |= {f"{score.__name__} {n}": s for n, s in score(model, sgd, lambda m, x: m(x).sum(), data).items()}
        held_out = elastic(model, sgd, lambda m, x: m(x).sum(), data, gradient_batches=data)
        return out | {f"held out {n}": s for n, s in held_out.items()}

    assert scores(sparse=True) == pytest.approx(scores(sparse=False))


def test_sparse_adam() -> None:
    torch.manual_seed(0)
    model = nn.Embedding(10, 4, sparse=True)
    adam = torch.optim.SparseAdam(model.parameters(), lr=0.1)
    before = model.weight.detach().clone()
    scores = elastic(model, adam, lambda m, x: m(x).sum(), [torch.tensor([1, 1, 7])])
    model(torch.tensor([1, 1, 7])).sum().backward()
    adam.step()
    expected = -float((model.weight.grad.to_dense() * (model.weight.detach() - before)).sum())  # type: ignore[union-attr]
    assert scores["weight"] == pytest.approx(expected, rel=1e-5)


class Half(nn.Module):
    """Its gradients underflow to zero in half precision unless the loss is scaled."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.inner.weight.half()
        return (x.half() * 1e-4) @ weight.T


def half_loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).float().sum() * 1e-5


@pytest.mark.parametrize("scale", [2.0**12, 2.0**30])
def test_a_gradient_scaler_saves_gradients_that_would_vanish(scale: float) -> None:
    """Also where its scale has grown too large, as training would find at the next step."""
    torch.manual_seed(0)
    model = Half()
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    data = [torch.ones(4, 4)]
    assert fisher(model, sgd, half_loss, data)["inner.weight"] == 0.0
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    exact = (4 * 1e-4 * 1e-5) ** 2 * 16
    assert fisher(model, sgd, half_loss, data, scaler=scaler)["inner.weight"] == pytest.approx(exact, rel=0.01)
    disabled = torch.amp.GradScaler("cpu", enabled=False)
    assert fisher(model, sgd, half_loss, data, scaler=disabled)["inner.weight"] == 0.0


def test_autocast_lives_in_the_loss() -> None:
    model, optimizer = model_and_sgd()

    def mixed(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return loss_fn(model, batch)

    plain = elastic(model, optimizer, loss_fn, batches(2))
    assert elastic(model, optimizer, mixed, batches(2)) == pytest.approx(plain, rel=0.2, abs=1e-3)


def test_a_bfloat16_model() -> None:
    """Sums are taken in single precision: against the same gradients and changes in double."""
    model, _ = model_and_sgd()
    model.bfloat16()
    sgd = torch.optim.SGD(model.parameters(), lr=0.5)
    x, y = batches(1)[0]
    scores = elastic(model, sgd, loss_fn, [(x.bfloat16(), y)])
    before = {n: p.detach().double() for n, p in model.named_parameters()}
    sgd.zero_grad()
    loss_fn(model, (x.bfloat16(), y)).backward()
    sgd.step()
    for n, p in model.named_parameters():
        if n in scores and p.grad is not None:
            expected = -float((p.grad.double() * (p.detach().double() - before[n])).sum())
            assert scores[n] == pytest.approx(expected, rel=1e-4, abs=1e-8)


def test_complex_parameters() -> None:
    model = nn.Module()
    model.weight = nn.Parameter(torch.tensor([1 + 2j, 3 - 1j]))  # type: ignore[assignment]
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    scores = elastic(model, sgd, lambda m, _: m.weight.abs().square().sum(), [0])
    assert scores["weight"] == pytest.approx(0.1 * float((2 * model.weight.detach()).abs().square().sum()))


def test_offloaded_activations_give_the_same_scores() -> None:
    model, optimizer = model_and_sgd()
    with torch.autograd.graph.save_on_cpu():
        assert elastic(model, optimizer, loss_fn, batches(1)) == elastic(model, optimizer, loss_fn, batches(1))


def test_checkpointing() -> None:
    model, optimizer = model_and_sgd()

    def kept(use_reentrant: bool) -> object:
        def loss(model: Net, batch: tuple[Tensor, Tensor]) -> Tensor:
            x = batch[0].clone().requires_grad_()
            return functional.cross_entropy(checkpoint(model, x, use_reentrant=use_reentrant), batch[1])

        return loss

    assert elastic(model, optimizer, kept(False), batches(1)) == elastic(model, optimizer, loss_fn, batches(1))  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="use_reentrant=False"):
        elastic(model, optimizer, kept(True), batches(1))  # type: ignore[arg-type]


@pytest.mark.parametrize("bn", ["frozen", "track"])
@pytest.mark.parametrize("standing", [["head.weight"], ["twice.bias", "head.bias"], []])
def test_a_standing_plan_hides_nothing(bn: str, standing: list[str]) -> None:
    model, optimizer = model_and_sgd()
    expected = elastic(model, optimizer, loss_fn, batches(2))
    applied = apply(model, standing, optimizer=optimizer, bn=bn)  # type: ignore[arg-type]
    assert elastic(model, optimizer, loss_fn, batches(2)) == expected
    assert {n for n, p in model.named_parameters() if p.requires_grad} == set(standing)
    applied.undo()


def test_closed_forms_of_the_others() -> None:
    model = nn.Linear(2, 1, bias=False)
    nn.init.constant_(model.weight, -3.0)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    data = [torch.tensor([[1.0, -2.0]]), torch.tensor([[3.0, 0.0]])]
    arguments = (model, sgd, lambda m, x: m(x).sum(), data)
    assert magnitude(*arguments) == {"weight": 6.0}
    assert gradient(*arguments) == {"weight": 3.0}
    assert fisher(*arguments) == {"weight": 7.0}
    assert fisher(*arguments[:3], data[:1], gradient_batches=data[1:]) == {"weight": 9.0}
    assert uniform(*arguments) == {"weight": 1.0}


def test_random_is_by_seed_and_name_alone() -> None:
    model, optimizer = model_and_sgd()
    first = random(model, optimizer, loss_fn, batches(1), seed=1)
    torch.rand(1)
    assert random(model, optimizer, loss_fn, batches(1), seed=1) == first
    assert random(model, optimizer, loss_fn, names=["head.bias"], seed=1) == {"head.bias": first["head.bias"]}
    second = random(model, optimizer, loss_fn, batches(1), seed=2)
    assert all(0 <= s < 1 and s != second[n] for n, s in first.items())
    assert len(set(first.values())) == len(first)


def test_an_unknown_importance() -> None:
    assert find_importance("fisher").fn is fisher
    with pytest.raises(ConfigError, match="no importance 'tisher'; there are elastic, "):
        find_importance("tisher")

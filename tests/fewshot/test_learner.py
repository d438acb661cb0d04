"""Learning a task: ceilings kept, the network put back, prototypes that become a plain output layer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from elastictrainer.budget import parse_bytes
from elastictrainer.data.episodes import Bank, Episodes
from elastictrainer.data.normalisation import Normalisation
from elastictrainer.errors import BudgetError, ConfigError, ModelError, TrainingError
from elastictrainer.fewshot.heads import Prototypes, Queries, last_linear
from elastictrainer.fewshot.learner import Learner, Settings
from elastictrainer.fewshot.lite import LITE, lite_residuals
from elastictrainer.fewshot.methods import METHODS, Ceilings, find_method
from elastictrainer.metrics.held import held_bytes
from elastictrainer.runtime.apply import apply

CEILINGS = Ceilings("20KiB", "40%")


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        block = nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8), nn.ReLU6(inplace=True),
            nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.ReLU(inplace=True), nn.Conv2d(8, 16, 1), nn.ReLU(),
        )  # fmt: skip
        self.body = nn.Sequential(block)
        self.classifier = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.body(x).mean((2, 3)))


@pytest.fixture(scope="module")
def bank(tmp_path_factory: pytest.TempPathFactory) -> Bank:
    """Four kinds of stripes, six images each."""
    root = tmp_path_factory.mktemp("stripes")
    rng = np.random.default_rng(0)
    for kind in range(4):
        (root / f"kind{kind}").mkdir()
        for k in range(6):
            pixels = rng.integers(0, 60, (16, 16, 3))
            pixels[(slice(None, None, kind + 2),) if k % 2 else (slice(1, None, kind + 2),)] += 150
            Image.fromarray(pixels.astype(np.uint8)).save(root / f"kind{kind}" / f"{k}.png")
    return Bank(str(root), image_size=16, normalisation=Normalisation.parse("none"))


def learner(bank: Bank, **settings: object) -> Learner:
    torch.manual_seed(0)
    model = Small()
    head = Prototypes(last_linear(model, ("classifier.weight", "classifier.bias")))
    chosen = Settings(**{"steps": 6, "lr": 5e-3, "batch_size": 3, **settings})  # type: ignore[arg-type]
    return Learner(model, head, bank, settings=chosen, ceilings=CEILINGS)


@pytest.mark.parametrize("name", [name for name in METHODS if name != "sparse_update"])
def test_every_method_learns_within_its_ceilings_and_is_forgotten(bank: Bank, name: str) -> None:
    one = learner(bank)
    before = {key: value.clone() for key, value in one.model.state_dict().items()}
    episode = Episodes(bank.labels, ways=4, shots=3, queries=3).episode(0)
    method = find_method(name)
    outcome = one.solve(method, episode, 0)
    again = one.solve(method, episode, 0)
    assert (outcome.accuracy, outcome.losses, outcome.plan) == (again.accuracy, again.losses, again.plan)
    assert all(torch.equal(value, before[key]) for key, value in one.model.state_dict().items())
    assert 0 <= outcome.accuracy <= 1
    if name == "none":
        assert outcome.plan is None
        return
    assert outcome.plan is not None
    spent, full = outcome.plan.backward, outcome.plan.full_backward
    assert spent is not None
    assert full == one.plain.full
    if method.within:
        assert spent.nbytes <= parse_bytes("20KiB")
        assert spent.macs <= 0.4 * full.macs
    if name == "full":
        assert spent == full
        assert outcome.losses[-1] < outcome.losses[0]
    # What is stated is what is held, with the ReLUs that the method runs with.
    images = bank.images(np.arange(3))
    labels = torch.tensor([0, 1, 2])
    prototypes = one.head.of(one.model, images, labels, 4)
    with one.extended(method), apply(one.model, outcome.plan, bits=method.bits):
        held = held_bytes(lambda: one.head.loss(one.model, Queries(images, labels, prototypes)), one.model)
    assert held == pytest.approx(spent.saved_bytes, rel=0.02, abs=512)  # the head is priced for another number of ways


def test_lite_residuals_train_and_start_at_nothing_and_leave_no_trace(bank: Bank) -> None:
    one = learner(bank)
    images = bank.images(np.arange(3))
    keys = list(one.model.state_dict())
    with torch.no_grad():
        before = one.head.features(one.model, images)
        with lite_residuals(one.model, images[:1]) as names:
            assert {name.rpartition(".")[0] for name in names} == {f"body.0.0.{LITE}.spread", f"body.0.0.{LITE}.point"}
            assert torch.equal(one.head.features(one.model, images), before)
    assert list(one.model.state_dict()) == keys
    assert not any(module._forward_hooks for module in one.model.modules())
    episode = Episodes(bank.labels, ways=4, shots=3, queries=3).episode(0)
    outcome = one.solve(find_method("tinytl"), episode, 0)
    biases = one.solve(find_method("bias"), episode, 0)
    assert set(outcome.plan.trainable) == {*biases.plan.trainable, *names}  # type: ignore[union-attr]
    assert outcome.losses[0] == biases.losses[0]
    assert outcome.losses[-1] != biases.losses[-1]
    with pytest.raises(ModelError, match="has none"), lite_residuals(nn.Conv2d(3, 3, 1), images[:1]):
        pass


def test_dropped_adapters_are_those_next_to_the_input(bank: Bank) -> None:
    """Three blocks in a row: half of them, rounded up, are the last two, and no gradient goes past these."""
    blocks = [nn.Sequential(nn.Conv2d(3, 3, 1, bias=False), nn.Conv2d(3, 3, 1, bias=False)) for _ in range(3)]
    model = nn.Sequential(nn.Sequential(*blocks), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 4))
    chosen = Settings(steps=2, lr=0.01, batch_size=3)
    one = Learner(model, Prototypes("3"), bank, settings=chosen, ceilings=CEILINGS)
    method = find_method("adapterdrop")
    with one.extended(method):
        on = [i for i, block in enumerate(blocks) if any(LITE in name for name, _ in block.named_parameters())]
    assert on == [1, 2]
    episode = Episodes(bank.labels, ways=4, shots=3, queries=3).episode(0)
    whole, half = (one.solve(find_method(name), episode, 0).plan for name in ("tinytl", "adapterdrop"))
    assert whole is not None
    assert half is not None
    assert half.trainable
    assert all(LITE in name for name in half.trainable)
    assert half.backward is not None
    assert whole.backward is not None
    assert half.backward.macs < whole.backward.macs
    assert half.backward.nbytes < whole.backward.nbytes


def test_a_linear_head_begins_as_prototypes_and_trains_within_the_ceilings(bank: Bank) -> None:
    episode = Episodes(bank.labels, ways=4, shots=3, queries=3).episode(0)
    by_means, linear = learner(bank), learner(bank, head="linear")
    for name in ("tinytrain", "full"):
        method = find_method(name)
        a, b = by_means.solve(method, episode, 0), linear.solve(method, episode, 0)
        assert b.losses[0] == pytest.approx(a.losses[0])
        assert b.losses[-1] != a.losses[-1]
        assert b.answers is not None
        start = linear.head.of(linear.model, bank.images(episode.support), torch.tensor(episode.support_labels), 4)
        assert not torch.equal(b.answers, start)
        # What is stated is what is held, the unit features for the head's own gradient included.
        images, answers = bank.images(np.arange(3)), b.answers.clone().requires_grad_()
        with apply(linear.model, b.plan, bits=method.bits):  # type: ignore[arg-type]
            batch = Queries(images, torch.tensor([0, 1, 2]), answers)
            held = held_bytes(lambda batch=batch: linear.head.loss(linear.model, batch), linear.model)
        spent, full = b.plan.backward, b.plan.full_backward  # type: ignore[union-attr]
        assert held == pytest.approx(spent.saved_bytes, rel=0.02, abs=512)
        if name == "tinytrain":
            assert spent.nbytes <= parse_bytes("20KiB")
            assert spent.macs <= 0.4 * full.macs
        else:
            assert spent == full
    with pytest.raises(BudgetError, match="the linear head alone takes"):
        Learner(
            by_means.model, by_means.head, bank, settings=Settings(head="linear"), ceilings=Ceilings("500B", None)
        ).solve(find_method("tinytrain"), episode, 0)
    with pytest.raises(ConfigError, match="head 'cosine' is not one of"):
        Settings(head="cosine")


def test_micro_batches_add_up_to_the_same_step(bank: Bank) -> None:
    episode = Episodes(bank.labels, ways=4, shots=3, queries=3).episode(1)
    losses = [
        learner(bank, batch_size=size, optimizer="sgd").solve(find_method("full"), episode, 1).losses
        for size in (1, 5, 12)
    ]
    for other in losses[1:]:
        assert other == pytest.approx(losses[0], rel=1e-4)


def test_prototypes_in_the_head_answer_as_they_did(bank: Bank) -> None:
    one = learner(bank)
    episode = Episodes(bank.labels, ways=4, shots=3, queries=3).episode(0)
    labels = torch.tensor(episode.support_labels)
    prototypes = one.head.of(one.model, bank.images(episode.support), labels, 4)
    images = bank.images(episode.query)
    with torch.no_grad():
        by_cosine = one.head.logits(one.model, images, prototypes)
        one.head.into_head(one.model, prototypes)
        answers = one.model(images)
    best = by_cosine.topk(2).values
    clear = best[:, 0] - best[:, 1] > 1e-5  # closer than that, rounding decides
    assert clear.any()
    assert torch.equal(answers.argmax(1)[clear], by_cosine.argmax(1)[clear])
    assert answers / answers.norm(dim=1, keepdim=True) == pytest.approx(
        by_cosine / by_cosine.norm(dim=1, keepdim=True), abs=1e-5
    )


def test_prototypes_are_unit_means() -> None:
    model = nn.Sequential(nn.Identity(), nn.Linear(2, 2))
    found = Prototypes("1").of(
        model, torch.tensor([[1.0, 0.0], [3.0, 0.0], [0.0, -2.0]]), torch.tensor([0, 0, 1]), 2, batch_size=2
    )
    assert found.tolist() == [[1.0, 0.0], [0.0, -1.0]]


def test_bad_use_is_said(bank: Bank) -> None:
    one = learner(bank)
    episode = Episodes(bank.labels, ways=4, shots=3, queries=3).episode(0)
    with pytest.raises(ConfigError, match="--scheme"):
        one.solve(find_method("sparse_update"), episode, 0)
    with pytest.raises(ConfigError, match="did you mean 'tinytrain'"):
        find_method("tinytrian")
    with pytest.raises(ModelError, match="ends in"):
        last_linear(nn.Sequential(nn.Conv2d(1, 2, 1)), ("0.weight", "0.bias"))
    with pytest.raises(TrainingError, match="the loss is nan at step"):
        learner(bank, lr=1e30, optimizer="sgd").solve(find_method("full"), episode, 0)
    with pytest.raises(BudgetError, match="the least that works"):
        Learner(one.model, one.head, bank, settings=Settings(), ceilings=Ceilings("10B", None)).solve(
            find_method("tinytrain"), episode, 0
        )
    with pytest.raises(ConfigError, match="at least 1"):
        Settings(steps=0)


def test_a_scheme_is_trained_as_it_is(bank: Bank, tmp_path: Path) -> None:
    one = learner(bank)
    episode = Episodes(bank.labels, ways=4, shots=3, queries=3).episode(0)
    scheme = one.solve(find_method("tinytrain"), episode, 0).plan
    with_scheme = Learner(
        one.model, one.head, bank, settings=one.settings, ceilings=CEILINGS, scheme=scheme
    )  # fmt: skip
    outcome = with_scheme.solve(find_method("sparse_update"), episode, 0)
    assert outcome.plan is not None
    assert outcome.plan.id == scheme.id  # type: ignore[union-attr]

"""PruneTrain: the lasso is what autograd would compute, channels that are zero are really gone, runs go on."""

from __future__ import annotations

import copy
import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from loop_support import batches, small_net
from torch import Tensor, nn

from elastictrainer.errors import ConfigError, ModelError
from elastictrainer.runtime.controller import Elastic
from elastictrainer.runtime.interval import Interval
from elastictrainer.runtime.loop import fit
from elastictrainer.runtime.optimizers import make_optimizer
from elastictrainer.runtime.resize import load_pruned, resize
from elastictrainer.runtime.run import Run

pytest.importorskip("torch_pruning", reason="the extra prunetrain is not installed")
from elastictrainer.runtime.prunetrain import PruneTrain, _norm, _pull


class Residual(nn.Module):
    """A stem, a block whose sum ties three layers' channels, a depthwise layer, a concatenation and a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.inner, self.inner_norm = nn.Conv2d(8, 12, 3, padding=1, bias=False), nn.BatchNorm2d(12)
        self.depth = nn.Conv2d(12, 12, 3, padding=1, groups=12)
        self.outer = nn.Conv2d(12, 8, 1)
        self.side = nn.Conv2d(8, 6, 1)
        self.last = nn.Conv2d(14, 10, 1)
        self.head = nn.Linear(10, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.stem(x)))
        inner = torch.relu(self.inner_norm(self.inner(x)))
        x = x + self.outer(torch.relu(self.depth(inner)))
        x = torch.relu(self.last(torch.cat([x, self.side(x)], 1)))
        out: Tensor = self.head(x.mean((2, 3)))
        return out


def network(seed: int = 0) -> Residual:
    torch.manual_seed(seed)
    net = Residual()
    with torch.no_grad():  # statistics as after training, so that removing a channel by mistake would show
        for module in net.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean.normal_()
                module.running_var.uniform_(0.5, 2)
                module.weight.normal_()
                module.bias.normal_()
    return net


def loss_fn(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def images(count: int = 6, *, seed: int = 0, of: int = 6) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(of, 3, 8, 8, generator=generator), torch.randint(3, (of,), generator=generator))
        for _ in range(count)
    ]


@torch.no_grad()
def silence(net: Residual) -> None:
    """Zeros in every layer that shares them: 5 inner channels, a residual one, 2 of the side's and one of the last."""
    for channel in (0, 3, 4, 7, 11):
        for out in (net.inner, net.depth):
            out.weight[channel] = 0
        net.outer.weight[:, channel] = 0
    for out in (net.stem, net.outer):
        out.weight[2] = 0
    for reader, channel in ((net.inner, 2), (net.side, 2), (net.last, 2)):
        reader.weight[:, channel] = 0
    for channel in (1, 5):
        net.side.weight[channel] = 0
        net.last.weight[:, 8 + channel] = 0
    net.last.weight[9] = 0
    net.head.weight[:, 9] = 0
    net.inner.weight[6] = 0  # read by the next layer: must stay


def pruner(net: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> PruneTrain:
    return PruneTrain(net, optimizer or make_optimizer("sgd", net.parameters(), lr=0.1), interval=Interval.parse(1))


def test_channels_that_are_zero_are_gone_and_the_network_computes_what_it_did() -> None:
    net = network().eval()
    silence(net)
    before = copy.deepcopy(net)
    assert pruner(net).rebuild(loss_fn, images()[0]) == 5 + 1 + 2 + 1
    shapes = {name: tuple(p.shape) for name, p in net.named_parameters() if name.endswith("weight") and p.dim() > 1}
    assert shapes == {
        "stem.weight": (7, 3, 3, 3), "inner.weight": (7, 7, 3, 3), "depth.weight": (7, 1, 3, 3),
        "outer.weight": (7, 7, 1, 1), "side.weight": (4, 7, 1, 1), "last.weight": (9, 11, 1, 1), "head.weight": (3, 9),
    }  # fmt: skip
    assert (net.depth.groups, net.depth.in_channels, net.norm.num_features, net.head.in_features) == (7, 7, 7, 9)
    assert net.norm.running_mean.shape == (7,)
    inputs = images(seed=3)[0][0]
    torch.testing.assert_close(net(inputs), before(inputs))
    # Nothing is left to remove, and what was left can be trained.
    assert pruner(net).rebuild(loss_fn, images()[0]) == 0
    loss_fn(net.train(), images()[0]).backward()
    assert all(p.grad is not None and p.grad.shape == p.shape for p in net.parameters())


def test_nothing_is_removed_that_any_layer_still_needs() -> None:
    net = network()
    with torch.no_grad():
        net.stem.weight[1] = 0  # its bias and norm make it a constant that others read
        net.inner.weight[:, 4] = 0  # one reader of three
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    assert pruner(net).rebuild(loss_fn, images()[0]) == 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())


def test_a_layer_keeps_one_channel_at_least() -> None:
    net = network()
    with torch.no_grad():
        for layer in (net.inner, net.depth, net.outer):
            layer.weight.zero_()
    pruner(net).rebuild(loss_fn, images()[0])
    assert net.inner.out_channels == net.depth.groups == net.outer.in_channels == 1
    loss_fn(net, images()[0]).backward()


@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v2", "squeezenet1_1", "densenet121"])
def test_real_networks_compute_what_they_did(name: str) -> None:
    """Residual sums, depthwise layers, concatenations; the first two channels of every group are silenced."""
    import torch_pruning

    models = pytest.importorskip("torchvision").models
    torch.manual_seed(0)
    net = models.get_model(name, num_classes=3).eval()
    batch = (torch.randn(2, 3, 64, 64), torch.tensor([0, 1]))
    graph = torch_pruning.DependencyGraph().build_dependency(net, batch, forward_fn=loss_fn, verbose=False)
    with torch.no_grad():
        for module in net.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean.normal_(std=0.1)
                module.bias.normal_(std=0.1)
        for group in graph.get_all_groups(root_module_types=[nn.Conv2d]):
            for item in group:
                module, out = item.dep.target.module, graph.is_out_channel_pruning_fn(item.dep.handler)
                if isinstance(module, (nn.Conv2d, nn.Linear)):
                    places = [i for i, root in zip(item.idxs, item.root_idxs) if root < 2]
                    if out or getattr(module, "groups", 1) > 1:
                        module.weight[places] = 0
                    else:
                        module.weight[:, places] = 0
    whole = copy.deepcopy(net)
    assert pruner(net).rebuild(loss_fn, batch) > 20
    assert sum(p.numel() for p in net.parameters()) < sum(p.numel() for p in whole.parameters())
    torch.testing.assert_close(net(batch[0]), whole(batch[0]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_the_optimizer_goes_on_with_the_state_of_what_is_left(name: str) -> None:
    net = network()
    optimizer = make_optimizer(name, net.parameters(), lr=0.01)
    for batch in images(2):
        loss_fn(net, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    silence(net)
    before = {name: dict(optimizer.state[p]) for name, p in net.named_parameters()}
    assert pruner(net, optimizer).rebuild(loss_fn, images()[0]) == 9
    inner, residual = torch.tensor([1, 2, 5, 6, 8, 9, 10]), torch.tensor([0, 1, 3, 4, 5, 6, 7])
    parameters = dict(net.named_parameters())
    for key, value in optimizer.state[parameters["inner.weight"]].items():
        old = before["inner.weight"][key]
        assert torch.equal(value, old[inner][:, residual] if value.dim() else old)
    for key, value in optimizer.state[parameters["depth.bias"]].items():
        assert torch.equal(value, before["depth.bias"][key][inner] if value.dim() else before["depth.bias"][key])
    held = [p for group in optimizer.param_groups for p in group["params"]]
    assert [id(p) for p in held] == [id(p) for p in net.parameters()]
    assert set(optimizer.state) == set(net.parameters())
    loss_fn(net, images(1, seed=9)[0]).backward()
    optimizer.step()


def test_the_lasso_is_what_autograd_would_compute() -> None:
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    method = pruner(net, optimizer)
    batch = images()[0]
    loss = loss_fn(net, batch)
    method.saw(loss)
    assert method.strength is not None
    term = method.strength * method.lasso()
    assert float((term / (term + loss)).detach()) == pytest.approx(0.2, rel=1e-5)  # a fifth of the whole, as published
    (loss + term).backward()
    expected = {name: p.detach() - p.grad for name, p in net.named_parameters() if p.grad is not None}
    net.zero_grad()
    loss_fn(net, batch).backward()
    optimizer.step()
    for name, parameter in net.named_parameters():
        torch.testing.assert_close(parameter.detach(), expected[name])
    method.close()
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    optimizer.zero_grad()
    optimizer.step()
    assert all(torch.equal(p, before[name]) for name, p in net.named_parameters())


@pytest.mark.parametrize("shape", [(6, 4, 3, 3), (6, 4, 1, 1), (8, 1, 3, 3), (5, 3, 7), (3, 2, 3, 3, 3)])
@pytest.mark.parametrize("inputs", [True, False])
def test_the_pull_of_a_weight_is_one_over_its_groups_norms(shape: tuple[int, ...], inputs: bool) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    weight[0] = 0.0  # has no direction: it is not pulled anywhere, and makes nothing infinite
    expected = 1.0 / _norm(weight, 0).clamp_min(1e-12)
    if inputs:
        expected = expected + 1.0 / _norm(weight, 1).clamp_min(1e-12)
    for stored in (weight, weight.to(memory_format=torch.channels_last) if weight.dim() == 4 else weight):
        pull = _pull(stored, inputs=inputs)
        torch.testing.assert_close(pull.expand(shape), expected.expand(shape))
        assert (stored * pull)[0].eq(0).all()


# -- in the one loop -------------------------------------------------------------------------------------------------


def run(out: Path | None, *, resume: bool = False, seed: int = 0, **options: Any) -> tuple[nn.Module, Any]:
    net = network()
    silence(net)
    loader = options.pop("loader", None) or images()
    result = fit(
        net, make_optimizer("sgd", net.parameters(), lr=0.01), loss_fn, loader, epochs=4, policy="prunetrain",
        interval=options.pop("interval", 2), out=out, resume=resume, deterministic=True, progress=False,
        scheduler=None, seed=seed, **options,
    )  # fmt: skip
    return net, result


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Zeros are put back before each rebuilding: a few steps at these rates do not reach zero by themselves."""
    rebuild = PruneTrain.rebuild

    def first_silenced(self: PruneTrain, *args: Any) -> int:
        if isinstance(self.model, Residual) and self.model.stem.out_channels == 8:
            silence(self.model)
        return rebuild(self, *args)

    monkeypatch.setattr(PruneTrain, "rebuild", first_silenced)


def test_a_run_shrinks_at_its_interval_and_says_so(quiet: None, tmp_path: Path) -> None:
    net, result = run(tmp_path / "run")
    assert [plan["reason"] for plan in result.plans] == ["first", "rebuilt"]
    assert [plan["steps"] for plan in result.plans] == [12, 12]
    ids = [plan["id"] for plan in result.plans]
    assert ids[1] == f"{ids[0]}-1"
    kept = max((tmp_path / "run" / "checkpoint").glob("save-*"))
    record = json.loads((kept / "state.json").read_text())
    flops = record["state"]["record"]["flops_by_plan"]
    assert 0 < flops[ids[1]] < flops[ids[0]]
    assert result.flops == 12 * flops[ids[0]] + 12 * flops[ids[1]]
    # What was saved can be loaded: into the network as it is built, and as it was.
    fresh = network(seed=1)
    load_pruned(fresh, tmp_path / "run" / "model.safetensors")
    assert fresh.stem.out_channels == 7
    assert all(torch.equal(a, b) for a, b in zip(fresh.state_dict().values(), net.state_dict().values()))
    inputs = images(seed=7)[0][0]
    torch.testing.assert_close(fresh.eval()(inputs), net.eval()(inputs))


def test_the_lasso_alone_drives_channels_out(tmp_path: Path) -> None:
    """Nothing is silenced by hand: from the published strength on, at a rate large enough for a short run."""
    net = network()
    before = sum(p.numel() for p in net.parameters())
    result = fit(
        net, make_optimizer("sgd", net.parameters(), lr=0.1), loss_fn, images(8), epochs=60, policy="prunetrain",
        interval=5, bn="track", deterministic=True, progress=False, out=tmp_path / "run",
    )  # fmt: skip
    assert "rebuilt" in [plan["reason"] for plan in result.plans]
    assert sum(p.numel() for p in net.parameters()) < before
    kept = max((tmp_path / "run" / "checkpoint").glob("save-*"))
    flops = json.loads((kept / "state.json").read_text())["state"]["record"]["flops_by_plan"]
    counted = [flops[plan["id"]] for plan in result.plans]
    assert counted == sorted(counted, reverse=True)
    assert counted[-1] < counted[0]


def test_the_best_weights_may_be_of_the_network_before_it_shrank(quiet: None, tmp_path: Path) -> None:
    worse = iter([0.9, 0.8, 0.7, 0.6, 0.5])
    out = tmp_path / "run"
    net, result = run(
        out, val_loader=images(1, seed=5), test_loader=images(1, seed=6), metric=lambda model, batch: (next(worse), 1)
    )
    assert result.best_epoch == 1
    assert net.stem.out_channels == 8
    last = load_pruned(network(), out / "last.safetensors")
    assert last.stem.out_channels == 7


def test_killed_before_and_after_the_network_has_shrunk(quiet: None, tmp_path: Path, monkeypatch: Any) -> None:
    expected, _ = run(tmp_path / "whole")
    end_epoch = Run.end_epoch
    for dies_after in (1, 2, 3):
        out = tmp_path / f"killed-{dies_after}"

        def dying(self: Run, last: int = dies_after) -> None:
            end_epoch(self)
            if self.record.epoch == last:
                raise KeyboardInterrupt

        monkeypatch.setattr(Run, "end_epoch", dying)
        with pytest.raises(KeyboardInterrupt):
            run(out)
        monkeypatch.setattr(Run, "end_epoch", end_epoch)
        net, result = run(out, resume=True)
        assert result.restarts == 1
        assert net.state_dict().keys() == expected.state_dict().keys()
        for (name, tensor), other in zip(net.state_dict().items(), expected.state_dict().values()):
            assert torch.equal(tensor, other), name
        # A finished run gives its smaller network again.
        again, _ = run(out, resume=True)
        assert torch.equal(next(again.parameters()), next(net.parameters()))


class Interrupting(list[Any]):
    """Batches of which one, counted over all epochs, comes with a Ctrl-C."""

    def __init__(self, batches: list[Any], at: int) -> None:
        super().__init__(batches)
        self.left = at

    def __iter__(self) -> Any:
        for batch in super().__iter__():
            self.left -= 1
            if self.left == 0:
                signal.raise_signal(signal.SIGINT)
            yield batch


def test_stopped_within_an_epoch_around_a_rebuilding(quiet: None, tmp_path: Path) -> None:
    """At steps that are no epoch's end: the step before a rebuilding, the one after it, and later ones."""
    whole, _ = run(tmp_path / "whole", interval="4steps")
    assert whole.stem.out_channels == 7
    for at in (3, 4, 5, 11):
        out = tmp_path / f"stopped-{at}"
        with pytest.raises(KeyboardInterrupt):
            run(out, interval="4steps", loader=Interrupting(images(), at))
        net, result = run(out, resume=True, interval="4steps")
        assert (result.restarts, result.steps) == (1, 24)
        for (name, tensor), other in zip(net.state_dict().items(), whole.state_dict().values()):
            assert torch.equal(tensor, other), f"{name}, stopped at batch {at}"


def test_gradients_that_are_being_accumulated_outlive_a_rebuilding() -> None:
    net = network()
    loss_fn(net, images()[0]).backward()
    silence(net)
    before = {name: p.grad.clone() for name, p in net.named_parameters()}
    method = pruner(net)
    method.rebuild(loss_fn, images()[0])
    kept = {"inner": torch.tensor([1, 2, 5, 6, 8, 9, 10]), "residual": torch.tensor([0, 1, 3, 4, 5, 6, 7])}
    assert torch.equal(net.inner.weight.grad, before["inner.weight"][kept["inner"]][:, kept["residual"]])
    assert torch.equal(net.head.bias.grad, before["head.bias"])
    assert all(p.grad is not None and p.grad.shape == p.shape for p in net.parameters())


def test_networks_that_it_is_not_for_are_refused(tmp_path: Path) -> None:
    net = small_net()
    with pytest.raises(ConfigError, match="this network has none"):
        fit(
            net, make_optimizer("sgd", net.parameters(), lr=0.1), loss_fn, batches(4), epochs=1, policy="prunetrain",
            progress=False,
        )  # fmt: skip
    with pytest.raises(ConfigError, match="neither compiled nor distributed"):
        pruner(nn.DataParallel(network()))
    net = network()
    with pytest.raises(ConfigError, match=r"only et\.fit does"):
        next(
            Elastic(net, make_optimizer("sgd", net.parameters(), lr=0.1), loss_fn, policy="prunetrain").epoch(images())
        )
    with pytest.raises(ModelError, match="LayerNorm cannot"):
        resize(nn.Sequential(nn.LayerNorm(8)), {"0.weight": torch.ones(7)})

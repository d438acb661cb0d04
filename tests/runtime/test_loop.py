"""The one loop: what it leaves behind, what it refuses, how it stops."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from loop_support import Machine, batches, chain_profile, cross_entropy, small_net
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from elastictrainer.errors import BudgetError, CheckpointError, ConfigError, DataError, TrainingError
from elastictrainer.importance import IMPORTANCES
from elastictrainer.policies import POLICIES
from elastictrainer.profiling.profile import Profile
from elastictrainer.runtime import checkpoint
from elastictrainer.runtime.evaluate import Score, evaluate, top1
from elastictrainer.runtime.loop import fit
from elastictrainer.runtime.optimizers import make_optimizer
from elastictrainer.runtime.result import Result


class Killed(BaseException):
    """Stands for SIGKILL: nothing handles it, and nothing is cleaned up."""


def run(out: Path | None = None, *, model: nn.Module | None = None, optimizer: str = "sgd", **options: Any) -> Result:
    model = small_net() if model is None else model
    options.setdefault("profile", chain_profile(model))
    options.setdefault("epochs", 3)
    options.setdefault("interval", 1)
    options.setdefault("policy", "elastic")
    data = options.pop("data", None) or batches(12)
    loss_fn = options.pop("loss_fn", cross_entropy)
    lr = options.pop("lr", 0.05)
    return fit(
        model, make_optimizer(optimizer, model.parameters(), lr=lr), loss_fn, data, out=out, progress=False, **options
    )


# -- what it leaves behind -------------------------------------------------------------------------------------------


def test_the_run_folder_is_what_the_design_says(tmp_path: Path) -> None:
    out = tmp_path / "run"
    result = run(out, val_loader=batches(3, seed=1), test_loader=batches(3, seed=2), config={"model": "small"})
    names = {path.name for path in out.iterdir()}
    assert names >= {
        "config.yaml", "metrics.jsonl", "plans.jsonl", "profile.json", "result.json", "model.safetensors", "checkpoint",
        "report.html",
    }  # fmt: skip
    document = json.loads((out / "result.json").read_text())
    assert document.keys() >= {
        "policy", "budget", "seed", "device", "torch", "epochs", "batch_size", "train_s", "eval_s", "full_step_s",
        "step_s", "predicted_ratio", "measured_ratio", "accuracy", "overhead_s", "peak_bytes", "flops", "energy_j",
    }  # fmt: skip
    assert document["overhead_s"].keys() >= {"profile", "probe", "select", "apply"}
    assert len(document["accuracy"]["per_epoch"]) == 3
    assert document["accuracy"]["of"] == "test"
    assert Result.from_dict(document) == result
    epochs = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in epochs] == [1, 2, 3]
    plans = [json.loads(line) for line in (out / "plans.jsonl").read_text().splitlines()]
    assert [line["step"] for line in plans if line["reason"] != "trim"] == [0, 12, 24]
    assert all(line["scores"].keys() == set(chain_profile(small_net()).names) for line in plans)
    config = yaml.safe_load((out / "config.yaml").read_text())
    assert config["model"] == "small"
    assert config["optimizer"]["name"] == "SGDW"
    assert load_file(out / "model.safetensors").keys() == small_net().state_dict().keys()


def test_it_learns_and_the_model_ends_as_the_best_on_validation(tmp_path: Path) -> None:
    model = small_net()
    result = run(
        tmp_path / "run", model=model, epochs=6, data=batches(40), val_loader=batches(10, seed=1), budget="0.7x", lr=0.1
    )
    assert result.accuracy["final"] > 0.6
    assert result.accuracy["final"] == max(result.accuracy["per_epoch"])
    kept = load_file(tmp_path / "run" / "model.safetensors")
    assert all(torch.equal(value, kept[name]) for name, value in model.state_dict().items())
    assert all(p.requires_grad for p in model.parameters())


def test_the_best_epoch_is_never_chosen_on_the_test_data() -> None:
    """Trap 13."""
    with_test = small_net()
    run(model=with_test, test_loader=batches(3, seed=2))
    without = small_net()
    run(model=without)
    for a, b in zip(with_test.parameters(), without.parameters()):
        assert torch.equal(a, b)


def test_without_a_folder_nothing_is_written_and_the_best_is_restored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = small_net()
    # Validation labels are wrong on purpose: learning makes it worse, so an early epoch is best.
    wrong = [(x, (y + 1) % 3) for x, y in batches(5, seed=1)]
    result = run(model=model, epochs=5, data=batches(40), val_loader=wrong, lr=0.2, policy="full")
    assert result.best_epoch is not None
    assert result.best_epoch < 5
    model.eval()
    with torch.no_grad():
        right = sum(int((model(x).argmax(1) == y).sum()) for x, y in wrong)
    assert right / 30 == result.accuracy["final"] == max(result.accuracy["per_epoch"])
    assert not list(tmp_path.iterdir())


def test_early_stop_waits_and_then_stops() -> None:
    wrong = [(x, (y + 1) % 3) for x, y in batches(5, seed=1)]
    result = run(epochs=9, data=batches(40), val_loader=wrong, lr=0.2, policy="full", early_stop=2)
    assert result.best_epoch is not None
    assert result.epochs == result.best_epoch + 2


# What makes the network smaller needs channels to take out: test_prunetrain.py has a network with some.
@pytest.mark.parametrize("policy", [name for name, policy in POLICIES.items() if not policy.shrinks])
def test_every_policy_goes_through_the_one_loop(policy: str, tmp_path: Path) -> None:
    by_time = policy == "adaptive"  # its clock is then the profile's, in which a step of this network takes seconds
    result = run(tmp_path / "run", policy=policy, budget="0.6x", val_loader=batches(2), deterministic=by_time)
    assert result.policy == policy
    if by_time:
        assert result.predicted_ratio == pytest.approx(0.6, abs=1 / 36)
    else:
        assert result.steps == 36
    assert result.flops
    assert result.flops > 0
    assert Profile.load(tmp_path / "run" / "profile.json").to_dict() == chain_profile(small_net()).to_dict()


@pytest.mark.parametrize("importance", IMPORTANCES)
def test_elastic_with_every_importance(importance: str) -> None:
    result = run(importance=importance, budget="0.6x", feedback=False)
    assert result.importance == importance
    assert all(plan["predicted_ratio"] <= 0.6 + 1e-9 for plan in result.plans)


def test_a_time_for_the_whole_run_is_shared_out_among_its_steps() -> None:
    model = small_net()
    machine = Machine(chain_profile(model))
    deadline = 36 * 0.6 * machine.profile.full_step_s
    result = run(
        model=model, profile=machine.profile, budget=f"{deadline}s", loss_fn=machine.loss_fn, clock=machine.clock,
        deterministic=True,
    )  # fmt: skip
    assert result.budget is not None
    assert all(plan["predicted_ratio"] <= 0.6 + 1e-9 for plan in result.plans)
    assert max(plan["predicted_ratio"] for plan in result.plans) > 0.5


def test_the_step_that_flops_are_counted_on_is_in_the_account() -> None:
    model = small_net()
    machine = Machine(chain_profile(model))
    result = run(
        model=model, profile=machine.profile, loss_fn=machine.loss_fn, clock=machine.clock, policy="random",
        budget="0.7x", deterministic=True,
    )  # fmt: skip
    plans = {plan["id"] for plan in result.plans}
    assert len(plans) > 1
    assert result.overhead_s["flops"] == pytest.approx(len(plans) * machine.profile.forward_s)
    assert result.train_s == pytest.approx(
        sum(plan["spent_s"] for plan in result.plans) + sum(result.overhead_s.values())
    )


def test_accumulation_is_a_larger_batch() -> None:
    data = batches(6, size=4)
    pairs = [(torch.cat([a[0], b[0]]), torch.cat([a[1], b[1]])) for a, b in zip(data[::2], data[1::2])]
    single, double = small_net(), small_net()
    options: dict[str, Any] = {"policy": "full", "bn": "frozen", "scheduler": None, "epochs": 2}
    run(model=single, data=pairs, **options)
    run(model=double, data=data, accumulate=2, **options)
    for a, b in zip(single.parameters(), double.parameters()):
        assert torch.allclose(a, b, atol=1e-6)


def test_an_unfinished_group_is_not_lost() -> None:
    result = run(data=batches(5), accumulate=2, epochs=2, policy="full", interval=1)
    assert result.steps == 10


def test_clipping_bounds_the_step_of_what_trains() -> None:
    before = small_net()
    model = small_net()
    run(model=model, data=batches(1), epochs=1, clip=1e-3, scheduler=None, lr=1.0, policy="full")
    moved = sum(float((a - b).detach().pow(2).sum()) for a, b in zip(model.parameters(), before.parameters())) ** 0.5
    assert 0 < moved <= 1e-3 * 1.01


def test_cosine_ends_at_zero_and_none_stays() -> None:
    for scheduler, final in (("cosine", 0.0), (None, 0.05)):
        model = small_net()
        optimizer = make_optimizer("sgd", model.parameters(), lr=0.05)
        fit(
            model, optimizer, cross_entropy, batches(4), epochs=2, scheduler=scheduler, profile=chain_profile(model),
            policy="elastic",
            progress=False,
        )  # fmt: skip
        assert optimizer.param_groups[0]["lr"] == pytest.approx(final, abs=1e-9)


def test_a_learning_rate_that_is_a_tensor_can_be_written_down_and_gone_on_with(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "epochs": 3, "profile": chain_profile(small_net()), "deterministic": True, "policy": "elastic",
        "progress": False,
    }  # fmt: skip
    made = []
    for out, loss_fn in ((tmp_path / "whole", cross_entropy), (tmp_path / "run", interrupt_at(25))):
        model = small_net()
        with contextlib.suppress(KeyboardInterrupt):
            fit(
                model, torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.05)), loss_fn, batches(12), out=out,
                **options,
            )  # fmt: skip
        made.append(model)
    model = small_net(seed=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.05))
    fit(model, optimizer, cross_entropy, batches(12), out=tmp_path / "run", resume=True, **options)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), made[0].parameters()))
    assert not all(torch.equal(a, b) for a, b in zip(model.parameters(), made[1].parameters()))
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["lr"] for line in lines] == pytest.approx([0.0375, 0.0125, 0.0], abs=1e-6)


def test_a_scheduler_that_waits_for_a_metric_is_refused() -> None:
    model = small_net()
    optimizer = make_optimizer("sgd", model.parameters(), lr=0.05)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    with pytest.raises(ConfigError, match="ReduceLROnPlateau"):
        fit(model, optimizer, cross_entropy, batches(4), epochs=1, scheduler=plateau, progress=False)


def test_bf16_autocast_reaches_training_probe_and_evaluation() -> None:
    seen = set()

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        out = model(batch[0])
        seen.add(out.dtype)
        return nn.functional.cross_entropy(out.float(), batch[1])

    run(loss_fn=loss_fn, autocast="bf16", val_loader=batches(2))
    assert seen == {torch.bfloat16}


def test_any_task_any_batch() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    data = [{"x": torch.randn(3, 4), "y": torch.randn(3, 1)} for _ in range(5)]

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        return nn.functional.mse_loss(model(batch["x"]), batch["y"])

    result = run(model=model, data=data, loss_fn=loss_fn, val_loader=data, budget=0.9)
    assert result.accuracy == {"per_epoch": [None] * 3, "final": None, "of": "val"}
    assert result.loss["final"] == min(result.loss["val"])


def test_a_plain_data_loader() -> None:
    x, y = zip(*batches(6))
    data = DataLoader(TensorDataset(torch.cat(x), torch.cat(y)), batch_size=5, shuffle=True, drop_last=True)
    result = run(data=data, val_loader=data)
    assert result.batch_size == 5
    assert result.steps == 3 * 7


class ThirdParty(torch.optim.Optimizer):
    """As others write them: state in a list of its own kind, a setting outside the groups."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})
        self.least_norm = 0.1

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                    mean.lerp_(p.grad, 0.3)
                    p.sub_(mean / mean.norm().clamp(min=self.least_norm), alpha=group["lr"])


@pytest.mark.parametrize("profiled", [True, False])
def test_an_optimizer_of_a_third_party(tmp_path: Path, profiled: bool) -> None:
    prices = chain_profile(small_net()) if profiled else None
    options: dict[str, Any] = {
        "epochs": 4, "interval": 1, "profile": prices, "budget": "0.6x" if profiled else "1x", "deterministic": True,
        "policy": "elastic",
        "progress": False, "val_loader": batches(5, seed=1),
    }  # fmt: skip
    whole, model = small_net(), small_net()
    result = fit(whole, ThirdParty(whole.parameters(), lr=0.05), cross_entropy, batches(12), **options)
    assert result.config["optimizer"]["name"] == "ThirdParty"
    assert result.plans[0]["reason"] == "first"
    assert result.loss["per_epoch"][-1] < result.loss["per_epoch"][0]
    if profiled:
        with pytest.raises(KeyboardInterrupt):
            fit(
                model, ThirdParty(model.parameters(), lr=0.05), interrupt_at(70), batches(12), out=tmp_path / "run",
                **options,
            )  # fmt: skip
        again = small_net(seed=3)
        fit(
            again, ThirdParty(again.parameters(), lr=0.05), cross_entropy, batches(12), out=tmp_path / "run",
            resume=True, **options,
        )  # fmt: skip
        assert all(torch.equal(a, b) for a, b in zip(again.parameters(), whole.parameters()))


def test_a_bar_on_a_terminal() -> None:
    """In a process of its own, whose stderr is a terminal."""
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from loop_support import *\n"
        "from elastictrainer.runtime.loop import fit\n"
        "from elastictrainer.runtime.optimizers import make_optimizer\n"
        "model = small_net()\n"
        "fit(model, make_optimizer('sgd', model.parameters(), lr=0.1), cross_entropy, batches(4), epochs=2,\n"
        "    profile=chain_profile(model), val_loader=batches(1), policy='elastic')\n"
    )
    leader, follower = pty.openpty()
    done = subprocess.run(
        [sys.executable, "-c", code, str(Path(__file__).parent)], stderr=follower, stdout=subprocess.PIPE, check=False,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "200"}, timeout=120,
    )  # fmt: skip
    os.close(follower)
    shown = b""
    with contextlib.suppress(OSError):  # the end of a terminal that nobody writes to any more
        while chunk := os.read(leader, 65536):
            shown += chunk
    os.close(leader)
    text = shown.decode()
    assert (done.returncode, done.stdout) == (0, b""), text
    assert "\x1b[" in text
    for word in ("training", "8/8", "loss ", "accuracy ", "trained ", "of 0.5x", "epoch 1/2", "epoch 2/2"):
        assert word in text
    assert re.search(r"\d:\d\d", text)  # the time left


def test_tensorboard_gets_every_number_of_an_epoch(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run(tmp_path / "run", tensorboard=True, val_loader=batches(2, seed=1))
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    numbers = {k for k, v in lines[0].items() if isinstance(v, (int, float)) and k != "plan"}
    assert {"loss", "val_accuracy", "measured_ratio", "train_s"} <= numbers <= set(events.Tags()["scalars"])
    for name in numbers:
        logged = events.Scalars(name)
        assert [event.step for event in logged] == [line["step"] for line in lines]
        assert [event.value for event in logged] == pytest.approx([line[name] for line in lines], rel=1e-6)


def test_tensorboard_that_is_not_there_is_said_in_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ConfigError, match=r"elastictrainer\[tensorboard\]"):
        run(tmp_path / "run", tensorboard=True)
    with pytest.raises(ConfigError, match="tensorboard needs out="):
        run(tensorboard=True)


def test_plain_lines_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    model = small_net()
    fit(
        model, make_optimizer("sgd", model.parameters(), lr=0.1), cross_entropy, batches(4), epochs=2,
        profile=chain_profile(model), val_loader=batches(1), policy="elastic",
    )  # fmt: skip
    lines = capsys.readouterr().err.splitlines()
    assert [line.split("  ")[0] for line in lines] == ["epoch 1/2", "epoch 2/2"]
    assert "accuracy" in lines[0]
    assert "of 0.5x" in lines[0]
    assert "\x1b" not in lines[0]


# -- what it refuses, and how it stops -------------------------------------------------------------------------------


def test_a_run_is_never_overwritten(tmp_path: Path) -> None:
    run(tmp_path / "run")
    before = (tmp_path / "run" / "result.json").read_bytes()
    with pytest.raises(CheckpointError, match="not empty and nothing is overwritten"):
        run(tmp_path / "run")
    assert (tmp_path / "run" / "result.json").read_bytes() == before


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        with pytest.raises(CheckpointError, match="another process"):
            run(tmp_path / "run", resume=True)
        return cross_entropy(model, batch)

    run(tmp_path / "run", loss_fn=loss_fn, epochs=1, data=batches(1), policy="full")


def test_resuming_with_other_options_lists_all_that_differ(tmp_path: Path) -> None:
    run(tmp_path / "run", epochs=1)
    with pytest.raises(CheckpointError, match=r"epochs was 1, now 2; budget was '0.5x', now '0.7x'"):
        run(tmp_path / "run", epochs=2, budget="0.7x", resume=True)


def test_a_refused_resume_leaves_nothing_locked(tmp_path: Path) -> None:
    run(tmp_path / "run", epochs=1)
    for _ in range(2):
        with pytest.raises(CheckpointError, match="holds another run"):
            run(tmp_path / "run", epochs=2, resume=True)
        with pytest.raises(CheckpointError, match="nothing is overwritten"):
            run(tmp_path / "run", epochs=1)
    assert run(tmp_path / "run", epochs=1, resume=True).epochs == 1


@pytest.mark.parametrize("ends", [Killed(), OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))], ids=["kill", "full"])
def test_a_run_that_ended_while_it_began_can_begin_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: BaseException
) -> None:
    def replace(*names: Any) -> None:
        raise ends

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", replace)
        with pytest.raises((Killed, CheckpointError)):
            run(tmp_path / "run", epochs=1)
    left = [path.name for path in (tmp_path / "run").iterdir()]
    assert left == (["config.yaml.tmp"] if isinstance(ends, Killed) else [])
    assert run(tmp_path / "run", epochs=1, resume=True).epochs == 1


def test_a_notebook_goes_on_with_the_optimizer_it_has(tmp_path: Path) -> None:
    """The rate of an optimizer that has been stepped has moved along the schedule; it is the same run all the same."""
    options: dict[str, Any] = {
        "epochs": 3, "importance": "magnitude", "deterministic": True, "profile": chain_profile(small_net()),
        "progress": False,
    }  # fmt: skip
    whole, model = small_net(), small_net()
    fit(whole, make_optimizer("sgd", whole.parameters(), lr=0.1), cross_entropy, batches(12), **options)
    optimizer = make_optimizer("sgd", model.parameters(), lr=0.1)
    with pytest.raises(KeyboardInterrupt):
        fit(model, optimizer, interrupt_at(20), batches(12), out=tmp_path / "run", **options)
    assert optimizer.param_groups[0]["lr"] < 0.1
    fit(model, optimizer, cross_entropy, batches(12), out=tmp_path / "run", resume=True, **options)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), whole.parameters()))


def test_resuming_a_finished_run_gives_its_result_and_weights(tmp_path: Path) -> None:
    trained, fresh = small_net(), small_net(seed=5)
    first = run(tmp_path / "run", model=trained)
    second = run(tmp_path / "run", model=fresh, profile=chain_profile(small_net()), resume=True)
    assert second == first
    assert all(torch.equal(a, b) for a, b in zip(trained.parameters(), fresh.parameters()))


def test_a_kill_just_before_the_report_leaves_it_to_the_next_session(tmp_path: Path) -> None:
    result = run(tmp_path / "run")
    (tmp_path / "run" / "report.html").unlink()
    assert run(tmp_path / "run", resume=True) == result
    assert (tmp_path / "run" / "report.html").exists()


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "run", loss_fn=interrupt_at(15))
    other = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3))
    with pytest.raises(CheckpointError, match="network was"):
        run(tmp_path / "run", model=other, resume=True)


def interrupt_at(call: int) -> Any:
    """A loss whose n-th computation is when somebody presses Ctrl-C."""
    calls = iter(range(1, 10_000))

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        if torch.is_grad_enabled() and next(calls) == call:
            os.kill(os.getpid(), signal.SIGINT)
        return cross_entropy(model, batch)

    return loss_fn


def test_ctrl_c_finishes_the_step_saves_and_says_how_to_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = small_net()
    with pytest.raises(KeyboardInterrupt):
        fit(
            model, make_optimizer("sgd", model.parameters(), lr=0.1), interrupt_at(20), batches(12), epochs=3,
            profile=chain_profile(model), out=tmp_path / "run", importance="magnitude", policy="elastic",
        )  # fmt: skip
    assert "go on with resume=True (--resume)" in capsys.readouterr().err
    assert (tmp_path / "run" / "checkpoint").exists()
    assert not (tmp_path / "run" / "result.json").exists()
    result = fit(
        model, make_optimizer("sgd", model.parameters(), lr=0.1), cross_entropy, batches(12), epochs=3,
        profile=chain_profile(model), out=tmp_path / "run", importance="magnitude", policy="elastic", resume=True,
    )  # fmt: skip
    assert "going on from epoch" in capsys.readouterr().err
    assert result.steps == 36
    assert result.restarts == 1


def not_finite_at(call: int) -> Any:
    calls = iter(range(1, 10_000))

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        loss = cross_entropy(model, batch)
        if not torch.is_grad_enabled():
            return loss
        return loss * float("nan") if next(calls) == call else loss

    return loss_fn


def test_a_loss_that_is_not_finite_stops_at_its_step_and_keeps_what_was_good(tmp_path: Path) -> None:
    """Trap 12. The policy is `full`, so that calls with gradients are: flops of the one plan, then a step each."""
    with pytest.raises(TrainingError, match=r"the loss is nan at step 17; .*the last good checkpoint: .*save-00000001"):
        run(tmp_path / "run", policy="full", loss_fn=not_finite_at(18))
    state = checkpoint.Checkpoints(tmp_path / "run" / "checkpoint").load()
    assert state is not None
    assert state["record"]["step"] == 12
    assert all(value.isfinite().all() for value in state["weights"].values() if value.is_floating_point())
    # Word of it is left for whoever runs many, and taken back once the run is tried again.
    word = tmp_path / "run" / "diverged.json"
    assert "the loss is nan at step 17" in json.loads(word.read_text())["diverged"]
    run(tmp_path / "run", policy="full", resume=True)
    assert not word.exists()


def test_weights_that_are_not_finite_are_not_saved(tmp_path: Path) -> None:
    def steep(model: nn.Module, batch: Any) -> Tensor:
        return cross_entropy(model, batch) * 1e37  # finite, and so are its gradients; the step is not

    with pytest.raises(TrainingError, match="is not finite after step 1"):
        run(tmp_path / "run", policy="full", lr=1e6, loss_fn=steep, data=batches(1), epochs=9)
    assert checkpoint.Checkpoints(tmp_path / "run" / "checkpoint").load() is None


def exhausted_at(call: int, error: Exception) -> Any:
    calls = iter(range(1, 10_000))

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        if next(calls) == call:
            raise error
        return cross_entropy(model, batch)

    return loss_fn


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        MemoryError(),
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: you ..."
        ),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("MPS backend out of memory (MPS allocated: 17.94 GB)"),
    ],
    ids=["cuda", "python", "host", "cublas", "mps"],
)
def test_out_of_memory_says_what_would_fit_and_where_to_go_on(tmp_path: Path, error: Exception) -> None:
    with pytest.raises(
        TrainingError, match=r"out of memory at step \d+: the plan .* would hold .*; the last good checkpoint: .*save-"
    ) as caught:
        run(tmp_path / "run", importance="magnitude", budget="0.9x", loss_fn=exhausted_at(45, error), feedback=False)
    assert "memory='0MiB'" not in str(caught.value)


def test_memory_that_the_system_really_refuses() -> None:
    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        return cross_entropy(model, batch) + torch.empty(1 << 60).sum()

    with pytest.raises(TrainingError, match="out of memory at step 1"):
        run(importance="magnitude", loss_fn=loss_fn, feedback=False)


def test_other_errors_pass_unchanged() -> None:
    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        raise RuntimeError("a bug of the user's own")

    with pytest.raises(RuntimeError, match="a bug of the user's own"):
        run(loss_fn=loss_fn)


def test_a_full_disk_stops_with_one_line_and_keeps_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, written = checkpoint.save_file, []

    def fills_up(tensors: Any, path: Path, metadata: Any = None) -> None:
        if len(written) >= 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written.append(path)
        real(tensors, path, metadata=metadata)

    monkeypatch.setattr(checkpoint, "save_file", fills_up)
    with pytest.raises(CheckpointError, match="No space left on device") as caught:
        run(tmp_path / "run", epochs=9)
    assert "\n" not in str(caught.value)
    monkeypatch.undo()
    assert run(tmp_path / "run", epochs=9, resume=True).epochs == 9


@pytest.mark.skipif(os.name != "posix", reason="limits of file sizes are POSIX")
def test_what_the_system_really_refuses_to_write(tmp_path: Path) -> None:
    """The kernel stops the checkpoint's file half-way, as a full disk does."""
    import resource

    run_options: dict[str, Any] = {"epochs": 4, "checkpoint_every": "1h", "interval": 4}
    run(tmp_path / "whole", **run_options)
    size = (tmp_path / "whole" / "checkpoint" / "save-00000004" / "tensors.safetensors").stat().st_size
    model = small_net()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limited(model: nn.Module, batch: Any) -> Tensor:
        if len(list((tmp_path / "run" / "checkpoint").glob("save-*"))) == 2:
            resource.setrlimit(resource.RLIMIT_FSIZE, (size // 2, hard))
        return cross_entropy(model, batch)

    try:
        with pytest.raises(
            CheckpointError, match=r"File too large.*the one before \(save-00000002\) is kept"
        ) as caught:
            run(tmp_path / "run", model=model, loss_fn=limited, **run_options)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "\n" not in str(caught.value)
    assert not list((tmp_path / "run" / "checkpoint").glob("*.tmp"))
    assert run(tmp_path / "run", resume=True, **run_options).epochs == 4


def test_a_data_set_that_vanishes_is_named_and_the_run_can_go_on(tmp_path: Path) -> None:
    class Vanishing(list[Any]):
        gone_from = 17

        def __iter__(self) -> Any:
            for batch in super().__iter__():
                Vanishing.gone_from -= 1
                if Vanishing.gone_from == 0:
                    raise FileNotFoundError(2, "No such file or directory", "/data/birds")
                yield batch

    with pytest.raises(DataError, match="/data/birds: it was there when training began and is gone"):
        run(tmp_path / "run", data=Vanishing(batches(12)))
    assert run(tmp_path / "run", resume=True).steps == 36


def test_all_wrong_settings_are_reported_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        run(epochs=0, accumulate=0, clip=-1.0, early_stop=2, resume=True, autocast="int8")
    for word in ("epochs", "accumulate", "clip", "early_stop", "resume", "autocast"):
        assert word in str(caught.value)


def test_a_budget_that_cannot_be_met_names_the_least() -> None:
    with pytest.raises(BudgetError):
        run(budget="0.01x")


def test_a_time_that_is_too_short_is_answered_with_a_time_for_the_run() -> None:
    with pytest.raises(
        BudgetError, match=r"budget 3s is too little for \d+ epochs of \d+ steps: the least is"
    ) as caught:
        run(budget="3s")
    assert caught.value.least is not None
    run(budget=f"{caught.value.least * 1.01}s")  # what it says would do, does


@pytest.mark.parametrize("measure", ["loss", "metric"])
def test_a_validation_of_nan_is_worse_than_any_other(measure: str) -> None:
    nan = Score(float("nan"), float("nan") if measure == "metric" else None, 1)
    number = Score(9.0, -9.0 if measure == "metric" else None, 1)
    assert number.better_than(nan)
    assert not nan.better_than(number)
    assert not nan.better_than(nan)


def test_loss_and_metric_of_a_validation_batch_share_a_forward_pass() -> None:
    model = small_net()
    calls = []
    model.register_forward_hook(lambda *_: calls.append(1))
    model.eval()
    data = batches(5)
    score = evaluate(model, cross_entropy, data, metric=top1, device=torch.device("cpu"))
    assert len(calls) == 10  # asked for twice a batch,
    assert "forward" not in model.__dict__
    computed = []
    plain = model[0].forward
    model[0].forward = lambda x: computed.append(1) or plain(x)  # type: ignore[method-assign]
    assert evaluate(model, cross_entropy, data, metric=top1, device=torch.device("cpu")) == score
    assert len(computed) == 5  # and made once
    with torch.no_grad():
        right = sum(int((model(x).argmax(1) == y).sum()) for x, y in data)
    assert score.accuracy == right / 30


def test_evaluation_repeats_a_pass_that_is_listened_to_from_inside() -> None:
    """Features taken by a hook: the answer alone would leave whoever waits for the hook with nothing."""
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))

    def features(model: nn.Module, batch: Any) -> Tensor:
        given: list[Tensor] = []
        with model[1].register_forward_pre_hook(lambda module, args: given.append(args[0])):
            model(batch[0])
        return given[0]

    evaluate(
        model,
        lambda model, batch: features(model, batch).square().mean(),
        [(torch.randn(4, 3), torch.zeros(4))],
        metric=lambda model, batch: (features(model, batch).sum(), 4),
        device=torch.device("cpu"),
    )

"""`elastictrainer doctor`."""

from __future__ import annotations

import json
import os

import pytest

from elastictrainer.cli import doctor, trials


def test_the_examination_ends_well_here_and_names_every_subject(main):
    code, out, err = main("doctor", "--quick", "--json", "--device", "cpu")
    assert (code, err) == (0, "")
    document = json.loads(out)
    assert document["ok"] is True
    names = [check["name"] for check in document["checks"]]
    assert names[:7] == ["python", "torch", "device", "threads", "memory", "disk", "energy of cpu"]
    assert {f"extra {extra}" for extra in doctor.optional_packages()} <= set(names)


def test_plain_lines_in_a_pipe(main):
    code, out, err = main("doctor", "--quick", "--device", "cpu")
    assert (code, err) == (0, "")
    assert out.startswith("check")
    assert "\x1b" not in out


def test_the_trials_are_announced_where_a_person_waits(main, monkeypatch):
    monkeypatch.setattr(trials, "attempt", lambda name, device: None)
    assert "--quick leaves it out" in main("doctor", "--device", "cpu")[2]
    assert main("doctor", "--device", "cpu", "--json")[2] == ""


def test_what_is_missing_comes_with_what_to_install(monkeypatch):
    monkeypatch.setattr(doctor, "_installed", lambda package: package != "timm")
    lines = {check.name: check for check in doctor._extras()}
    assert lines["extra vision"].status == "missing"
    assert lines["extra vision"].found == "without timm"
    assert lines["extra vision"].advice == "pip install 'elastictrainer[vision]'"


def test_a_system_that_does_not_tell_its_memory_is_no_failure(monkeypatch):
    monkeypatch.delattr(os, "sysconf")  # as on Windows
    assert doctor._memory().status == "missing"


def test_a_device_that_is_not_there_is_wrong_use(main):
    for name in ("abacus", "meta"):
        code, _, err = main("doctor", "--quick", "--device", name)
        assert code == 2
        assert f"device '{name}' cannot be used" in err


def test_deterministic_mode_is_really_tried():
    assert trials.attempt("deterministic", "cpu") is None


def test_a_trial_that_fails_says_why_in_one_line():
    reason = trials.attempt("deterministic", "abacus")
    assert reason is not None
    assert "abacus" in reason
    assert "\n" not in reason


def test_a_trial_that_hangs_is_given_up():
    assert trials.attempt("deterministic", "cpu", timeout_s=0.01) == "gave up after 0.01 s"


def test_a_failed_trial_is_a_choice_and_not_a_failure(monkeypatch):
    monkeypatch.setattr(trials, "attempt", lambda name, device: "no compiler")
    assert [check.status for check in doctor._trials("cpu")] == ["missing", "missing"]


def test_a_broken_torch_fails_the_examination(main, monkeypatch):
    broken = doctor.Check("torch", "broken", "libc10.so: cannot open shared object file", "install it again")
    monkeypatch.setattr(doctor, "_broken_torch", lambda: broken)
    code, out, _ = main("doctor", "--json")
    assert code == 1
    assert json.loads(out)["ok"] is False


@pytest.mark.parametrize("seed", [0, 7])
def test_the_machine_is_prepared_the_same_way_twice(seed):
    import random

    import numpy as np
    import torch

    from elastictrainer.cli.machine import prepare
    from elastictrainer.runtime.untouched import untouched

    def draw() -> tuple[float, float, float]:
        prepare("cpu", seed=seed)
        return random.random(), float(np.random.rand()), float(torch.rand(()))  # noqa: NPY002

    with untouched(torch.nn.Identity()):
        assert draw() == draw()


def test_a_seed_that_no_generator_takes_is_wrong_use():
    from elastictrainer.cli.machine import prepare
    from elastictrainer.errors import ConfigError

    with pytest.raises(ConfigError, match="below 2"):
        prepare("cpu", seed=2**63)

"""The time-model suite on its smallest case: what a row holds, and files of their own for every setting."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_a_row_says_what_asking_the_price_takes_and_sizes_do_not_overwrite_each_other(tmp_path: Path) -> None:
    pytest.importorskip("torchvision")
    for size in (32, 48):
        subprocess.run(
            [
                sys.executable, str(ROOT / "benchmarks" / "time_model.py"), "--models", "mobilenet_v2", "--image-size",
                str(size), "--plans", "2", "--rounds", "1", "--effort", "12", "--out", str(tmp_path),
            ],
            check=True, capture_output=True, timeout=300,
        )  # fmt: skip
        with (tmp_path / f"time_model_cpu_t1_b4_{size}px_off.csv").open(newline="") as file:
            (row,) = csv.DictReader(file)
        assert row["image"] == str(size)
        assert float(row["step_s_us"]) > 0
    assert len(list(tmp_path.glob("time_model_plans_*.csv"))) == 2


def test_each_model_gets_its_share_of_the_time_and_none_begins_that_would_not_end():
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        from time_model import Clock
    finally:
        sys.path.pop(0)
    time = iter([0.0, 0.0, 30.0, 40.0, 55.0, 60.0, 85.0, 90.0])
    clock = Clock(100.0, lambda: next(time))
    assert clock.begins(2)  # at 0, with 50 s
    assert clock.another(10.0)  # at 30: the profile and a round took 30 s
    assert not clock.another(10.0)  # at 40: the next round would end with the share
    assert clock.begins(1)  # at 55, with 45 s
    assert clock.another(15.0)  # at 60
    assert not clock.another(20.0)  # at 85
    assert not clock.begins(1)  # at 90: 10 s are no room for what took 30
    assert Clock(None).begins(10)


@pytest.mark.slow
def test_what_there_was_no_time_for_is_run_when_resumed(tmp_path: Path) -> None:
    def run(*more: str) -> list[dict[str, str]]:
        command = [
            sys.executable, str(ROOT / "benchmarks" / "time_model.py"), "--models", "lstm,bert_base", "--tokens", "4",
            "--batch-size", "1", "--plans", "2", "--rounds", "9", "--effort", "12", "--out", str(tmp_path), *more,
        ]  # fmt: skip
        told = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout
        assert ("left for --resume, for want of time: bert_base" in told) == ("--minutes" in more)
        with (tmp_path / "time_model_cpu_t1_b1_224px_off.csv").open(newline="") as file:
            return list(csv.DictReader(file))

    (first,) = run("--minutes", "0.001")
    assert (first["model"], first["rounds_done"]) == ("lstm", "1")
    again = run("--resume", "--models", "lstm")
    assert again == [first]

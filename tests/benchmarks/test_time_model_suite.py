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

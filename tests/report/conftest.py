"""Real run folders of a small network, made once, and a browser to look at their reports with."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import Browser, find_chromium

from elastictrainer.runtime.loop import fit
from elastictrainer.runtime.optimizers import make_optimizer

sys.path.insert(0, str(Path(__file__).parents[1] / "runtime"))
from loop_support import batches, chain_profile, cross_entropy, small_net

HOSTILE = "</script><script>document.title='owned'</script><img src=x onerror=document.title='owned'>"


def train(out: Path, *, model: str = "torchvision/resnet50", epochs: int = 4, lr: float = 0.1, **options: Any) -> Path:
    """A run folder: a real run of a small network, under the name of a real one."""
    net = small_net()
    told = {"model": model, "data": "birds", **options.pop("config", {})}
    options.setdefault("policy", "elastic")
    fit(
        net, make_optimizer("sgd", net.parameters(), lr=lr), cross_entropy, batches(20), epochs=epochs, out=out,
        profile=chain_profile(net), probe_batches=2, interval=1, val_loader=batches(4, seed=1),
        test_loader=batches(4, seed=2), progress=False, config=told,
        **options,
    )  # fmt: skip
    return out


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two networks; budgets, importances, seeds, full training at two lengths: every figure has something to show."""
    top = tmp_path_factory.mktemp("runs")
    made = [train(top / f"full-{s}", policy="full", seed=s) for s in (0, 1)]
    made += [train(top / "full-short", policy="full", epochs=2), train(top / "head", policy="head")]
    made += [train(top / f"elastic-{b}-{s}", budget=b, seed=s) for b in ("0.6x", "0.8x") for s in (0, 1)]
    made += [
        train(top / "magnitude", budget="0.6x", importance="magnitude"),
        train(top / "random", budget="0.6x", policy="random"),
    ]
    made += [
        train(top / f"other-{p}", policy=p, budget="0.6x", model="torchvision/mobilenet_v2")
        for p in ("full", "elastic")
    ]
    return made


@pytest.fixture(scope="session")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose every name is an attack: of its folder, its network, its data and its classes."""
    folder = tmp_path_factory.mktemp("hostile") / "<img src=x onerror=alert(1)>"
    return train(folder, model=HOSTILE, config={"data": HOSTILE, "classes": [HOSTILE, "`'\"&"]})


@pytest.fixture(scope="session")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    program = find_chromium()
    if program is None:
        pytest.skip("no Chromium here (Debian, Ubuntu: apt install chromium)")
    browser = Browser(program, tmp_path_factory.mktemp("chromium"))
    yield browser
    browser.close()


@pytest.fixture
def browser(chromium: Browser) -> Browser:
    """The browser as a desktop with nothing to complain of yet."""
    chromium.size(1280, 900)
    chromium.media("")
    chromium.errors.clear()
    chromium.requests.clear()
    return chromium

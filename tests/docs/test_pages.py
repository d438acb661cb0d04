"""What the pages tell people to type: Python blocks run, command lines exist."""

from __future__ import annotations

import importlib
import re
import shlex
from collections import OrderedDict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.main import get_command

from elastictrainer import data
from elastictrainer.cli.app import app, load_verbs

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
BLOCK = re.compile(r"^```(?P<language>\w+)\n(?P<code>.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(page: Path, language: str) -> list[str]:
    return [
        match["code"] for match in BLOCK.finditer(page.read_text(encoding="utf-8")) if match["language"] == language
    ]


def commands() -> list[tuple[str, list[str]]]:
    found = []
    for page in PAGES:
        for code in blocks(page, "sh"):
            for line in code.replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True)
                if words and words[0] == "elastictrainer":
                    found.append((page.name, words[1:]))
    return found


@pytest.mark.parametrize(
    ("page", "words"), commands(), ids=lambda value: value if isinstance(value, str) else " ".join(value)
)
def test_a_command_line_on_a_page_is_one_that_exists(page, words):
    load_verbs()
    verbs = get_command(app).commands
    assert words[0] in verbs, f"{page}: there is no verb {words[0]!r}"
    known = {spelling for option in verbs[words[0]].params for spelling in option.opts}
    used = {word.partition("=")[0] for word in words if word.startswith("--")}
    assert used <= known | {"--help"}, f"{page}: elastictrainer {words[0]} has no {', '.join(sorted(used - known))}"


def documented() -> list[Any]:
    """What the reference shows: the modules that its pages name, and their public members or the ones listed."""
    found = []
    shown = re.compile(r"^::: (\S+)(?:\n    options: \{ members: \[(.*)\] \})?$", re.MULTILINE)
    for page in (ROOT / "docs" / "reference").glob("*.md"):
        for path, listed in shown.findall(page.read_text(encoding="utf-8")):
            try:
                module = importlib.import_module(path)
            except ModuleNotFoundError:  # a page on one thing of a module
                owner, _, name = path.rpartition(".")
                found.append(getattr(importlib.import_module(owner), name))
                continue
            members = listed.split(", ") if listed else getattr(module, "__all__", ())
            found += [module, *(getattr(module, name) for name in members)]
    return found


def test_everything_public_is_in_the_reference():
    import elastictrainer as et

    shown = documented()
    public = {name: getattr(et, name) for name in et.__all__ if name != "__version__"}
    assert not [name for name, thing in public.items() if not any(thing is found for found in shown)]


def surroundings() -> dict[str, Any]:
    """What a page that says `model` or `loader` without making one takes for granted."""
    import elastictrainer as et

    torch.manual_seed(0)
    body = {f"layer{number}": nn.Sequential(nn.Linear(384, 384), nn.ReLU()) for number in range(8)}
    model = nn.Sequential(OrderedDict(body, fc=nn.Linear(384, 3)))
    batches = [(torch.randn(64, 384), torch.randint(3, (64,))) for _ in range(30)]
    return {
        "et": et,
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
        "loss_fn": lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
        "batch": batches[0],
        "step": 0,
        "evaluate": lambda model: None,
        **dict.fromkeys(("batches", "loader", "train_loader", "val_loader"), batches),
    }


# The pages on the method show parts of code, these show code to paste.
TO_PASTE = [page for page in PAGES if blocks(page, "python") and page.parent.name != "method"]


@pytest.mark.slow
@pytest.mark.parametrize("page", TO_PASTE, ids=lambda page: page.stem)
def test_the_python_on_a_page_runs_when_pasted(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # The README has to stand alone; other pages continue what a reader has.
    namespace = {} if page.name == "README.md" else surroundings()
    if page.name == "README.md":  # smaller, to be quicker; the line that loads is still the page's
        monkeypatch.setattr(data, "load_model", partial(data.load_model, image_size=32))
    # Half as long; a run much shorter has no time for finding out what a step costs.
    code = [block.replace("epochs=12", "epochs=6") for block in blocks(page, "python")]
    if any("pi.json" in block for block in code):
        profile = namespace["et"].profile(namespace["model"], namespace["loss_fn"], namespace["batch"])
        Path("pi.json").write_text(profile.to_json())
    for number, block in enumerate(code):
        exec(compile(block, f"{page.name} block {number}", "exec"), namespace)

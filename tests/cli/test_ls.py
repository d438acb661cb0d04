"""`elastictrainer ls`."""

from __future__ import annotations

import json

import pytest

from elastictrainer.compare import SHORTER
from elastictrainer.fewshot.methods import METHODS
from elastictrainer.importance import IMPORTANCES
from elastictrainer.policies import POLICIES


@pytest.mark.parametrize(
    ("what", "registry"), [("policies", POLICIES), ("importances", IMPORTANCES), ("methods", METHODS)]
)
def test_a_registry_is_listed_in_full_with_one_line_each(main, what, registry):
    code, out, err = main("ls", what, "--json")
    assert (code, err) == (0, "")
    listed = json.loads(out)[what]
    if what == "policies":
        assert listed.pop()["name"] == SHORTER
    assert [entry["name"] for entry in listed] == list(registry)
    for entry in listed:
        assert entry["description"]
        assert "\n" not in entry["description"]
        assert entry.get("paper") == getattr(registry[entry["name"]], "paper", None)


def test_all_shelves_are_listed_and_models_are_summed_up(main):
    pytest.importorskip("torchvision")
    code, out, err = main("ls")
    assert (code, err) == (0, "")
    for title in ("models (--model)", "policies (--policy)", "importances (--importance)", "datasets (--data)"):
        assert title in out
    assert "torchvision/..." in out
    assert "\x1b" not in out
    assert len(out.splitlines()) < 100


def test_models_by_pattern(main):
    pytest.importorskip("torchvision")
    code, out, _ = main("ls", "models", "torchvision/resnet*", "--json")
    names = [entry["name"] for entry in json.loads(out)["models"]]
    assert code == 0
    assert "torchvision/resnet50" in names
    assert all(name.startswith("torchvision/resnet") for name in names)


def test_what_does_not_exist_is_wrong_use(main):
    code, out, err = main("ls", "models", "no-such-*")
    assert (code, out) == (2, "")
    assert "no-such-*" in err
    assert main("ls", "planets")[0] == 2

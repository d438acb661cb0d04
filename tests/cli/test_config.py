"""One YAML file that holds any option of a verb."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_the_file_fills_in_and_the_command_line_wins(run, seen, tmp_path):
    file = write(tmp_path / "c.yaml", "model: resnet18\nbatch_size: 8\nlr: 1e-3\nbudget: 0.5\npin: [head, layer4.*]\n")
    assert run("show", "--config", file, "--lr", "0.5")[0] == 0
    assert seen[0]["model"] == "resnet18"
    assert seen[0]["batch_size"] == 8
    assert seen[0]["lr"] == 0.5
    assert seen[0]["budget"] == "0.5"
    assert seen[0]["pin"] == ["head", "layer4.*"]
    assert seen[0]["deterministic"] is False


def test_a_list_on_the_command_line_replaces_the_files(run, seen, tmp_path):
    file = write(tmp_path / "c.yaml", "model: m\npin: [a, b]\n")
    run("show", "--pin", "c", "--config", file)
    assert seen[0]["pin"] == ["c"]


def test_flags_paths_null_and_both_spellings(run, seen, tmp_path):
    file = write(
        tmp_path / "c.yaml", "model: m\ndeterministic: true\nout: runs/a\nbatch-size: 2\nbudget: null\npin: head\n"
    )
    assert run("show", "--config", file)[0] == 0
    assert seen[0]["deterministic"] is True
    assert seen[0]["out"] == Path("runs/a")
    assert seen[0]["batch_size"] == 2
    assert seen[0]["budget"] is None
    assert seen[0]["pin"] == ["head"]


def test_an_empty_file_changes_nothing(run, seen, tmp_path):
    assert run("show", "--model", "m", "--config", write(tmp_path / "c.yaml", "# nothing\n"))[0] == 0
    assert seen[0]["batch_size"] == 4


def test_debug_is_a_key_too(run, tmp_path):
    _, _, err = run("fail", "bug", "--config", write(tmp_path / "c.yaml", "debug: true\n"))
    assert err.startswith("Traceback")


def test_everything_wrong_is_reported_at_once_with_the_files_name(run, seen, tmp_path):
    file = write(
        tmp_path / "c.yaml",
        "modle: m\nbatch_size: 0\nlr: fast\nbudget: half\ndeterministic: 3\nout: [a, b]\nzebra: 1\nconfig: c.yaml\n",
    )
    code, out, err = run("show", "--model", "m", "--config", file)
    assert (code, out, seen) == (2, "", [])
    assert err.count("\n") == 1
    assert str(file) in err
    for said in (
        "'modle' (did you mean 'model'?)",
        "batch_size:",
        "lr:",
        "budget:",
        "deterministic:",
        "out:",
        "'zebra'",
    ):
        assert said in err
    assert "unknown key 'config'" in err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: b: c\n", "line 1, column 5"),
        ("- model\n", "holds a list"),
        ("just words\n", "holds a str"),
        ("model: m\n\tlr: 1\n", "line 2"),
    ],
)
def test_a_file_that_is_no_mapping_is_one_line_and_2(run, tmp_path, text, said):
    file = write(tmp_path / "c.yaml", text)
    code, out, err = run("show", "--config", file)
    assert (code, out) == (2, "")
    assert str(file) in err
    assert said in err
    assert err.count("\n") == 1


def test_a_file_that_cannot_be_read(run, tmp_path):
    assert run("show", "--config", tmp_path / "none.yaml")[2].endswith("none.yaml: No such file or directory\n")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    assert "not a text file" in run("show", "--config", tmp_path / "binary.yaml")[2]


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    values=st.fixed_dictionaries(
        {"model": st.from_regex(r"[a-z][a-z0-9_.]{0,12}", fullmatch=True)},
        optional={
            "batch-size": st.integers(1, 4096),
            "lr": st.floats(0, 10, allow_nan=False),
            "deterministic": st.booleans(),
            "pin": st.lists(st.from_regex(r"[a-z][a-z0-9.*]{0,8}", fullmatch=True), min_size=1, max_size=3),
        },
    )
)
def test_a_file_says_the_same_as_a_command_line(run, seen, tmp_path, values):
    typed: list[str] = []
    for key, value in values.items():
        if value is True:
            typed.append(f"--{key}")
        elif value is not False:
            for item in value if isinstance(value, list) else [value]:
                typed += [f"--{key}", str(item)]
    assert run("show", *typed)[0] == 0
    assert run("show", "--config", write(tmp_path / "c.yaml", yaml.safe_dump(values)))[0] == 0
    assert seen[-1] == seen[-2]

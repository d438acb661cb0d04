"""Exit codes, one-line errors, and what goes where."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import subprocess
import sys
from itertools import pairwise

import pytest

from elastictrainer import __version__
from elastictrainer.cli import main, output
from elastictrainer.cli.app import VERBS
from elastictrainer.cli.output import Output


@pytest.mark.parametrize(
    ("kind", "code", "said"),
    [
        ("budget", 1, "budget 0.1x cannot be met; the least is 0.3x"),
        ("config", 2, "model 'x' is not known"),
        ("bug", 1, "KeyError: 'x' (--debug shows where)"),
        ("file", 1, "weights.pth: No such file or directory"),
    ],
)
def test_an_error_is_one_line_on_stderr_and_an_exit_code(run, kind, code, said):
    assert run("fail", kind) == (code, "", f"elastictrainer: error: {said}\n")


def test_debug_shows_the_traceback_and_the_line_last(run):
    code, out, err = run("fail", "bug", "--debug")
    assert (code, out) == (1, "")
    assert err.startswith("Traceback")
    assert err.splitlines()[-1].startswith("elastictrainer: error: KeyError")


def test_an_interrupt_is_one_line_and_130(run):
    assert run("fail", "interrupt") == (130, "", "elastictrainer: interrupted\n")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["show"], "'--model'"),
        (["show", "--model", "m", "--batch-size", "0"], "'--batch-size'"),
        (["show", "--model", "m", "--batch-size", "many"], "'--batch-size'"),
        (["show", "--model", "m", "--lr", "fast"], "'--lr'"),
        (["show", "--model", "m", "--budget", "half"], "neither a share ('0.5x') nor a time"),
        (["show", "--modle", "m"], "--modle"),
        (["show", "--model", "m", "more"], "more"),
        (["shwo"], "shwo"),
    ],
)
def test_wrong_use_is_one_line_and_2(run, seen, arguments, said):
    code, out, err = run(*arguments)
    assert (code, out, seen) == (2, "", [])
    assert said in err
    assert err.count("\n") == 1
    assert "--help" in err


def test_no_arguments_show_the_help(main):
    code, out, err = main()
    assert code in (0, 2)  # click before 8.2 thinks that this is no wrong use
    assert "Usage: elastictrainer" in out + err


def test_help_and_version_end_well(main):
    assert main("--version") == (0, f"elastictrainer {__version__}\n", "")
    code, out, err = main("--help")
    assert (code, err) == (0, "")
    assert "doctor" in out
    assert "..." not in out.partition("Commands:")[2]  # every verb says what it does, in whole


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help_with_examples(main, verb):
    code, out, err = main(verb, "--help")
    assert (code, err) == (0, "")
    assert f"\n  elastictrainer {verb}" in out
    assert "--config" in out


def test_help_on_a_terminal_breaks_lines_where_the_terminal_ends():
    code = "import sys; from elastictrainer.cli import main; sys.exit(main(['train', '--help']))"
    lines = on_a_terminal(code, NO_COLOR="1", COLUMNS="60").split("Options")[0].splitlines()
    start = next(number for number, line in enumerate(lines) if "Without options" in line)
    whole = lines[start : next(n for n in range(start, len(lines)) if not lines[n].strip())]
    # Greedy: the first word of a line had no room at the end of the one before.
    for line, following in pairwise(whole):
        assert len(line.rstrip()) + len(following.split()[0]) >= 58


def test_json_is_one_document_and_nothing_else(run):
    code, out, err = run("show", "--model", "m", "--json")
    assert (code, err) == (0, "")
    assert json.loads(out) == {"lr": 0.1}


def test_a_pipe_gets_plain_aligned_lines(run):
    code, out, _ = run("show", "--model", "m", "--lr", "0.25")
    assert code == 0
    assert out.splitlines() == ["some words", "name  value", "lr     0.25"]


def on_a_terminal(code: str, **environment: str) -> str:
    """What this Python code prints when its output is a terminal."""
    leader, follower = pty.openpty()
    there = {**os.environ, "TERM": "xterm", **environment}
    child = subprocess.Popen([sys.executable, "-c", code], stdout=follower, stderr=follower, env=there)
    os.close(follower)
    text = b""
    with contextlib.suppress(OSError):  # Linux says EIO when the other side has gone
        while some := os.read(leader, 10_000):
            text += some
    os.close(leader)
    assert child.wait() == 0
    return text.decode().replace("\r\n", "\n")


def test_a_terminal_gets_a_rich_table_and_no_colour_is_respected():
    code = "from elastictrainer.cli.output import Output; Output().table(('a', 'b'), [('[red]x', 1)])"
    assert "\x1b[" in on_a_terminal(code, NO_COLOR="")
    plain = on_a_terminal(code, NO_COLOR="1")
    assert "[red]x" in plain  # a name is never markup
    assert "\x1b[3" not in plain


def test_an_empty_table_prints_its_head(capsys):
    Output().table(("a", "b"), [], title="nothing")
    assert capsys.readouterr().out == "nothing\na  b\n"


def test_counting_is_a_bar_on_a_terminal_and_a_line_at_times_in_a_pipe(capsys, monkeypatch):
    code = (
        "from elastictrainer.cli.output import counting\n"
        "with counting('checking images', wanted=True) as count:\n"
        "    count(3, 8)"
    )
    bar = on_a_terminal(code)
    assert "checking images" in bar
    assert "3/8" in bar
    clock = iter([0.0, 29.0, 31.0, 31.0, 32.0, 62.0, 62.0])
    monkeypatch.setattr(output.time, "monotonic", lambda: next(clock))
    with output.counting("checking images", wanted=True) as count:
        for done in range(1, 5):
            count(done, 8)
    assert capsys.readouterr() == ("", "checking images 2/8\nchecking images 4/8\n")
    with output.counting("checking images", wanted=False) as count:
        assert count is None


def test_help_in_a_pipe_has_no_control_sequence(shell):
    done = shell("--help", FORCE_COLOR="")
    assert done.returncode == 0
    assert "\x1b" not in done.stdout + done.stderr


def test_a_reader_that_goes_away_is_no_error():
    code = "import sys; from elastictrainer.cli import main; sys.exit(main(['--help']))"
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run([sys.executable, "-c", code], stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, "")


def test_threads_wait_briefly_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    main(["--version"])
    assert os.environ["GOMP_SPINCOUNT"] == "7"
    monkeypatch.delenv("GOMP_SPINCOUNT")
    main(["--version"])
    assert int(os.environ["GOMP_SPINCOUNT"]) > 0

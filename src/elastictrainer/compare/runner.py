"""Running a comparison: every cell an `elastictrainer train` in a process of its own.

So one cell's memory, crash or threads are no other's, and anyone can type what was run.

out/
  comparison.yaml     what was asked; a file for `elastictrainer compare --config`
  train.yaml          the options that all cells share; a file for `elastictrainer train --config`
  cells/WORKLOAD/METHOD-lrLR-sSEED/         a run folder each; ...-trial: trials of learning rates, without weights
  profiles/           with `jobs`: the prices of each workload, taken while nothing else ran
  profile.yaml        and what `elastictrainer profile --config` was told for them
  logs/               what each cell printed
  pixels/             decoded images, so that only the first cell of a dataset decodes
  results.csv         a row a finished cell
  report.html         the final cells side by side

What is done is what the run folders say: there is no other record that could disagree with them.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import yaml

from elastictrainer.compare.board import Board, Progress
from elastictrainer.compare.grid import Cell, Grid, Method, Workload
from elastictrainer.compare.table import write_table
from elastictrainer.errors import CheckpointError
from elastictrainer.report import write_comparison
from elastictrainer.runtime.checkpoint import reason, write_atomically
from elastictrainer.runtime.run_folder import DIVERGED

__all__ = ["Comparison", "Outcome"]

_GROWS = ("model", "weights", "data", "policy", "importance", "budget", "lr", "seed")
_PRICED = (
    "model-options", "normalize", "image-size", "batch-size", "optimizer", "autocast", "graphs", "bn", "device",
    "threads",
)  # fmt: skip
"""Which of the options that cells share change what a step costs."""
_POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a comparison: the finished final cells, what failed and why, remarks, and where it all is.

    `jobs`: the most cells that ever ran at a time. Above 1, seconds and memory mean nothing.
    """

    finals: tuple[Cell, ...]
    failed: dict[str, str]
    remarks: tuple[str, ...]
    csv: Path
    report: Path | None
    jobs: int


@dataclass(slots=True)
class _Running:
    cell: Cell
    process: subprocess.Popen[bytes]
    log: IO[bytes]
    since: float = field(default_factory=time.monotonic)


class Comparison:
    """A grid, run in a folder.

    Args:
        shared: the options of `elastictrainer train` that all cells have in common, by their keys in its YAML file.
        asked: the whole comparison, by the keys of `elastictrainer compare`; kept in `comparison.yaml`.
        jobs: cells at a time. More than one is for accuracies: seconds and memory then tell nothing. So that they are
            those of undisturbed cells, all plan by prices that were taken alone, and methods whose training hangs on
            the clock (`Method.by_clock`) still run alone.
        keep_weights: of finished final cells. What only serves to go on, and the weights of trials, always goes.

    Raises:
        CheckpointError: the folder holds another comparison, or one that was not asked to be continued.
    """

    def __init__(
        self,
        grid: Grid,
        out: Path,
        *,
        shared: Mapping[str, Any],
        asked: Mapping[str, Any],
        resume: bool = False,
        jobs: int = 1,
        keep_weights: bool = True,
        board: Board | None = None,
    ) -> None:
        self.grid, self.out, self.jobs, self.keep_weights = grid, out, jobs, keep_weights
        self.shared = dict(shared)
        self.most_jobs = jobs  # at any time of this comparison, however often it was continued
        self.failed: dict[str, str] = {}
        self._open(dict(shared), dict(asked), resume)
        self.progress = Progress(grid, out, jobs)
        self.board = board
        for workload in grid.workloads:  # so that tables hold, all along, what was finished before
            if all(has_ended(grid.under(out, cell)) for cell in grid.trials(workload)):
                self.progress.rates.update({(workload, m): rate for m, rate in self._rates(workload).items()})

    def run(self) -> Outcome:
        """Run what is left. Ctrl-C lets the running cells write a checkpoint first.

        Costs, besides the cells themselves, the start of a process for each: some seconds.
        """
        remarks: list[str] = []
        self._write_table()  # of what is asked for now, however soon this is stopped
        if self.most_jobs > 1:
            remarks.append(f"Up to {self.most_jobs} cells ran at a time: accuracies count, seconds and memory do not.")
        for workload in self.grid.workloads:
            self._run([self.grid.under(self.out, cell) for cell in self.grid.trials(workload)])
            rates = self._rates(workload)
            self._judge(workload, rates, remarks)
            self.progress.rates.update({(workload, method): rate for method, rate in rates.items()})
            self._run([self.grid.under(self.out, cell) for cell in self.grid.finals(workload, rates)])
        return self._outcome(remarks)

    # -- the folder --------------------------------------------------------------------------------------------------

    def _open(self, shared: dict[str, Any], asked: dict[str, Any], resume: bool) -> None:
        kept = self.out / "comparison.yaml"
        try:
            if kept.exists():
                before = yaml.safe_load(kept.read_text(encoding="utf-8"))
                before = before if isinstance(before, dict) else {}
                self._check_same(before, asked, resume)
                self._check_workloads()
                self.most_jobs = max(self.jobs, int(before.get("jobs") or 1))
            elif self.out.exists() and any(self.out.iterdir()) and not resume:
                raise CheckpointError(f"{self.out} is not empty and nothing is overwritten; choose another folder")
            (self.out / "logs").mkdir(parents=True, exist_ok=True)
            if self.most_jobs > 1:
                asked["jobs"] = self.most_jobs
            write_atomically(kept, yaml.safe_dump(asked, sort_keys=False, allow_unicode=True))
            write_atomically(self.out / "train.yaml", yaml.safe_dump(shared, sort_keys=False, allow_unicode=True))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise CheckpointError(f"cannot keep a comparison in {self.out}: {reason(error)}") from error

    def _check_same(self, before: dict[str, Any], asked: dict[str, Any], resume: bool) -> None:
        """A comparison may grow by models, policies, seeds and the like; what all its cells share may not change."""
        if not resume:
            raise CheckpointError(f"{self.out} holds a comparison; go on with it by --resume, or choose another folder")
        differ = [
            f"{key} was {before.get(key)!r}, now {asked.get(key)!r}"
            for key in dict.fromkeys((*before, *asked))
            if key not in (*_GROWS, "jobs") and before.get(key) != asked.get(key)
        ]
        if differ:
            raise CheckpointError(
                f"{self.out} holds another comparison: {'; '.join(differ)}; ask for the same, or choose another folder"
            )

    def _check_workloads(self) -> None:
        """That every workload's folder holds this workload: other weights, or names in another order, would else make
        one's finished cells another's."""
        for workload in self.grid.workloads:
            place = self.grid.cell(workload, self.grid.methods[0], self.grid.rates[0], 0, stage="final").folder.parent
            config = next(iter(sorted((self.out / place).glob("*/config.yaml"))), None)
            if config is None:
                continue
            told = (yaml.safe_load(config.read_text(encoding="utf-8")) or {}).get("command") or {}
            held = Workload(str(told.get("model")), str(told.get("data")), told.get("weights"))
            if told and not _same(held, workload):
                raise CheckpointError(
                    f"{self.out / place} holds {_told(held)}, and would now hold {_told(workload)}; give models, data "
                    "and weights as they were, new ones after them, or choose another folder"
                )

    # -- cells -------------------------------------------------------------------------------------------------------

    def _run(self, cells: Sequence[Cell]) -> None:
        for cell in cells:
            if (why := diverged(cell)) is not None:
                self.failed[cell.name] = why
        waiting = [cell for cell in cells if not has_ended(cell)]
        if self.jobs > 1:
            waiting.sort(key=lambda cell: cell.method.by_clock)
        if any(not cell.method.by_clock for cell in waiting):
            self._price(waiting[0].workload)
        running: list[_Running] = []
        self._show(running)
        try:
            while waiting or running:
                while waiting and len(running) < self.jobs and _may_join(waiting[0], running):
                    running.append(self._start(waiting.pop(0)))
                    self._show(running)
                for one in [one for one in running if one.process.poll() is not None]:
                    running.remove(one)
                    self._ended(one)
                    self._show(running)
                if self.board is not None:
                    self.board.tick(self.progress, [one.cell for one in running])
                time.sleep(_POLL_S)
        except KeyboardInterrupt:
            _stop(running)
            self._say(f"stopped: {self.progress.left()}; go on with --out {self.out} --resume")
            raise
        finally:
            for one in running:
                if one.process.poll() is None:
                    one.process.kill()
                one.log.close()

    def _show(self, running: Sequence[_Running]) -> None:
        if self.board is not None:
            self.board.show(self.progress, [one.cell for one in running])

    def command(self, cell: Cell) -> list[str]:
        """The command line of a cell, to be typed by anyone."""
        shared = ["--config", str(self.out / "train.yaml"), "--data-cache", str(self.out / "pixels")]
        return ["train", *shared, *self._prices(cell), *cell.arguments()]

    # -- prices for cells that share the machine ----------------------------------------------------------------------

    def _price(self, workload: Workload) -> None:
        """Take the prices that cells beside each other plan by, while nothing else runs. Without them each takes its
        own, disturbed as they are: what keeps a workload from being priced keeps its cells from training, and they say
        why."""
        path = self._profile(workload)
        if self.most_jobs == 1 or path.exists():
            return
        options = {key: self.shared[key] for key in _PRICED if key in self.shared}
        write_atomically(self.out / "profile.yaml", yaml.safe_dump(options, sort_keys=False, allow_unicode=True))
        path.parent.mkdir(exist_ok=True)
        told = {"--model": workload.model, "--weights": workload.weights, "--data": workload.data, "--out": str(path)}
        words = [word for option, value in told.items() if value is not None for word in (option, value)]
        self._say(f"prices: {workload.name}")
        with (self.out / "logs" / f"{path.stem}--profile.txt").open("wb") as log:
            subprocess.run(
                [sys.executable, "-m", "elastictrainer", "profile", "--config", str(self.out / "profile.yaml"),
                 "--data-cache", str(self.out / "pixels"), *words],
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, check=False,
                preexec_fn=_die_with_parent if sys.platform == "linux" else None,
            )  # fmt: skip

    def _profile(self, workload: Workload) -> Path:
        return self.out / "profiles" / f"{self.grid.folder(workload)}.json"

    def _prices(self, cell: Cell) -> list[str]:
        """Of a cell that shares the machine; one that began with prices of its own goes on with them."""
        path = self._profile(cell.workload)
        if self.most_jobs == 1 or cell.method.by_clock or not path.exists():
            return []
        kept = cell.folder / "config.yaml"
        begun = (yaml.safe_load(kept.read_text(encoding="utf-8")) or {}) if kept.exists() else {}
        if begun and not (begun.get("command") or {}).get("profile"):
            return []
        return ["--profile", str(path), "--no-feedback"]

    def _tidy(self, cell: Cell) -> None:
        """Of a cell that has ended, drop what only serves to go on: of hundreds of cells, thrice the weights."""
        shutil.rmtree(cell.folder / "checkpoint", ignore_errors=True)
        if cell.stage == "rate" or not self.keep_weights:
            for weights in cell.folder.glob("*.safetensors"):
                weights.unlink()

    # -- a cell ------------------------------------------------------------------------------------------------------

    def _start(self, cell: Cell) -> _Running:
        log = self._log(cell).open("wb")
        process = subprocess.Popen(
            [sys.executable, "-m", "elastictrainer", *self.command(cell)],
            stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is passed on once, by us
            preexec_fn=_die_with_parent if sys.platform == "linux" else None,
        )  # fmt: skip
        self._say(f"begins: {cell.name}")
        return _Running(cell, process, log)

    def _ended(self, one: _Running) -> None:
        one.log.close()
        cell = one.cell
        found = result(cell)
        if found is None:
            if (why := diverged(cell)) is None:
                why = _last_line(self._log(cell)) or f"ended with exit code {one.process.returncode}"
            elif cell.stage == "rate":  # of a final one the last good checkpoint may be wanted
                self._tidy(cell)
            self.failed[cell.name] = why
            self._say(f"failed: {cell.name}: {why}")
            return
        self.failed.pop(cell.name, None)
        self._tidy(cell)
        self.progress.ended(cell, time.monotonic() - one.since)
        accuracy = found["accuracy"]["final"]
        shown = "" if accuracy is None else f"{accuracy:.1%} ({found['accuracy']['of']}), "
        self._say(f"done: {cell.name}: {shown}{self.progress.left()}")
        self._write([])

    def _say(self, text: str) -> None:
        if self.board is not None:
            self.board.say(text)

    def _log(self, cell: Cell) -> Path:
        return self.out / "logs" / f"{cell.folder.parent.name}--{cell.folder.name}.txt"

    def _rates(self, workload: Workload) -> dict[Method, float]:
        """The rate of each method: the best on validation among those that have been tried; pure reading."""
        if not self.grid.tunes:
            return dict.fromkeys(self.grid.methods, self.grid.rates[0])
        tried: dict[Method, dict[float, float]] = {}
        for cell in self.grid.trials(workload):
            found = result(self.grid.under(self.out, cell))
            scores = [a for a in (found or {}).get("accuracy", {}).get("per_epoch", []) if a is not None]
            if scores:
                tried.setdefault(cell.method, {})[cell.lr] = max(scores)
        return {method: max(scores, key=lambda rate: scores[rate]) for method, scores in tried.items()}

    def _judge(self, workload: Workload, rates: Mapping[Method, float], remarks: list[str]) -> None:
        """After the trials. A rate that diverged is out, and no failure; a method without any rate is one."""
        for cell in self.grid.trials(workload):
            if cell.method in rates and cell.name in self.failed:
                remarks.append(f"{cell.name}: {self.failed.pop(cell.name)}")
        for method in self.grid.methods:
            if method not in rates:
                self.failed[f"{workload.name}: {method.name}"] = "no learning rate of the grid could be trained with"
        if self.grid.tunes:
            for end, rate in (("smallest", min(self.grid.rates)), ("largest", max(self.grid.rates))):
                if at_it := [method.name for method in self.grid.methods if rates.get(method) == rate]:
                    remarks.append(
                        f"{workload.name}: at the {end} lr of the grid, {rate:g}, these did best: {', '.join(at_it)}. "
                        "A wider grid might do them more justice."
                    )

    # -- what is left behind -----------------------------------------------------------------------------------------

    def _finished(self) -> list[Cell]:
        """Every cell of the grid with a result, trials first; finals at whatever rate was chosen."""
        cells = []
        for workload in self.grid.workloads:
            chosen = {m: r for (w, m), r in self.progress.rates.items() if w == workload}
            cells += [*self.grid.trials(workload), *self.grid.finals(workload, chosen)]
        placed = [self.grid.under(self.out, cell) for cell in cells]
        return [cell for cell in placed if result(cell) is not None]

    def _write(self, remarks: Sequence[str]) -> Path | None:
        self._write_table()
        finals = [cell.folder for cell in self._finished() if cell.stage == "final"]
        if not finals:
            return None
        failed = [f"{name}: {why}" for name, why in self.failed.items()]
        return write_comparison(finals, self.out / "report.html", remarks=[*failed, *remarks])

    def _write_table(self) -> None:
        write_table(self.out / "results.csv", self._finished(), jobs=self.most_jobs)

    def _outcome(self, remarks: Sequence[str]) -> Outcome:
        finals = tuple(cell for cell in self._finished() if cell.stage == "final")
        report = self._write(remarks)
        return Outcome(finals, dict(self.failed), tuple(remarks), self.out / "results.csv", report, self.most_jobs)


def result(cell: Cell) -> dict[str, Any] | None:
    """The result of a cell that has ended."""
    try:
        document: dict[str, Any] = json.loads((cell.folder / "result.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{cell.folder / 'result.json'} cannot be read: {reason(error)}") from error
    return document


def diverged(cell: Cell) -> str | None:
    """Why a cell has come to nothing, if it would again: what it trained was not finite."""
    try:
        told = json.loads((cell.folder / DIVERGED).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return str(told.get("diverged")) if isinstance(told, dict) else None


def has_ended(cell: Cell) -> bool:
    """Whether there is nothing left of a cell to be run."""
    return result(cell) is not None or diverged(cell) is not None


def _may_join(cell: Cell, running: Sequence[_Running]) -> bool:
    return not running or not (cell.method.by_clock or any(one.cell.method.by_clock for one in running))


def _same(held: Workload, now: Workload) -> bool:
    return held.model == now.model and _same_place(held.data, now.data) and _same_place(held.weights, now.weights)


def _same_place(held: str | None, now: str | None) -> bool:
    """Whether two names are of one file or folder: one place in two spellings, or moved and with its old place gone."""
    if held == now:
        return True
    if held is None or now is None:
        return False
    before, after = Path(held).expanduser(), Path(now).expanduser()
    if before.exists():
        return after.exists() and before.resolve() == after.resolve()
    return before.name == after.name and len(before.parts) > 1


def _told(workload: Workload) -> str:
    weights = f", weights {workload.weights}" if workload.weights else ""
    return f"{workload.model} on {workload.data}{weights}"


def _stop(running: Sequence[_Running]) -> None:
    """Let cells finish their step and write a checkpoint; a second Ctrl-C ends them as they are."""
    for one in running:
        if one.process.poll() is None:
            one.process.send_signal(signal.SIGINT)
    for one in running:
        one.process.wait()


def _last_line(log: Path) -> str:
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1].removeprefix("elastictrainer: error: ") if lines else ""


def _die_with_parent() -> None:
    """Linux: a comparison that is killed outright takes its cell with it, which would else train on unseen."""
    import ctypes

    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG

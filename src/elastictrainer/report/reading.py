"""Reading a run folder for its report: whatever is there is used, whatever is not is said in a sentence."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from elastictrainer.budget import Budget
from elastictrainer.errors import CheckpointError, ElasticTrainerError
from elastictrainer.profiling.profile import Profile
from elastictrainer.report.words import number

__all__ = ["PlanRow", "RunRecord", "read_run"]

FILES = ("config.yaml", "metrics.jsonl", "plans.jsonl", "profile.json", "result.json")


@dataclass(frozen=True, slots=True)
class PlanRow:
    """One plan of the run: what it trained and why, what it was predicted to cost, and what its steps took."""

    index: int
    epoch: int
    step: int
    reason: str
    trainable: frozenset[str]
    scores: Mapping[str, float]
    share_trained: float | None
    predicted_step_s: float | None
    predicted_ratio: float | None
    peak_bytes: float | None
    steps: int
    spent_s: float | None

    @property
    def step_s(self) -> float | None:
        """Measured seconds of a step; None before the run has ended, when they are not written yet."""
        return self.spent_s / self.steps if self.spent_s and self.steps else None


@dataclass(frozen=True)
class RunRecord:
    """Everything that a report shows of one run.

    `names` are all tensors, output side first. `budget` is what the policy had to keep: None for one that keeps none,
    such as full training. `missing` holds a sentence for each thing that is not there.
    """

    folder: Path
    config: dict[str, Any] = field(default_factory=dict)
    epochs: tuple[dict[str, Any], ...] = ()
    plans: tuple[PlanRow, ...] = ()
    names: tuple[str, ...] = ()
    profile: Profile | None = None
    result: dict[str, Any] | None = None
    budget: str | None = None
    missing: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.folder.resolve().name or str(self.folder)

    @property
    def title(self) -> str:
        """The network and the data, as far as the run says."""
        network = self.config.get("model") or _mapping(self.config.get("network")).get("class") or "a network"
        data = self.config.get("data")
        return f"{network} on {data}" if data else str(network)

    @property
    def heading(self) -> str:
        """The title, with a folder of images by its last part: whole paths stand among the options."""
        data = str(self.config.get("data") or "")
        return self.title.removesuffix(data) + (Path(data).name or data) if data else self.title

    def get(self, key: str) -> Any:
        """A figure of the result; of a run that has not ended, the same figure after its last epoch."""
        if self.result is not None:
            return self.result.get(key)
        return self.epochs[-1].get(key) if self.epochs else None

    def figure(self, key: str) -> float | None:
        return number(self.get(key))

    @property
    def environment(self) -> dict[str, Any]:
        return _mapping(self.config.get("environment"))

    @property
    def policy(self) -> str:
        return str((self.result or {}).get("policy") or self.config.get("policy") or "unknown policy")

    @property
    def importance(self) -> str | None:
        """What scores were measured by, where the policy used any."""
        if self.result is not None:
            found = self.result.get("importance")
        else:
            found = self.config.get("importance") if any(plan.scores for plan in self.plans) else None
        return str(found) if found else None

    @property
    def asked_ratio(self) -> float | None:
        """The budget as a share of full training; a time becomes one by what a full step was found to take."""
        if self.budget is None:
            return None
        try:
            budget = Budget.parse(self.budget)
        except ElasticTrainerError:
            return None
        if budget.kind == "ratio":
            return budget.value
        full_s, batches = self.figure("full_step_s"), number(self.config.get("batches_per_epoch"))
        epochs = number(self.config.get("epochs"))
        return budget.value / (full_s * batches * epochs) if full_s and batches and epochs else None

    @property
    def accuracy(self) -> float | None:
        """Of the weights that were kept; of a run that has not ended, the best on validation so far."""
        if self.result is not None:
            return number(_mapping(self.result.get("accuracy")).get("final"))
        return max((a for e in self.epochs if (a := number(e.get("val_accuracy"))) is not None), default=None)

    @property
    def judged_share(self) -> float | None:
        """Of the batches it is the accuracy on, where a deadline left no time for all."""
        return number(_mapping((self.result or {}).get("accuracy")).get("share"))

    @property
    def accuracy_of(self) -> str:
        """On which images: `test` or `val`."""
        return str(_mapping((self.result or {}).get("accuracy")).get("of") or "val")

    @property
    def overhead_s(self) -> dict[str, float]:
        parts = _mapping(self.get("overhead_s"))
        return {str(part): value for part, found in parts.items() if (value := number(found)) is not None}

    def curve(self, key: str) -> list[tuple[float, float, int]]:
        """(seconds of training, value, epoch) for each epoch in which the figure was measured."""
        found = []
        for line in self.epochs:
            at, value = number(line.get("train_s")), number(line.get(key))
            if at is not None and value is not None:
                found.append((at, value, int(number(line.get("epoch")) or 0)))
        return found


def read_run(folder: str | Path) -> RunRecord:
    """Read what a run has left so far. Costs a fraction of a second; nothing is changed and no weights are read.

    Raises:
        CheckpointError: the folder is none that a run was written to.
    """
    folder = Path(folder)
    try:
        there = [name for name in FILES if (folder / name).is_file()]
        is_folder = folder.is_dir()
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {error.strerror or error}") from error
    if not is_folder:
        raise CheckpointError(f"{folder} is no folder; give the folder that a run was written to (its --out)")
    if not set(there) & {"config.yaml", "metrics.jsonl", "plans.jsonl", "result.json"}:
        raise CheckpointError(
            f"{folder} is no run folder: it holds neither config.yaml nor metrics.jsonl, plans.jsonl or result.json; "
            "give the folder that a run was written to (its --out)"
        )
    missing: list[str] = []
    result = _document(folder / "result.json", json.loads, missing, "the run was stopped, or is still going on")
    config = _document(folder / "config.yaml", yaml.safe_load, missing, "what was asked for is not known")
    epochs = _lines(folder / "metrics.jsonl", missing, "no epoch has been completed")
    events = _lines(folder / "plans.jsonl", missing, "what was trained when is not known")
    if config is None and result is not None:
        config = _mapping(result.get("config"))
    profile = _profile(folder / "profile.json", missing)
    names = profile.names if profile is not None else _names(events)
    return RunRecord(
        folder=folder,
        config={key: value for key, value in (config or {}).items() if key != "command"},  # the same once more
        epochs=tuple(epochs),
        plans=_plans(events, result, epochs),
        names=names,
        profile=profile,
        result=result,
        budget=_budget(config or {}, result, events),
        missing=tuple(missing),
    )


def _document(path: Path, parse: Callable[[str], Any], missing: list[str], means: str) -> dict[str, Any] | None:
    try:
        document = parse(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        missing.append(f"{path.name} is not there: {means}.")
        return None
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        missing.append(f"{path.name} is damaged and was left out.")
        return None
    if not isinstance(document, dict):
        missing.append(f"{path.name} is damaged and was left out.")
        return None
    return document


def _lines(path: Path, missing: list[str], means: str) -> list[dict[str, Any]]:
    """The whole lines of a log. A kill in the middle of a write leaves half of the last one; that is not an error."""
    try:
        text = path.read_bytes().decode("utf-8", "replace")
    except FileNotFoundError:
        missing.append(f"{path.name} is not there: {means}.")
        return []
    except OSError as error:
        missing.append(f"{path.name} cannot be read: {error.strerror}.")
        return []
    found, damaged = [], 0
    for line in text.splitlines():
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if isinstance(record, dict):
            found.append(record)
        else:
            damaged += 1
    if damaged:
        missing.append(f"{path.name}: {damaged} damaged line{'s' if damaged > 1 else ''} left out.")
    if not found and not damaged:
        missing.append(f"{path.name} is empty: {means}.")
    return found


def _profile(path: Path, missing: list[str]) -> Profile | None:
    try:
        return Profile.load(path)
    except Exception:  # a profile that parses and is still wrong can fail anywhere; the report does without it
        missing.append(
            f"{path.name} {'is damaged and was left out' if path.exists() else 'is not there'}: "
            "full training's memory and the profile's own error are not known."
        )
        return None


def _budget(config: dict[str, Any], result: dict[str, Any] | None, events: list[dict[str, Any]]) -> str | None:
    """Without a result, the budget that was asked for counts if plans were made within one."""
    if result is not None:
        found = result.get("budget")
    else:
        kept = any(_mapping(event.get("plan")).get("budget") for event in events)
        found = config.get("budget") if kept else None
    return str(found) if found else None


def _names(events: list[dict[str, Any]]) -> tuple[str, ...]:
    """Without a profile, a plan's own list of tensors, which stands in the same order."""
    for event in events:
        names = _mapping(event.get("plan")).get("names")
        if isinstance(names, list) and names:
            return tuple(map(str, names))
    return ()


def _plans(
    events: list[dict[str, Any]], result: dict[str, Any] | None, epochs: list[dict[str, Any]]
) -> tuple[PlanRow, ...]:
    listed = (result or {}).get("plans")
    ended = {i: p for i, p in enumerate(listed) if isinstance(p, dict)} if isinstance(listed, list) else {}
    steps = [_whole(event.get("step")) for event in events]
    last = max([_whole(line.get("step")) for line in epochs] + steps, default=0)
    rows = []
    for number_of, (event, start, until) in enumerate(zip(events, steps, [*steps[1:], last])):
        index = _whole(event.get("index"), number_of)
        account = ended.get(index, {})
        plan = _mapping(event.get("plan"))
        scores = {
            str(name): value
            for name, found in _mapping(event.get("scores")).items()
            if (value := number(found)) is not None
        }
        trainable = plan.get("trainable")
        rows.append(
            PlanRow(
                index=index,
                epoch=_whole(event.get("epoch")),
                step=start,
                reason=str(event.get("reason") or ""),
                trainable=frozenset(map(str, trainable)) if isinstance(trainable, list) else frozenset(),
                scores=scores,
                share_trained=number(event.get("share_trained")),
                predicted_step_s=number(event.get("predicted_step_s")),
                predicted_ratio=number(event.get("predicted_ratio")),
                peak_bytes=number(event.get("peak_bytes")),
                steps=_whole(account.get("steps"), max(until - start, 0)),
                spent_s=number(account.get("spent_s")),
            )
        )
    return tuple(rows)


def _whole(value: Any, otherwise: int = 0) -> int:
    found = number(value)
    return otherwise if found is None else int(found)


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}

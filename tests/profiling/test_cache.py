"""Trap 9: a profile found on disk for anything else than exactly this is never used."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import UserDict
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

import elastictrainer as et
from elastictrainer.errors import ProfileError
from elastictrainer.profiling.cache import Cache, describe
from elastictrainer.profiling.fingerprint import code, shapes
from tests.zoo import ZOO, classify


def _describe(model, batch, *, loss_fn=classify, optimizer=None, bn="frozen"):
    return describe(model, dict(model.named_parameters()), batch, loss_fn=loss_fn, optimizer=optimizer, bn=bn)


def test_the_second_profile_is_the_first_one_found_again(tmp_path):
    model, batch, loss_fn = ZOO["chain"]()
    first = et.profile(model, loss_fn, batch, effort=12, cache=tmp_path)
    assert et.profile(model, loss_fn, batch, effort=12, cache=tmp_path).to_json() == first.to_json()
    assert len(list(tmp_path.iterdir())) == 1


def test_whatever_changes_the_answer_changes_the_key(monkeypatch):
    model, batch, _ = ZOO["chain"]()
    base = _describe(model, batch)
    assert _describe(model, batch) == base
    other_sizes = (torch.randn(8, 3, 8, 8), torch.zeros(8, dtype=torch.long))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    different = {
        "batch size": _describe(model, other_sizes),
        "channels last": _describe(model, (batch[0].to(memory_format=torch.channels_last), batch[1])),
        "bn": _describe(model, batch, bn="track"),
        "optimizer": _describe(model, batch, optimizer=sgd),
        "momentum": _describe(model, batch, optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)),
        "loss": _describe(model, batch, loss_fn=lambda m, b: classify(m, b) * 2),
        "structure": _describe(nn.Sequential(*list(model)[:-1], nn.Linear(8, 3, bias=False)), batch),
        "dtype": _describe(ZOO["chain"]()[0].double(), batch),
        "stride": _describe(
            nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False, stride=2), *list(model)[1:]), batch
        ),
    }
    with torch.autocast("cpu", dtype=torch.bfloat16):
        different["autocast"] = _describe(model, batch)
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    different["threads"] = _describe(model, batch)
    torch.set_num_threads(threads)
    monkeypatch.setattr(torch, "__version__", "0.0.1")
    different["torch"] = _describe(model, batch)
    for what, description in different.items():
        assert description != base, what


def test_a_profile_of_less_effort_is_taken_again_and_one_of_more_is_found(tmp_path):
    model, batch, loss_fn = ZOO["chain"]()
    coarse = et.profile(model, loss_fn, batch, effort=12, cache=tmp_path)
    fine = et.profile(model, loss_fn, batch, effort=20, cache=tmp_path)
    assert fine.to_json() != coarse.to_json()
    assert et.profile(model, loss_fn, batch, effort=12, cache=tmp_path).to_json() == fine.to_json()
    assert len(list(tmp_path.iterdir())) == 1


class Switched(nn.Module):
    """A network whose switches are attributes, as gradient checkpointing is in timm and transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(6, 6), nn.Linear(6, 3)
        self.checkpointing = False
        self.config = SimpleNamespace(attention="eager", sizes=(1, 2))

    def forward(self, x):
        return self.head(self.inner(x))


class Edited(Switched):
    def forward(self, x):
        return self.head(self.inner(self.inner(x)))


def test_switches_of_modules_and_edited_methods_are_seen():
    batch = torch.randn(4, 6), torch.arange(4) % 3
    base = _describe(Switched(), batch)
    assert _describe(Switched(), batch) == base
    by_attribute, by_config = Switched(), Switched()
    by_attribute.checkpointing = True
    by_config.config.attention = "sdpa"
    edited = Edited()
    edited.__class__.__qualname__ = Switched.__qualname__
    for changed in (by_attribute, by_config, edited):
        assert _describe(changed, batch) != base


def test_autocast_inside_the_loss_function_is_seen():
    model, batch, _ = ZOO["chain"]()

    def with_dtype(dtype):
        def loss(model, batch):
            with torch.autocast("cpu", dtype=dtype):
                return classify(model, batch)

        return loss

    assert _describe(model, batch, loss_fn=with_dtype(torch.bfloat16)) != _describe(
        model, batch, loss_fn=with_dtype(torch.float16)
    )


@dataclass
class Held:
    tokens: Tensor
    label: str = "a"


@dataclass(slots=True)
class Slotted:
    inner: Held


class Graphs:
    """Like a batch of PyTorch Geometric: everything in a private store."""

    def __init__(self, tokens: Tensor) -> None:
        self._store = UserDict({"x": tokens})


@pytest.mark.parametrize(
    "make",
    [
        lambda tokens: UserDict(input_ids=tokens),
        Held,
        lambda tokens: Slotted(Held(tokens)),
        Graphs,
        lambda tokens: {"of": [(tokens.numpy(), 1)]},
        lambda tokens: {"ids": tokens.to_sparse()},
        lambda tokens: SimpleNamespace(length=tokens.shape[1]),
    ],
)
def test_whatever_holds_the_tensors_of_a_batch_their_shapes_are_seen(make):
    short, again, long = (shapes(make(torch.ones(2, length))) for length in (128, 128, 512))
    assert short == again == json.loads(json.dumps(short))
    assert short != long


def test_the_names_of_samples_do_not_matter():
    assert shapes(Held(torch.ones(2), "a")) == shapes(Held(torch.ones(2), "b"))


def with_dtype(model, batch, *, dtype=None, also=()):
    with torch.autocast("cpu", dtype=dtype or torch.float16, enabled=dtype is not None):
        return classify(model, batch)


class Loss:
    """Settings in an object of an object, and a method of its own as the loss."""

    def __init__(self, amp):
        self.settings = SimpleNamespace(amp=amp)

    def __call__(self, model, batch):
        return with_dtype(model, batch, dtype=torch.bfloat16 if self.settings.amp else None)

    def method(self, model, batch):
        return self(model, batch)


AMP = False


def by_global(model, batch):
    inner = lambda: with_dtype(model, batch, dtype=torch.bfloat16 if AMP else None)  # noqa: E731
    return inner()


def by_module(model, batch):
    return with_dtype(model, batch, dtype=torch.bfloat16 if settings.AMP else None)


def calls_another(model, batch):
    return by_global(model, batch)


settings = ModuleType("settings")


@pytest.mark.parametrize(
    "make",
    [
        lambda amp: partial(with_dtype, dtype=torch.bfloat16 if amp else None),
        lambda amp: partial(partial(with_dtype, also=(1, 2)), also=(1, 2, amp)),
        Loss,
        lambda amp: Loss(amp).method,
        lambda amp: lambda model, batch: Loss(amp)(model, batch),
        lambda amp: nn.CrossEntropyLoss(label_smoothing=0.1 * amp),
        lambda amp: by_global,
        lambda amp: by_module,
        lambda amp: calls_another,
    ],
    ids=["partial", "nested partial", "object", "method", "closure", "module", "global", "settings", "called"],
)
def test_wherever_the_switch_of_autocast_is_it_is_seen(make, monkeypatch):
    found = []
    for amp in (False, False, True):
        monkeypatch.setitem(globals(), "AMP", amp)
        monkeypatch.setattr(settings, "AMP", amp, raising=False)
        found.append(code(make(amp)))
    assert found[0] == found[1] != found[2]


def test_the_key_of_a_loss_function_is_the_same_in_another_process():
    script = (
        "from tests.profiling.test_cache import *\n"
        "print(code(Loss(True).method), code(by_global), code(partial(with_dtype, also={'a', 'b', 'c'})))"
    )
    printed = {
        subprocess.run(
            [sys.executable, "-c", script], env={**os.environ, "PYTHONHASHSEED": str(salt)},
            cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True,
        ).stdout
        for salt in (1, 2)
    }  # fmt: skip
    assert len(printed) == 1


def test_a_damaged_entry_is_taken_again(tmp_path):
    model, batch, loss_fn = ZOO["chain"]()
    et.profile(model, loss_fn, batch, effort=12, cache=tmp_path)
    (entry,) = tmp_path.iterdir()
    entry.write_text(entry.read_text()[:100])
    assert et.profile(model, loss_fn, batch, effort=12, cache=tmp_path).full_step_s > 0


def test_an_entry_of_another_context_under_this_name_is_not_used(tmp_path):
    model, batch, loss_fn = ZOO["chain"]()
    profile = et.profile(model, loss_fn, batch, effort=12, cache=tmp_path)
    (entry,) = tmp_path.iterdir()
    stale = profile.to_dict()
    stale["context"] = stale["context"] | {"threads": 99}
    entry.write_text(et.Profile.from_dict(stale).to_json())
    assert Cache(tmp_path).find(profile.context) is None


def test_a_folder_that_cannot_be_written_is_one_clear_line(tmp_path):
    (tmp_path / "file").write_text("")
    model, batch, loss_fn = ZOO["chain"]()
    with pytest.raises(ProfileError, match="cannot keep the profile"):
        et.profile(model, loss_fn, batch, effort=12, cache=tmp_path / "file" / "folder")

"""Trap 9: a profile found on disk for anything else than exactly this is never used."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import elastictrainer as et
from elastictrainer.errors import ProfileError
from elastictrainer.profiling.cache import Cache, describe
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

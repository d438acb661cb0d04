"""Weight files of every shape people have: safe reading, names, precision, and refusals that say which tensor."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from elastictrainer import ConfigError, ModelError
from elastictrainer.data.weights import LoadReport, align_names, load_tensors, read_weights


def net(classes: int = 4) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(5, classes)
    )


HEAD = ("4.weight", "4.bias")


def load(model: nn.Module, tensors: dict[str, torch.Tensor], **kwargs: object) -> LoadReport:
    match = kwargs.pop("match", "name")
    aligned = align_names(model.state_dict(), tensors, match=match, origin="file")  # type: ignore[arg-type]
    return load_tensors(model, aligned, head=HEAD, origin="file", **kwargs)  # type: ignore[arg-type]


def same(a: nn.Module, b: nn.Module, but: tuple[str, ...] = ()) -> bool:
    return all(
        torch.equal(x, y) for (k, x), (_, y) in zip(a.state_dict().items(), b.state_dict().items()) if k not in but
    )


@pytest.mark.parametrize("wrapper", ["plain", "state_dict", "model_state_dict", "deep", "with optimizer"])
@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.module.", "model."])
def test_pickled_checkpoints_of_every_wrapping(tmp_path: Path, wrapper: str, prefix: str) -> None:
    source, target = net(), net()
    state = {prefix + name: tensor for name, tensor in source.state_dict().items()}
    content = {
        "plain": state,
        "state_dict": {"state_dict": state, "epoch": 3},
        "model_state_dict": {"model_state_dict": state, "lr": 0.1},
        "deep": {"checkpoint": {"model": state}},
        "with optimizer": {"model": state, "optimizer": {"state": {0: {"momentum": torch.ones(2)}}}},
    }[wrapper]
    torch.save(content, tmp_path / "w.pth")
    report = load(target, read_weights(tmp_path / "w.pth")[0])
    assert report == LoadReport(len(state))
    assert same(source, target)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_precision_is_cast(tmp_path: Path, dtype: torch.dtype) -> None:
    source, target = net(), net()
    save_file({k: v.to(dtype) if v.ndim > 1 else v for k, v in source.state_dict().items()}, tmp_path / "w.safetensors")
    report = load(target, read_weights(tmp_path / "w.safetensors")[0])
    assert report.cast == ("0.weight", "4.weight")
    assert all(p.dtype == torch.float32 for p in target.parameters())
    assert torch.equal(target[0].weight, source[0].weight.to(dtype).float())


def test_another_head_starts_anew_and_is_listed() -> None:
    source, target = net(4), net(7)
    before = target[4].weight.clone()
    report = load(target, dict(source.state_dict()))
    assert report.fresh == HEAD
    assert report.mismatched[0] == "4.weight: (4, 5) in the file, (7, 5) in the model"
    assert "4.weight: (4, 5)" in str(report)
    assert torch.equal(target[4].weight, before)
    assert same(source, target, but=HEAD)


def test_a_file_without_head_or_counters_is_enough() -> None:
    state = {k: v for k, v in net().state_dict().items() if k not in HEAD and "tracked" not in k}
    assert load(net(), state).fresh == HEAD


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s: s.pop("0.weight"), "0.weight is missing"),
        (
            lambda s: s.update({"0.weight": torch.zeros(9, 3, 3, 3)}),
            r"0.weight: \(9, 3, 3, 3\) in the file, \(5, 3, 3, 3\)",
        ),
        (lambda s: s.update({"5.weight": torch.zeros(1)}), "5.weight has no place in the model"),
        (lambda s: s.update({"1.bias": torch.full((5,), torch.nan)}), "1.bias holds values that are not finite"),
        (lambda s: s.update({"0.weight": s["0.weight"].to(torch.int8)}), "0.weight holds int8"),
    ],
)
def test_more_than_the_head_is_refused_by_name_and_nothing_is_touched(change: object, words: str) -> None:
    state, target = dict(net().state_dict()), net()
    before = {k: v.clone() for k, v in target.state_dict().items()}
    change(state)  # type: ignore[operator]
    with pytest.raises(ModelError, match=words):
        load(target, state)
    assert all(torch.equal(v, before[k]) for k, v in target.state_dict().items())


def test_skip_leaves_tensors_out_on_request() -> None:
    source, target = net(), net()
    state = dict(source.state_dict()) | {"aux.weight": torch.zeros(3)}
    before = target[4].weight.clone()
    report = load(target, state, skip=("aux.*", "4.*"))
    assert set(report.skipped) == {"aux.weight", *HEAD}
    assert report.fresh == HEAD
    assert torch.equal(target[4].weight, before)
    with pytest.raises(ConfigError, match=r"skip nothing\.\*"):
        load(net(), state, skip=("nothing.*",))


def test_by_order_needs_the_same_number_and_shapes() -> None:
    source, target = net(), net()
    renamed = {f"t{i}": v for i, v in enumerate(source.state_dict().values())}
    load(target, renamed, match="order")
    assert same(source, target)
    with pytest.raises(ModelError, match="cannot be matched in order"):
        load(target, dict(list(renamed.items())[:-1]), match="order")
    with pytest.raises(ModelError, match="in the file"):
        load(target, dict(reversed(renamed.items())), match="order")
    with pytest.raises(ConfigError, match="use 'name' or 'order'"):
        load(target, renamed, match="guess")


class Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return eval, ("1/0",)


def test_a_file_that_would_run_code_is_refused(tmp_path: Path) -> None:
    (tmp_path / "evil.pth").write_bytes(pickle.dumps({"w": Evil()}))
    torch.save({"w": Evil()}, tmp_path / "evil2.pth")
    for name in ("evil.pth", "evil2.pth"):
        with pytest.raises(ModelError, match=rf"{name}.*could run code: refused") as caught:
            read_weights(tmp_path / name)
        assert "\n" not in str(caught.value)


def test_a_refusal_names_what_is_no_tensor_and_does_not_accuse_a_web_page(tmp_path: Path) -> None:
    torch.save(net(), tmp_path / "whole.pth")
    with pytest.raises(ModelError, match=r"more than tensors \(torch\.nn\.modules\.\S+\)"):
        read_weights(tmp_path / "whole.pth")
    (tmp_path / "page.pth").write_text("<!DOCTYPE html><title>404</title>")
    with pytest.raises(ModelError, match=r"page\.pth' are no state dict.*web page"):
        read_weights(tmp_path / "page.pth")


@pytest.mark.parametrize(
    "name", ["cut.safetensors", "cut.pth", "empty.pth", "empty.safetensors", "text.pth", "list.pth"]
)
def test_broken_files_are_one_line_with_the_name(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    save_file(net().state_dict(), tmp_path / "whole.safetensors")
    torch.save(net().state_dict(), tmp_path / "whole.pth")
    whole = (tmp_path / f"whole{file.suffix}").read_bytes()
    file.write_bytes({"cut": whole[: len(whole) // 2], "empty": b"", "text": b"hello", "list": b""}[file.stem])
    if file.stem == "list":
        torch.save([1, 2, 3], file)
    with pytest.raises(ModelError, match=name) as caught:
        read_weights(file)
    assert "\n" not in str(caught.value)


def test_several_sets_of_tensors_are_named_and_none_is_guessed(tmp_path: Path) -> None:
    torch.save({"generator": net().state_dict(), "critic": net().state_dict(), "epoch": 3}, tmp_path / "gan.pth")
    with pytest.raises(ModelError, match=r"several sets of tensors \(generator, critic\)"):
        read_weights(tmp_path / "gan.pth")


def test_missing_file_and_unknown_ending(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"nowhere\.pth.*no such file"):
        read_weights(tmp_path / "nowhere.pth")
    (tmp_path / "model.onnx").write_bytes(b"x")
    with pytest.raises(ModelError, match=r"'\.onnx' is unknown"):
        read_weights(tmp_path / "model.onnx")

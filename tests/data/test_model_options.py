"""The little language of model options: it sets what exists, keeps kinds, and says what does not fit, all at once."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from elastictrainer import ConfigError, ModelError
from elastictrainer.data.model_options import apply_module_options, parse_model_options, split_options


def small() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Sequential(nn.Conv2d(4, 4, 1)), nn.Dropout(0.5)
    )


numbers = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
plain = numbers | st.booleans() | st.none() | st.tuples(st.integers(), st.integers())


@given(st.dictionaries(st.from_regex(r"[a-z*]{1,5}\.[a-z]{1,5}", fullmatch=True), plain, max_size=4))
def test_text_and_mapping_say_the_same(options: dict[str, object]) -> None:
    text = "; ".join(f"{key}={value}" for key, value in options.items())
    assert parse_model_options(text) == parse_model_options(options) == options
    assert parse_model_options([f"{k}={v}" for k, v in options.items()]) == options


def test_by_path_by_type_and_to_the_builder() -> None:
    model = small()
    builder, settings = split_options(parse_model_options("width=2; *[0].stride=2; type:_BatchNorm.eps=1e-3; 3.p=0"))
    assert builder == {"width": 2}
    assert apply_module_options(model, settings) == {"*[0].stride": 2, "type:_BatchNorm.eps": 1, "3.p": 1}
    assert model[0].stride == model[2][0].stride == (2, 2)
    assert model[1].eps == 1e-3
    assert model[3].p == 0.0
    assert isinstance(model[3].p, float)


def test_one_number_fills_a_tuple_and_changes_the_output() -> None:
    model = small()
    assert apply_module_options(model, {"0.stride": 2}) == {"0.stride": 1}
    assert model[0].stride == (2, 2)
    assert model(torch.zeros(1, 3, 8, 8)).shape[-1] == 4


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ({"9.stride": 1}, "no module matches '9'"),
        ({"0.strides": 1}, "has no setting 'strides'"),
        ({"0.weight": 1}, "has no setting 'weight'"),
        ({"0.stride": (1, 1, 1)}, "holds 2 values"),
        ({"0.stride": 1.5}, "cannot become 1.5"),
        ({"3.p": "much"}, "cannot become 'much'"),
        ({"0._parameters": 1}, "not a plain setting"),
        ({"type:LSTM.dropout": 1}, "no module matches 'type:LSTM'"),
    ],
)
def test_what_does_not_fit_is_named(option: dict[str, object], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        apply_module_options(small(), option)


def test_all_problems_at_once_and_nothing_set() -> None:
    model = small()
    with pytest.raises(ModelError, match=r"nothing.*no module.*gamma"):
        apply_module_options(model, {"1.eps": 0.5, "nothing.p": 1, "1.gamma": 2})
    assert model[1].eps == 1e-5


def test_an_option_without_a_value_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'type:BatchNorm2d\.eps' has no value"):
        parse_model_options("type:BatchNorm2d.eps")

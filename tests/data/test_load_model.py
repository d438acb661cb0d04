"""Models by name: both libraries, any head, any size, recipes, and every way a name can be wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import save_file

from elastictrainer import ConfigError, ModelError
from elastictrainer.data import Normalisation, Recipe, list_models, load_model, model_inputs

pytest.importorskip("torchvision")
pytest.importorskip("timm")

# One of every way to build a head: Linear, inside a Sequential, a 1x1 convolution, without bias, two heads.
HEADS = {
    "resnet18": {"fc.weight", "fc.bias"},
    "torchvision/mobilenet_v3_small": {"classifier.3.weight", "classifier.3.bias"},
    "squeezenet1_1": {"classifier.1.weight", "classifier.1.bias"},
    "timm/mobilenetv3_small_050": {"classifier.weight", "classifier.bias"},
    "timm/deit_tiny_distilled_patch16_224": {"head.weight", "head.bias", "head_dist.weight", "head_dist.bias"},
}


@pytest.mark.parametrize("name", HEADS)
def test_the_head_is_found_by_what_the_classes_change(name: str) -> None:
    loaded = load_model(name, num_classes=5, image_size=64)
    assert set(loaded.head) == HEADS[name]
    with torch.no_grad():
        assert loaded.model.eval()(torch.zeros(1, 3, 64, 64)).shape == (1, 5)


def test_a_builder_that_reads_its_own_values_is_built_for_real() -> None:
    assert load_model("regnet_y_400mf", num_classes=3).head == ("fc.weight", "fc.bias")


def test_bare_names_prefer_torchvision_and_fall_back_to_timm() -> None:
    assert load_model("resnet18", num_classes=2).name == "torchvision/resnet18"
    assert load_model("mobilenetv3_small_050", num_classes=2).name == "timm/mobilenetv3_small_050"
    assert load_model("timm/resnet18.a1_in1k", num_classes=2).model.fc.out_features == 2


def test_what_the_inputs_must_follow_comes_from_the_library() -> None:
    plain = load_model("resnet18", num_classes=2)
    assert (plain.normalisation, plain.image_size) == (Normalisation.parse("imagenet"), 224)
    other = load_model("timm/tf_efficientnet_lite0", num_classes=2, normalize="0.1/0.2", image_size=96)
    assert (other.normalisation.mean, other.image_size) == ((0.1, 0.1, 0.1), 96)
    assert load_model("timm/tf_efficientnet_lite0", num_classes=2).normalisation == Normalisation.parse("inception")


def test_the_random_start_is_the_seeds_alone() -> None:
    torch.manual_seed(1)
    first, state = load_model("squeezenet1_1", num_classes=3, seed=5), torch.get_rng_state()
    torch.manual_seed(1)
    assert torch.equal(state, torch.get_rng_state())
    torch.manual_seed(2)
    again, other = (
        load_model("squeezenet1_1", num_classes=3, seed=5),
        load_model("squeezenet1_1", num_classes=3, seed=6),
    )
    pairs = list(zip(first.model.parameters(), again.model.parameters(), other.model.parameters()))
    assert all(torch.equal(a, b) for a, b, _ in pairs)
    assert not all(torch.equal(a, c) for a, _, c in pairs)


def test_a_file_decides_the_classes_unless_told_otherwise(tmp_path: Path) -> None:
    made = load_model("squeezenet1_1", num_classes=11, seed=1)
    file = tmp_path / "w.safetensors"
    save_file(made.model.state_dict(), file)
    same = load_model("squeezenet1_1", weights=file)
    assert (same.num_classes, same.report.fresh) == (11, ())
    fewer = load_model("squeezenet1_1", weights=file, num_classes=3)
    assert set(fewer.report.fresh) == HEADS["squeezenet1_1"]
    assert "classifier.1.weight: (11, 512, 1, 1) in the file, (3, 512, 1, 1) in the model" in str(fewer)
    anew = load_model("squeezenet1_1", weights=file, num_classes=11, skip="classifier.*")
    assert set(anew.report.fresh) == HEADS["squeezenet1_1"]


def test_weights_of_another_network_are_refused(tmp_path: Path) -> None:
    save_file(load_model("resnet34", num_classes=2).model.state_dict(), tmp_path / "w.safetensors")
    with pytest.raises(ModelError, match=r"has no place in the model"):
        load_model("resnet18", weights=tmp_path / "w.safetensors", num_classes=2)
    with pytest.raises(ModelError, match=r"conv_stem.weight is missing"):
        load_model("timm/mobilenetv3_small_050", weights=tmp_path / "w.safetensors", num_classes=2)


OPTIONS = {"layer[234].0.conv1.stride": 1, "layer[234].0.conv2.stride": 2, "type:BatchNorm2d.eps": 1e-3}


@pytest.mark.parametrize("place", ["beside", "metadata", "recipe file"])
def test_a_recipe_travels_with_its_weights(tmp_path: Path, place: str) -> None:
    made = load_model("resnet18", num_classes=4, model_options=OPTIONS, normalize="inception", image_size=96)
    assert made.recipe == Recipe("torchvision/resnet18", None, OPTIONS, "inception", 96)
    file = tmp_path / "w.safetensors"
    save_file(made.model.state_dict(), file, metadata=made.metadata() if place == "metadata" else None)
    if place == "beside":
        (tmp_path / "w.safetensors.yaml").write_text(yaml.safe_dump(made.recipe.to_dict()))
    if place == "recipe file":
        file_recipe = made.recipe.to_dict() | {"file": "w.safetensors"}
        file = tmp_path / "elsewhere.json"
        file.write_text(json.dumps(file_recipe))
    again = load_model("resnet18", weights=file)
    assert (again.normalisation, again.image_size, again.num_classes) == (made.normalisation, 96, 4)
    batch = torch.rand(2, 3, 96, 96)
    with torch.no_grad():
        assert torch.equal(made.model.eval()(batch), again.model.eval()(batch))
    assert model_inputs("resnet18", weights=file) == (96, made.normalisation)
    assert load_model("resnet18", weights=file, normalize="none").normalisation == Normalisation.parse("none")
    with pytest.raises(ModelError, match="belong to torchvision/resnet18"):
        load_model("resnet34", weights=file)


def test_a_recipe_with_unknown_keys_or_no_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("modle: resnet18")
    with pytest.raises(ModelError, match="modle is not understood"):
        load_model("resnet18", weights=tmp_path / "a.yaml")
    (tmp_path / "b.yaml").write_text("model: resnet18")
    with pytest.raises(ModelError, match="add the key 'file'"):
        load_model("resnet18", weights=tmp_path / "b.yaml")
    (tmp_path / "c.yaml").write_text("{")
    with pytest.raises(ModelError, match=r"c\.yaml' cannot be read"):
        load_model("resnet18", weights=tmp_path / "c.yaml")


@pytest.mark.parametrize(
    ("name", "kwargs", "words"),
    [
        ("resnet1800", {}, r"unknown to torchvision and timm; did you mean .*resnet1"),
        ("timm/qqqqqq", {}, "ls models"),
        ("hub/resnet18", {}, "library 'hub' is unknown"),
        ("googlenet", {}, "GoogLeNetOutputs where one tensor is needed.*aux_logits=false"),
        ("inception_v3", {"image_size": 32, "model_options": "aux_logits=false"}, "cannot be trained on 32 px images"),
        ("resnet18", {"model_options": "depth=3"}, "unexpected keyword argument 'depth'"),
        ("resnet18", {"model_options": "layer2.0.conv1.stride=1"}, r"conv1\.stride\): .*broadcast"),
        ("resnet18", {"model_options": "num_classes=3"}, "an argument of its own"),
        ("resnet18", {"num_classes": 0}, "at least 1"),
        ("resnet18", {"normalize": "caffe"}, "'caffe' cannot be read"),
        ("resnet18", {"normalize": "0.5/0"}, "std above 0"),
        ("builtin", {"weights": "x.pth"}, "brings its own weights"),
        ("resnet18", {"weights": ""}, "names no file"),
    ],
)
def test_wrong_use_is_one_line(name: str, kwargs: dict[str, object], words: str) -> None:
    with pytest.raises((ModelError, ConfigError), match=words) as caught:
        load_model(name, **kwargs)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_auxiliary_outputs_can_be_turned_off() -> None:
    loaded = load_model("googlenet", num_classes=3, image_size=64, model_options="aux_logits=false; init_weights=false")
    assert loaded.head == ("fc.weight", "fc.bias")


def test_networks_of_fixed_size_are_built_for_the_size() -> None:
    loaded = load_model("timm/vit_tiny_patch16_224", num_classes=3, image_size=64)
    assert loaded.model.eval()(torch.zeros(1, 3, 64, 64)).shape == (1, 3)


@pytest.mark.usefixtures("offline")
def test_no_network_is_one_line() -> None:
    with pytest.raises(ModelError, match=r"ResNet18_Weights.*cannot be downloaded.*local file") as caught:
        load_model("torchvision/resnet18", weights="default")
    assert "\n" not in str(caught.value)


def test_models_are_listed_with_descriptions() -> None:
    entries = {entry.name: entry.description for entry in list_models("*resnet50")}
    assert "M parameters" in entries["torchvision/resnet50"]
    assert "timm/resnet50" in entries
    assert [entry.name for entry in list_models("builtin")] == ["builtin"]

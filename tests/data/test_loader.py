"""Order and views: fixed by (seed, epoch, sample), whatever the batch, the pixels' place, or where a run resumes."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastictrainer import ConfigError
from elastictrainer.data import Augment, Batch, Loader, Normalisation, load_images
from elastictrainer.data.augment import Kit, prepare
from elastictrainer.data.hashing import permutation, uniform
from elastictrainer.data.pixels import Kept

AUGMENTS = ["none", "flip", "crop", "flip,crop", "zoom", "flip,zoom"]
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")),
]


def make(count: int = 23, size: int = 16, **kwargs: object) -> Loader:
    pixels = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (count, 3, size, size), dtype=np.uint8))
    options = {"batch_size": 4, "augment": Augment.parse("flip,crop"), "shuffle": True, "seed": 7} | kwargs
    device = torch.device(str(options.get("device", "cpu")))
    labels = np.arange(count, dtype=np.int64) % 5
    return Loader(
        Kept(pixels.to(device)), labels, image_size=size, normalisation=Normalisation.parse("none"), **options
    )  # type: ignore[arg-type]


def by_sample(batches: list[Batch]) -> dict[int, torch.Tensor]:
    return {int(i): image for batch in batches for i, image in zip(batch.indices, batch.images)}


@pytest.mark.parametrize("augment", AUGMENTS)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("start", [0, 1, 5])
def test_resuming_at_any_batch_sees_the_same_bits(augment: str, device: str, start: int) -> None:
    loader = make(augment=Augment.parse(augment), device=device)
    whole = list(loader.iterate(3))
    rest = list(loader.iterate(3, start=start))
    assert len(rest) == len(whole) - start
    for expected, got in zip(whole[start:], rest):
        assert all(torch.equal(a, b) for a, b in zip(expected, got))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("augment", AUGMENTS)
def test_nothing_waits_for_the_device(augment: str) -> None:
    batches = make(augment=Augment.parse(augment), device="cuda").iterate(0)
    next(batches)
    torch.cuda.set_sync_debug_mode("error")
    try:
        assert len(list(batches)) == 5
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_pixels_on_the_device_or_sent_to_it_are_the_same(folder: Path) -> None:
    options: dict[str, object] = {"image_size": 8, "batch_size": 4, "device": "cuda"}
    there, sent = (load_images(folder, device_cache_bytes=size, **options) for size in ("1GiB", 0))  # type: ignore[arg-type]
    host = load_images(folder, image_size=8, batch_size=4)
    assert there.place.startswith("on cuda")
    assert sent.place.startswith("in memory")
    for a, b, c in zip(there.train.iterate(1), sent.train.iterate(1), host.train.iterate(1)):
        assert torch.equal(a.images, b.images)
        assert torch.allclose(a.images.cpu(), c.images, atol=1e-6)


@pytest.mark.parametrize("augment", AUGMENTS)
def test_a_sample_looks_the_same_whatever_its_batch(augment: str) -> None:
    small, large = (make(batch_size=size, augment=Augment.parse(augment)) for size in (3, 23))
    first, second = by_sample(list(small.iterate(2))), by_sample(list(large.iterate(2)))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[i], second[i]) for i in first)


def test_plain_iteration_runs_epoch_after_epoch() -> None:
    loader = make()
    first, second = ([batch.indices.tolist() for batch in loader] for _ in range(2))
    loader.set_epoch(1)
    assert first != second == [batch.indices.tolist() for batch in loader]
    assert second == [batch.indices.tolist() for batch in loader.iterate(1)]
    assert loader.epoch == 2


@pytest.mark.parametrize("drop_last", [False, True])
def test_every_sample_once_and_labels_belong(drop_last: bool) -> None:
    loader = make(drop_last=drop_last)
    batches = list(loader.iterate(0))
    seen = [int(i) for batch in batches for i in batch.indices]
    assert len(batches) == len(loader) == (5 if drop_last else 6)
    assert len(set(seen)) == len(seen) == (20 if drop_last else 23)
    assert all(loader.labels[int(i)] == int(y) for batch in batches for i, y in zip(batch.indices, batch.labels))
    assert all(batch[0] is batch.images and batch[1] is batch.labels for batch in batches)
    left_out = [set(range(23)) - {int(i) for b in loader.iterate(e) for i in b.indices} for e in range(4)]
    assert not drop_last or len(set().union(*left_out)) > 3


def test_start_beyond_the_epoch_is_refused() -> None:
    assert list(make().iterate(0, start=6)) == []
    with pytest.raises(ConfigError, match="start 7"):
        list(make().iterate(0, start=7))


@given(st.integers(-(2**63), 2**64 - 1), st.integers(0, 2**40), st.integers(1, 200))
def test_orders_are_permutations_of_their_own(seed: int, epoch: int, count: int) -> None:
    order = permutation(seed, epoch, count)
    assert sorted(order.tolist()) == list(range(count))
    assert np.array_equal(order, permutation(seed, epoch, count))
    draws = uniform(seed, epoch, order, stream=1)
    assert ((draws >= 0) & (draws < 1)).all()
    assert np.array_equal(draws, uniform(seed, epoch, np.arange(count), stream=1)[order])


def test_draws_are_uniform_and_independent() -> None:
    count = 20000
    samples = np.arange(count, dtype=np.int64)
    rows = [uniform(s, e, samples, stream=k) for s in (0, 1) for e in (0, 1) for k in (0, 1, 2)]
    for row in rows:
        # Mean of n uniforms has standard deviation sqrt(1/12n): five of them.
        assert abs(row.mean() - 0.5) < 5 / math.sqrt(12 * count)
    correlation = np.corrcoef(rows) - np.eye(len(rows))
    assert np.abs(correlation).max() < 5 / math.sqrt(count)


def test_flip_and_crop_are_what_they_say() -> None:
    """The oracle is numpy's own padding, slicing and mirroring, image by image."""
    loader = make(count=40, batch_size=40)
    plain = by_sample(list(make(count=40, batch_size=40, augment=None).iterate(0)))
    batch = next(loader.iterate(0))
    views = loader.augment.views(loader.seed, 0, batch.indices.numpy(), size=16)
    flips, downs, rights = views.columns % 2, views.rows - 2, views.columns // 2 - 2
    assert 5 < int(flips.sum()) < 35
    assert {-2, 2} <= set(downs.tolist()) | set(rights.tolist()) <= {-2, -1, 0, 1, 2}
    for image, index, flip, down, right in zip(
        batch.images, *(v.tolist() for v in (batch.indices, flips, downs, rights))
    ):
        padded = np.pad(plain[index].numpy(), ((0, 0), (2, 2), (2, 2)), mode="reflect")
        expected = padded[:, 2 + down : 18 + down, 2 + right : 18 + right]
        assert np.array_equal(image.numpy(), expected[:, :, ::-1] if flip else expected)


def test_a_zoom_onto_everything_changes_nothing_and_others_stay_inside() -> None:
    pixels = torch.randint(0, 256, (6, 3, 16, 16), dtype=torch.uint8)
    augment = Augment.parse("zoom")
    kit = Kit.of(Normalisation.parse("none"), augment, size=16, device=torch.device("cpu"))
    views = augment.views(0, 0, np.arange(6), size=16)
    whole = views._replace(box=torch.tensor([[0.0, 0.0, 1.0, 1.0]]).expand(6, 4))
    assert torch.allclose(prepare(pixels, whole, kit), prepare(pixels, None, kit), atol=1e-5)
    mirrored = whole._replace(box=torch.tensor([[0.0, 0.0, 1.0, -1.0]]).expand(6, 4))
    assert torch.allclose(prepare(pixels, mirrored, kit), prepare(pixels, None, kit).flip(3), atol=1e-5)
    boxes = Augment.parse("flip,zoom").views(0, 0, np.arange(5000), size=16).box
    assert boxes is not None
    assert 2300 < int((boxes[:, 3] < 0).sum()) < 2700
    boxes = torch.cat([boxes[:, :3], boxes[:, 3:].abs()], dim=1)
    assert (boxes[:, :2].abs() + boxes[:, 2:] <= 1 + 1e-6).all()
    assert ((boxes[:, 2] * boxes[:, 3] >= 0.25) & (boxes[:, 2] * boxes[:, 3] <= 1)).all()


@pytest.mark.parametrize("augment", AUGMENTS)
def test_equal_view_codes_mean_equal_pixels(augment: str) -> None:
    loader = make(count=6, size=16, augment=Augment.parse(augment), batch_size=6)
    seen: dict[tuple[int, int], torch.Tensor] = {}
    for epoch in range(40):
        batch = next(loader.iterate(epoch))
        for index, code, image in zip(batch.indices.tolist(), batch.views.tolist(), batch.images):
            assert torch.equal(seen.setdefault((index, code), image), image)
    distinct = {image.numpy().tobytes() for image in seen.values()}
    assert len(distinct) == len(seen)


def test_normalisation_is_the_formula() -> None:
    normal = Normalisation.parse("0.1,0.2,0.3/0.4,0.5,0.6")
    pixels = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(5, 3, 16, 16)
    got = prepare(pixels, None, Kit.of(normal, Augment(), size=16, device=torch.device("cpu")))
    expected = (pixels.double() / 255 - torch.tensor(normal.mean).view(3, 1, 1)) / torch.tensor(normal.std).view(
        3, 1, 1
    )
    assert torch.allclose(got.double(), expected, atol=1e-6)
    assert got.is_contiguous()


@pytest.mark.parametrize("text", ["flip,flop", "crop,zoom", "rotate"])
def test_unknown_augmentation_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="use none, flip, crop or zoom"):
        Augment.parse(text)


@pytest.mark.parametrize("text", AUGMENTS)
def test_augmentations_round_trip_as_text(text: str) -> None:
    assert str(Augment.parse(text)) == text


def test_the_place_of_the_pixels_changes_no_bit(folder: Path, tmp_path: Path) -> None:
    options: dict[str, object] = {"image_size": 8, "batch_size": 4, "seed": 1}
    memory = load_images(folder, **options)  # type: ignore[arg-type]
    lazy = load_images(folder, cache_bytes=0, **options)  # type: ignore[arg-type]
    written = load_images(folder, cache_dir=tmp_path / "cache", cache_bytes=0, **options)  # type: ignore[arg-type]
    again = load_images(folder, cache_dir=tmp_path / "cache", **options)  # type: ignore[arg-type]
    places = [images.place.split(" (")[0] for images in (memory, lazy, written, again)]
    assert places == ["in memory", "decoded for each batch", "in a mapped file", "in memory"]
    for split in ("train", "val", "test"):
        batches = [list(getattr(images, split).iterate(2, start=0)) for images in (memory, lazy, written, again)]
        for row in zip(*batches):
            assert all(torch.equal(row[0].images, other.images) for other in row[1:])
    assert len({images.fingerprint for images in (memory, lazy, written, again)}) == 1


def test_pixels_never_take_more_than_half_of_what_is_free(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needed = 42 * 3 * 8 * 8
    places = []
    for free in (2 * needed, 2 * needed - 1, None):
        monkeypatch.setattr("elastictrainer.data.images.available_bytes", lambda free=free: free)
        places.append(load_images(folder, image_size=8, batch_size=4).place.split(" (")[0])
    assert places == ["in memory", "decoded for each batch", "in memory"]


def test_skipped_batches_are_not_decoded(folder: Path) -> None:
    images = load_images(folder, image_size=8, batch_size=9, cache_bytes=0)
    assert len(images.train) == 3
    last = list(images.train.iterate(0))[-1]
    kept = {int(i) for i in last.indices}
    names = images.train._pixels.samples.names  # type: ignore[attr-defined]
    for index, name in enumerate(names):
        if index not in kept:
            (folder / name).unlink()
    assert torch.equal(next(images.train.iterate(0, start=2)).images, last.images)
    with pytest.raises(Exception, match="was readable when training began"):
        list(images.train.iterate(0))


@pytest.mark.parametrize("augment", AUGMENTS)
@pytest.mark.parametrize("views", [1, 2, 3])
def test_limited_views_come_round_in_turn(augment: str, views: int) -> None:
    loader = make(augment=Augment.parse(augment))
    samples = np.arange(23, dtype=np.int64)
    for epoch in range(4):
        again = loader.look(samples, epoch + views, views=views)
        for one, other in zip(loader.look(samples, epoch, views=views), again):
            assert torch.equal(one.views, other.views)
            assert torch.equal(one.images, other.images)
    codes = np.stack([loader.codes(samples, epoch, views=views) for epoch in range(views)], axis=1)
    assert max(len(set(row)) for row in codes.tolist()) == (
        1 if augment == "none" else views if augment != "flip" else min(views, 2)
    )


def test_two_views_of_a_flip_are_all_there_are() -> None:
    loader = make(augment=Augment.parse("flip"))
    samples = np.arange(23, dtype=np.int64)
    codes = np.stack([loader.codes(samples, epoch, views=2) for epoch in range(2)], axis=1)
    assert (codes[:, 0] != codes[:, 1]).all()


def test_without_pixels_everything_else_is_there() -> None:
    loader = make()
    order = loader.order(2)
    for seen, blank in zip(loader.look(order, 2, views=2), loader.look(order, 2, views=2, pixels=False)):
        assert blank.images.shape == seen.images.shape
        assert not blank.images.any()
        assert blank.images.untyped_storage().nbytes() <= 4
        assert all(torch.equal(a, b) for a, b in zip(seen[1:], blank[1:]))
    assert [b.indices.tolist() for b in loader.iterate(2)] == [b.indices.tolist() for b in loader.look(order, 2)]

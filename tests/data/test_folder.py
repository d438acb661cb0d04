"""Image folders: what is read, in which order, and one line with the name for everything that cannot be trained on."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from elastictrainer import DataError
from elastictrainer.data import load_images
from elastictrainer.data.folder import folder_source
from elastictrainer.data.samples import split_off

WriteImage = Callable[..., Path]


def refuses(root: Path, words: str) -> None:
    """The whole door says no, in one line, before any loader exists."""
    with pytest.raises(DataError, match=words) as caught:
        load_images(root, image_size=8, batch_size=2)
    assert "\n" not in str(caught.value)


def test_classes_are_in_natural_order_and_labels_follow(folder: Path) -> None:
    source = folder_source(folder)
    assert source.classes == ("crow", "finch9", "finch10")
    assert np.bincount(source.splits["train"].labels).tolist() == [10, 10, 10]
    for samples in source.splits.values():
        assert [source.classes[label] for label in samples.labels] == [name.split("/")[1] for name in samples.names]


def test_hidden_files_litter_and_nested_folders(folder: Path, write_image: WriteImage) -> None:
    before = folder_source(folder)
    for name in (".DS_Store", ".hidden.png", "Thumbs.db"):
        (folder / "train" / "crow" / name).write_bytes(b"x")
        (folder / "train" / name).write_bytes(b"x")
    (folder / ".cache").mkdir()
    (folder / "train" / ".ipynb_checkpoints").mkdir()
    assert folder_source(folder).splits["train"].names == before.splits["train"].names
    assert folder_source(folder).notes == ()
    write_image(folder / "train" / "crow" / "young" / "deep.webp")
    (folder / "train" / "crow" / "notes.txt").write_text("x")
    after = folder_source(folder)
    assert "train/crow/young/deep.webp" in after.splits["train"].names
    assert after.notes == ("1 files in train are no images by their ending (first: train/crow/notes.txt)",)


def test_loops_of_links_end(folder: Path) -> None:
    count = len(folder_source(folder).splits["train"])
    (folder / "train" / "crow" / "self").symlink_to(folder / "train" / "crow")
    (folder / "train" / "crow" / "up").symlink_to(folder / "train")
    (folder / "train" / "crow" / "top").symlink_to(folder)
    assert len(folder_source(folder).splits["train"]) == count


def test_linked_classes_count(folder: Path, tmp_path: Path) -> None:
    shutil.move(folder / "train" / "crow", tmp_path / "elsewhere")
    (folder / "train" / "crow").symlink_to(tmp_path / "elsewhere")
    assert len(folder_source(folder).splits["train"]) == 30


def test_a_folder_of_classes_is_all_train(folder: Path) -> None:
    assert set(folder_source(folder / "train").splits) == {"train"}
    images = load_images(folder / "train", image_size=8, batch_size=4)
    assert images.test is None
    assert images.split == {"train": 27, "val": 3, "val_from_train": True, "val_share": 0.1, "split_seed": 0}


def test_a_class_missing_from_test_is_noted(folder: Path) -> None:
    shutil.rmtree(folder / "test" / "crow")
    assert folder_source(folder).notes == ("1 classes have no image in test (first: crow)",)


def test_broken_image(folder: Path) -> None:
    (folder / "test" / "crow" / "2.png").write_bytes(b"\x89PNG but no more")
    refuses(folder, r"1 image cannot be read: test/crow/2\.png")


def test_truncated_image_above_the_memory_limit_too(folder: Path) -> None:
    file = folder / "train" / "crow" / "2.png"
    file.write_bytes(file.read_bytes()[:-40])
    with pytest.raises(DataError, match=r"train/crow/2\.png \("):
        load_images(folder, image_size=8, batch_size=2, cache_bytes=0)


def test_empty_file(folder: Path) -> None:
    (folder / "train" / "crow" / "2.png").write_bytes(b"")
    refuses(folder, r"train/crow/2\.png: the file is empty")


@pytest.mark.parametrize("split", ["train", "test"])
def test_empty_class(folder: Path, split: str) -> None:
    for file in (folder / split / "crow").iterdir():
        file.unlink()
    refuses(folder, rf"{split}/crow: this class has no images")
    (folder / split / "crow" / "readme.md").write_text("soon")
    refuses(folder, rf"{split}/crow: this class has no images.*readme\.md")


@pytest.mark.parametrize("split", ["test", "val"])
def test_class_that_train_has_not(folder: Path, write_image: WriteImage, split: str) -> None:
    write_image(folder / split / "owl" / "1.png")
    refuses(folder, rf"{split}/owl: class 'owl' is in {split} but not in train, for example .*owl/1\.png")


def test_one_class_only(folder: Path) -> None:
    for split in ("train", "test"):
        for name in ("finch9", "finch10"):
            shutil.rmtree(folder / split / name)
    refuses(folder, r"only one class \(crow\)")


def test_no_train(folder: Path) -> None:
    shutil.rmtree(folder / "train")
    refuses(folder, "has test but no train folder")


@pytest.mark.parametrize("split", ["test", "val"])
def test_a_split_without_classes(folder: Path, split: str) -> None:
    shutil.rmtree(folder / split, ignore_errors=True)
    (folder / split).mkdir()
    refuses(folder, rf"{split}: no class folders; images go to {split}/CLASS/, or remove this folder")


def test_no_name_is_not_the_current_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    with pytest.raises(DataError, match="data '': no such folder"):
        load_images("", image_size=8, batch_size=2)


def test_nothing_there(tmp_path: Path) -> None:
    refuses(tmp_path / "nowhere", "nowhere.*no such folder")
    refuses(tmp_path, "no class folders")


def test_images_outside_classes(folder: Path, write_image: WriteImage) -> None:
    write_image(folder / "train" / "lost.png")
    refuses(folder, r"train/lost\.png: an image outside any class")


def test_misnamed_split(folder: Path) -> None:
    (folder / "validation").mkdir()
    refuses(folder, "validation: rename this folder to 'val'")


def test_splits_in_capitals_are_never_taken_for_classes(folder: Path) -> None:
    (folder / "test").rename(folder / "Test")
    refuses(folder, "Test: rename this folder to 'test'")
    (folder / "train").rename(folder / "TRAIN")
    refuses(folder, "rename this folder to 't")


def test_a_class_may_be_called_train(folder: Path) -> None:
    (folder / "train" / "crow").rename(folder / "train" / "Train")
    assert folder_source(folder / "train").classes == ("finch9", "finch10", "Train")


def test_link_to_nothing(folder: Path) -> None:
    (folder / "train" / "crow" / "gone.png").symlink_to(folder / "no-such-file")
    refuses(folder, r"gone\.png: cannot be read")


def test_no_regular_file(folder: Path) -> None:
    os.mkfifo(folder / "train" / "crow" / "pipe.png")
    refuses(folder, r"pipe\.png: not a regular file")


@contextmanager
def ordinary_user() -> Iterator[None]:
    """Root may read everything: be nobody for a while."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.parametrize("what", ["train/crow", "train", "test/crow/1.png"])
def test_unreadable(folder: Path, what: str) -> None:
    for parent in (folder, *folder.parents):
        if parent.stat().st_uid == os.geteuid() and not parent.stat().st_mode & 0o001:
            parent.chmod(parent.stat().st_mode | 0o055)
    target = folder / what
    target.chmod(0)
    try:
        with ordinary_user():
            if os.access(target, os.R_OK, effective_ids=True):
                pytest.skip("this file system lets everyone read")
            refuses(folder, rf"{what}.*(cannot be read|no permission)")
    finally:
        target.chmod(0o755)


def test_too_few_images_for_a_batch(folder: Path) -> None:
    with pytest.raises(DataError, match="27 training images are fewer than one batch of 64"):
        load_images(folder, image_size=8, batch_size=64)
    assert len(load_images(folder, image_size=8, batch_size=64, drop_last=False).train) == 1


def test_split_by_class_is_seeded_disjoint_and_complete(folder: Path) -> None:
    source = folder_source(folder)
    once, again = (split_off(source, share=0.2, seed=3) for _ in range(2))
    other = split_off(source, share=0.2, seed=4)
    names = [set(once.splits[split].names) for split in ("train", "val")]
    assert not names[0] & names[1]
    assert names[0] | names[1] == set(source.splits["train"].names)
    assert np.bincount(once.splits["val"].labels).tolist() == [2, 2, 2]
    assert once.splits["val"].names == again.splits["val"].names
    assert once.fingerprint() == again.fingerprint() != other.fingerprint()
    assert set(once.splits["val"].names) != set(other.splits["val"].names)


def test_the_split_depends_on_names_alone(folder: Path, write_image: WriteImage, tmp_path: Path) -> None:
    moved = shutil.move(folder, tmp_path / "moved")
    before = split_off(folder_source(moved), share=0.2, seed=0)
    write_image(Path(moved) / "train" / "crow" / "zzz.png")
    after = split_off(folder_source(moved), share=0.2, seed=0)
    assert len(set(before.splits["val"].names) & set(after.splits["val"].names)) >= 5


def test_a_class_of_one_keeps_its_image_for_training(folder: Path) -> None:
    for file in sorted((folder / "train" / "crow").iterdir())[1:]:
        file.unlink()
    images = load_images(folder, image_size=8, batch_size=2)
    assert images.notes == ("1 classes have a single training image and are not in val (first: crow)",)
    assert 0 in images.train.labels
    for name in ("finch9", "finch10"):
        for file in sorted((folder / "train" / name).iterdir())[1:]:
            file.unlink()
    refuses(folder, "no class has two training images")

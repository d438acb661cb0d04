"""Whatever Pillow opens becomes 8-bit RGB, as a person would see it; whatever it cannot is named."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from elastictrainer import DataError
from elastictrainer.data.decode import decode, decode_all

RED = (200, 40, 10)


def through(image: Image.Image, kind: str, **options: object) -> Image.Image:
    """Save and open again, as a file would be."""
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return Image.open(buffer)


def colour(image: Image.Image, size: int = 8) -> list[int]:
    pixels, _ = decode(image, size=size)
    assert pixels.shape == (3, size, size)
    assert pixels.dtype == np.uint8
    return [int(np.median(channel)) for channel in pixels]


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "JPEG", "BMP", "GIF", "TIFF", "PPM", "TGA", "ICO"])
def test_formats(kind: str) -> None:
    size = (16, 16)
    seen = colour(through(Image.new("RGB", size, RED), kind))
    assert np.allclose(seen, RED, atol=8)


def test_lossless_formats_keep_every_pixel() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    for kind, options in (("PNG", {}), ("WEBP", {"lossless": True}), ("BMP", {})):
        decoded, mode = decode(through(Image.fromarray(pixels), kind, **options), size=8)
        assert mode == "RGB"
        assert np.array_equal(decoded, pixels.transpose(2, 0, 1))


def test_grey_black_and_white_and_palette() -> None:
    assert colour(through(Image.new("L", (9, 9), 77), "PNG")) == [77] * 3
    assert colour(through(Image.new("1", (9, 9), 1), "PNG")) == [255] * 3
    assert colour(through(Image.new("RGB", (9, 9), RED).convert("P"), "PNG")) == pytest.approx(RED, abs=26)
    assert colour(through(Image.new("RGB", (9, 9), RED).quantize(4), "GIF")) == pytest.approx(RED, abs=2)


def test_cmyk_is_converted() -> None:
    assert np.allclose(colour(through(Image.new("RGB", (16, 16), RED).convert("CMYK"), "JPEG")), RED, atol=8)


def test_transparency_lies_on_white() -> None:
    assert colour(through(Image.new("RGBA", (9, 9), (*RED, 255)), "PNG")) == list(RED)
    assert colour(through(Image.new("RGBA", (9, 9), (*RED, 0)), "PNG")) == [255] * 3
    assert colour(through(Image.new("LA", (9, 9), (0, 128)), "PNG")) == pytest.approx([127] * 3, abs=1)
    see_through = Image.new("P", (9, 9), 0)
    see_through.putpalette([*RED, 0, 0, 0])
    assert colour(through(see_through, "PNG", transparency=0)) == [255] * 3
    assert colour(through(see_through, "PNG", transparency=bytes([255, 0]))) == list(RED)


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_sixteen_bits_are_scaled_not_cut(kind: str) -> None:
    wide = np.full((9, 9), 0x8123, dtype=np.uint16)
    assert colour(through(Image.fromarray(wide), kind)) == [0x81] * 3


def test_floating_point_pixels_are_refused() -> None:
    with pytest.raises(ValueError, match="no fixed range"):
        decode(Image.fromarray(np.zeros((4, 4), np.float32)), size=4)


def test_the_cameras_orientation_is_applied() -> None:
    half = Image.new("RGB", (16, 16), (0, 0, 0))
    half.paste((255, 255, 255), (0, 0, 8, 16))
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by 90 degrees clockwise: what was left is now on top
    pixels, _ = decode(through(half, "JPEG", exif=exif, quality=95), size=16)
    assert pixels[:, :6].mean() > 250
    assert pixels[:, 10:].mean() < 5


def test_crop_keeps_proportions_and_squash_keeps_everything() -> None:
    wide = Image.new("RGB", (30, 10), (0, 0, 0))
    wide.paste((255, 255, 255), (10, 0, 20, 10))
    assert decode(wide, size=10)[0].min() == 255
    squashed = decode(wide, size=9, resize="squash")[0]
    assert squashed[:, :, 0].max() == 0
    assert squashed[:, :, 4].min() == 255


def test_a_large_jpeg_is_reduced_without_losing_its_look() -> None:
    gradient = np.broadcast_to(np.linspace(0, 255, 640, dtype=np.uint8)[None, :, None], (640, 640, 3))
    pixels, _ = decode(through(Image.fromarray(np.ascontiguousarray(gradient)), "JPEG", quality=95), size=16)
    expected = np.linspace(0, 255, 640).reshape(16, 40).mean(1)
    assert np.abs(pixels[0].mean(0) - expected).max() < 4


def test_an_animation_counts_with_its_first_frame() -> None:
    frames = [Image.new("RGB", (8, 8), c) for c in (RED, (0, 0, 255))]
    assert np.allclose(colour(through(frames[0], "WEBP", save_all=True, append_images=frames[1:], lossless=True)), RED)


def test_every_broken_image_is_named_in_one_line(tmp_path: Path) -> None:
    for index in range(12):
        Image.effect_noise((64, 64), 80).convert("RGB").save(tmp_path / f"{index}.jpg")
    (tmp_path / "3.jpg").write_bytes((tmp_path / "3.jpg").read_bytes()[:900])
    (tmp_path / "7.jpg").write_bytes(b"not an image at all")
    (tmp_path / "9.jpg").unlink()
    names = [f"{index}.jpg" for index in range(12)]
    kept: dict[int, np.ndarray] = {}
    words = r"^3 images cannot be read: 3\.jpg \(.*truncated.*\), 7\.jpg \(.*\), 9\.jpg"
    with pytest.raises(DataError, match=words) as caught:
        decode_all(lambda i: Image.open(tmp_path / names[i]), names, size=8, resize="crop", keep=kept.__setitem__)
    assert "\n" not in str(caught.value)
    assert set(kept) == set(range(12)) - {3, 7, 9}


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "GIF", "TIFF", "BMP"])
def test_a_file_cut_short_is_found_in_every_format(kind: str) -> None:
    buffer = io.BytesIO()
    Image.effect_noise((64, 64), 80).convert("RGB").save(buffer, kind)
    cut = buffer.getvalue()[: len(buffer.getvalue()) // 2]
    with pytest.raises(DataError, match=r"a\.img"):
        decode_all(lambda i: Image.open(io.BytesIO(cut)), ["a.img"], size=64, resize="crop", keep=lambda *_: None)


def test_conversions_are_counted_by_kind_with_the_first_name() -> None:
    images = [Image.new(mode, (4, 4)) for mode in ("RGB", "L", "L", "RGBA")]
    said: list[tuple[int, int]] = []
    found = decode_all(
        images.__getitem__,
        list("abcd"),
        size=4,
        resize="crop",
        keep=lambda *_: None,
        progress=lambda *at: said.append(at),
    )
    assert str(found) == "2 grey (first: b), 1 with transparency (first: d)"
    assert said == [(1, 4), (2, 4), (3, 4), (4, 4)]

"""Picture processors: grids and pixels, ours and transformers'; picture files that are odd, broken or bombs."""

import io
import pickle
import struct
import warnings
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageOps

from packhouse.client.errors import InvalidRequest
from packhouse.client.picture_files import BrokenPicture, picture_size, read_picture
from packhouse.client.processor import PatchProcessor, Processor, make_processor, tokens

QWEN = {"image_processor_type": "Qwen2VLImageProcessor", "size": {"shortest_edge": 3136, "longest_edge": 50176}}
SIZES = [(300, 168), (168, 300), (28, 28), (1, 1), (1000, 40), (57, 2000)]


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(pixels)


def saved(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


@pytest.fixture(scope="module")
def qwen() -> Processor:
    return make_processor(QWEN)


@given(st.integers(1, 3000), st.integers(1, 3000), st.integers(1, 60), st.integers(0, 200))
def test_a_grid_keeps_its_limits_whatever_the_picture(width: int, height: int, low: int, more: int) -> None:
    processor = PatchProcessor(patch_size=4, merge_size=2, min_pixels=low * 64, max_pixels=(low + more) * 64)
    if max(width, height) > 200 * min(width, height):
        with pytest.raises(ValueError, match="more than 200 times"):
            processor.grid(width, height)
        return
    time, rows, columns = processor.grid(width, height)
    assert time == 1
    assert rows % 2 == columns % 2 == 0 < rows * columns
    assert rows * columns * 16 <= processor.max_pixels
    assert tokens(processor, (time, rows, columns)) == rows * columns // 4


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_transformers_processor_gives_its_own_tokens_and_pixels(qwen: Processor, width: int, height: int) -> None:
    from transformers import Qwen2VLImageProcessorPil

    theirs = Qwen2VLImageProcessorPil(size=QWEN["size"])
    image = picture(width, height)
    made = theirs(images=[image], return_tensors="np")
    grid = qwen.grid(width, height)
    assert list(grid) == made["image_grid_thw"][0].tolist()
    assert tokens(qwen, grid) == theirs.get_number_of_image_patches(height, width) // 4
    assert np.array_equal(qwen.patches(image), made["pixel_values"])


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_ours_gives_the_pixels_of_qwens_without_its_second_frame(qwen: Processor, width: int, height: int) -> None:
    ours = make_processor({"max_pixels": 50176})
    image = picture(width, height)
    theirs = qwen.patches(image).reshape(-1, 3, 2, 14, 14)[:, :, 0]
    assert ours.grid(width, height) == qwen.grid(width, height)
    assert np.array_equal(ours.patches(image), theirs.reshape(len(theirs), -1))


def test_a_token_stands_for_the_patches_of_its_square() -> None:
    processor = PatchProcessor(
        patch_size=2, merge_size=2, min_pixels=1, max_pixels=10_000, mean=(0, 0, 0), std=(1, 1, 1)
    )
    squares = np.arange(6, dtype=np.uint8).reshape(2, 3).repeat(4, 0).repeat(4, 1)
    patches = processor.patches(Image.fromarray(np.stack([squares] * 3, -1)))
    assert patches.shape == (24, 12)
    assert np.array_equal(np.rint(patches * 255), np.arange(6).repeat(4)[:, None].repeat(12, 1))


def test_settings_make_the_same_processor_again(qwen: Processor) -> None:
    assert make_processor(qwen.settings()).settings() == qwen.settings()
    sent = pickle.loads(pickle.dumps(qwen))
    assert sent.settings() == qwen.settings()
    assert sent.grid(60, 40) == qwen.grid(60, 40)
    ours = PatchProcessor(patch_size=16)
    assert make_processor(ours.settings()).settings() == ours.settings() != PatchProcessor().settings()


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"patch_size": 0}, "above 0"),
        ({"patch_size": 14.5}, "whole numbers"),
        ({"min_pixels": 10_000, "max_pixels": 9_000}, "no min_pixels above"),
        ({"min_pixels": 1, "max_pixels": 783}, "does not hold one token"),
        ({"min_pixels": 10**10, "max_pixels": 10**11}, "more than 1,048,576 tokens"),
        ({"std": [1, 1, 0]}, "above 0"),
        ({"mean": ["a", "b", "c"]}, "could not convert"),
        ({"colour": 3}, "unexpected keyword argument 'colour'"),
        ({"image_processor_type": "NoSuchProcessor"}, "no image processor 'NoSuchProcessor'"),
        ({"image_processor_type": "AutoTokenizer"}, "no image processor"),
        ({"image_processor_type": "CLIPImageProcessorPil"}, "no merge_size"),
    ],
)
def test_settings_that_make_none_are_refused(settings: dict[str, object], told: str) -> None:
    with pytest.raises(InvalidRequest, match=told):
        make_processor(settings)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "BMP"])
def test_a_size_comes_from_the_header(kind: str) -> None:
    data = saved(picture(60, 40), kind)
    # Pillow reads a WebP as a whole, and decodes none of it.
    assert picture_size(data if kind == "WEBP" else data[: max(len(data) // 2, 900)]) == (60, 40)
    assert read_picture(data).size == (60, 40)


def test_no_pixel_is_decoded_for_a_size(tmp_path: Path) -> None:
    path = tmp_path / "cut.jpg"
    path.write_bytes(saved(picture(600, 400), "JPEG")[:5000])
    assert picture_size(path) == (600, 400)
    with pytest.raises(BrokenPicture, match="pixels cannot be read"):
        read_picture(path)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_picture_is_upright(kind: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = saved(picture(60, 40), kind, exif=exif)
    assert picture_size(data) == read_picture(data).size == ((40, 60) if orientation > 4 else (60, 40))
    if kind == "PNG":
        upright = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
        assert upright is not None
        assert np.array_equal(np.asarray(read_picture(data)), np.asarray(upright))


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "CMYK", "I;16"])
def test_any_kind_of_colours_becomes_rgb(mode: str) -> None:
    image = Image.new(mode, (30, 30))
    assert read_picture(saved(image, "JPEG" if mode == "CMYK" else "PNG")).mode == "RGB"


@pytest.mark.parametrize(
    "data", [b"", b"no picture", b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"%!PS-Adobe\n", b"<svg/>"]
)
def test_what_is_no_picture_is_told(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "secret-name"
    path.write_bytes(data)
    for source in (data, path):
        with pytest.raises(BrokenPicture) as told:
            picture_size(source)
        assert "secret-name" not in str(told.value)


def test_a_bomb_is_not_decoded() -> None:
    head = struct.pack(">IIBBBBB", 40_000, 40_000, 8, 2, 0, 0, 0)
    chunk = b"IHDR" + head
    data = b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + chunk + struct.pack(">I", zlib.crc32(chunk))
    data += struct.pack(">I", 0) + b"IDAT" + struct.pack(">I", zlib.crc32(b"IDAT"))
    with pytest.raises(BrokenPicture):
        picture_size(data)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert picture_size(saved(Image.new("1", (12_000, 11_000)))) == (12_000, 11_000)
    with pytest.raises(BrokenPicture, match="the limit is"):
        picture_size(saved(Image.new("1", (12_000, 12_000))))

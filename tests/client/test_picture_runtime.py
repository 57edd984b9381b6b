"""Pictures at run time, segment by segment: those within it, at their places, from the file with the right digest."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.pictures import SETTINGS, TOKENS, write_pictures

from packhouse.client.digest import digest_bytes
from packhouse.client.errors import InvalidRequest, Mismatch, NotFound
from packhouse.client.extra import Extra
from packhouse.client.format import Manifest, manifest_path
from packhouse.client.picture_files import read_picture
from packhouse.client.picture_runtime import Pictures
from packhouse.client.processor import make_processor

NAMES = ["a.png", "b.png"]
PLACES = [10, 20]


@pytest.fixture
def album(tmp_path: Path) -> Path:
    return write_pictures(tmp_path / "album")


def segment(album: Path, start: int, length: int, prefix: str = "") -> Extra:
    processor = make_processor(SETTINGS)
    values: dict[str, Any] = {
        "pictures": [prefix + name for name in NAMES],
        "picture_digests": [digest_bytes((album / name).read_bytes()) for name in NAMES],
        "picture_grids": [list(processor.grid(*read_picture(album / name).size)) for name in NAMES],
        "picture_places": PLACES,
    }
    return Extra(7, start, length, values)


@pytest.mark.parametrize(
    ("start", "length", "kept"),
    [(0, 40, [0, 1]), (0, 12, [0]), (0, 10, []), (12, 28, [1]), (12, 8, []), (20, 8, [1]), (28, 9, []), (0, 20, [0])],
)
def test_a_segment_has_the_pictures_within_it(album: Path, start: int, length: int, kept: list[int]) -> None:
    pictures = Pictures(make_processor(SETTINGS), [album])
    made = pictures(segment(album, start, length))
    if not kept:
        assert made == {}
        return
    patches = [pictures.processor.patches(read_picture(album / NAMES[index])) for index in kept]
    assert np.array_equal(made["pixel_values"], np.concatenate(patches))
    assert made["image_places"].tolist() == [PLACES[index] - start for index in kept]
    assert made["image_grid_thw"].prod(1).tolist() == [4 * TOKENS[NAMES[index]] for index in kept]


@pytest.mark.parametrize(("start", "length"), [(0, 11), (11, 20), (0, 27), (21, 30)])
def test_a_picture_that_is_cut_is_told(album: Path, start: int, length: int) -> None:
    with pytest.raises(Mismatch, match="cuts sample 7 within the picture"):
        Pictures(make_processor(SETTINGS), [album])(segment(album, start, length))


def test_a_file_is_looked_for_in_the_roots_whose_prefix_it_has(album: Path, tmp_path: Path) -> None:
    def load(*roots: str, prefix: str = "") -> Any:
        return Pictures(make_processor(SETTINGS), roots)(segment(album, 0, 40, prefix))

    assert load(f"x/={album}", prefix="x/")
    assert load(str(tmp_path), prefix="album/")
    assert load(str(tmp_path), prefix=f"{album}/")
    odd = write_pictures(tmp_path / "a=b")
    assert load(str(odd))
    with pytest.raises(NotFound, match=r"'y/a.png' of sample 7 is not there \(no root fits its name\)"):
        load(f"x/={album}", prefix="y/")


def test_a_sample_without_pictures_has_nothing_to_load(album: Path) -> None:
    pictures = Pictures(make_processor(SETTINGS), [album])
    assert pictures(Extra(0, 0, 9, {})) == {}
    assert (
        pictures(Extra(0, 0, 9, dict.fromkeys(["pictures", "picture_digests", "picture_grids", "picture_places"])))
        == {}
    )


def test_the_processor_is_that_of_the_datasets(memory_store: type[Any], album: Path) -> None:
    store = memory_store()

    def dataset(tokenize: dict[str, Any] | None) -> str:
        recipe = {} if tokenize is None else {"tokenize": tokenize}
        manifest = Manifest({"tokenizer": "t", **recipe}, 300, ())
        store.write(manifest_path(manifest.id), manifest.dump())
        return manifest.id

    extra = {"pictures": "list<string>"}
    ours, usual = ({"options": options, "extra": extra} for options in ({"processor": SETTINGS}, {}))
    assert Pictures.of(store, [dataset(ours)] * 2, [album]).processor.settings()["max_pixels"] == SETTINGS["max_pixels"]
    assert Pictures.of(store, [dataset(usual)], [album]).processor.settings() == make_processor({}).settings()
    with pytest.raises(Mismatch, match="different picture processors"):
        Pictures.of(store, [dataset(ours), dataset(usual)], [album])
    for other in ([], [dataset(None)], [dataset({"options": {}, "extra": {}})]):
        with pytest.raises(InvalidRequest, match="dataset"):
            Pictures.of(store, other, [album])

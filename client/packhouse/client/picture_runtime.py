"""Pictures at run time: from a sample's extra columns to pixels, in the process that builds the batches."""

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import torch

from packhouse.client.digest import digest_bytes
from packhouse.client.errors import Damaged, InvalidRequest, Mismatch, NotFound
from packhouse.client.extra import Extra
from packhouse.client.format import read_manifest
from packhouse.client.picture_files import COLUMNS, BrokenPicture, check_pillow, read_picture
from packhouse.client.processor import Pixels, Processor, make_processor, tokens
from packhouse.client.store import ReadStore


class Pictures:
    """Loads and preprocesses the pictures of samples; give it to a data set as ``Options(runtime=…)``.

    ``roots`` are the folders that pictures are looked for in, each as ``[PREFIX=]FOLDER``: that of the job's source,
    and the job's file roots. The first file that has the digest is it.
    """

    state: Literal["cache", "runtime"] = "runtime"

    def __init__(self, processor: Processor, roots: Sequence[str | os.PathLike[str]]) -> None:
        check_pillow()
        self.processor = processor
        self._roots = [_root(os.fspath(root)) for root in roots]

    @classmethod
    def of(cls, store: ReadStore, datasets: Iterable[str], roots: Sequence[str | os.PathLike[str]]) -> Self:
        """Take the processor that the samples of ``datasets`` were cached for.

        Raises ``Mismatch`` where they were cached for different ones, ``InvalidRequest`` where for none.
        """
        found: list[Mapping[str, Any]] = []
        for dataset in datasets:
            step = read_manifest(store, dataset).recipe.get("tokenize") or {}
            settings = step.get("options", {}).get("processor")
            if "pictures" not in step.get("extra", {}) or not isinstance(settings, dict | None):
                raise InvalidRequest(f"dataset {dataset} has no pictures", "leave out the runtime, or the dataset")
            found.append(settings or {})
        if not found:
            raise InvalidRequest("no dataset is given", "give those of the plan")
        if any(one != found[0] for one in found):
            raise Mismatch("the datasets were cached for different picture processors", "cache them for one")
        return cls(make_processor(found[0]), roots)

    def __call__(self, extra: Extra) -> dict[str, torch.Tensor]:
        """Return the pictures within a segment, in the order of their tokens; nothing where it has none.

        ``pixel_values`` float32 (patches, values of a patch); ``image_grid_thw`` int64 (pictures, 3);
        ``image_places`` int64 (pictures,), the token of the segment at which each one's tokens begin.

        Raises ``NotFound``, ``Mismatch`` and ``Damaged`` for a file that is gone, another or broken, and ``Mismatch``
        where the segment ends within a picture: each names the sample and the picture.
        """
        names, digests, grids, places = (extra.values.get(column) or [] for column in COLUMNS)
        pixels: list[Pixels] = []
        kept: list[tuple[int, int, int]] = []
        begins: list[int] = []
        for name, digest, grid, place in zip(names, digests, grids, places, strict=True):
            begin, end = place - extra.start, place - extra.start + tokens(self.processor, tuple(grid))
            if end <= 0 or begin >= extra.length:
                continue
            if begin < 0 or end > extra.length:
                raise Mismatch(
                    f"the plan cuts sample {extra.sample} within the picture {name!r}",
                    "plan with a strategy that does not cut samples, such as best_fit, and overlong 'drop' or 'error'",
                )
            pixels.append(self._patches(extra.sample, name, digest, grid))
            kept.append(tuple(grid))
            begins.append(begin)
        if not pixels:
            return {}
        return {
            "pixel_values": torch.from_numpy(np.concatenate(pixels)),
            "image_grid_thw": torch.tensor(kept, dtype=torch.int64),
            "image_places": torch.tensor(begins, dtype=torch.int64),
        }

    def _patches(self, sample: int, name: str, digest: str, grid: Sequence[int]) -> Pixels:
        what = f"the picture {name!r} of sample {sample}"
        try:
            patches = self.processor.patches(read_picture(self._read(what, name, digest)))
        except (BrokenPicture, ValueError) as error:
            raise Damaged(f"{what} cannot be used: {error}", "mend the file and run the job again") from None
        if len(patches) != np.prod(grid):
            raise Mismatch(
                f"{what} has {len(patches)} patches, and its tokens are for {np.prod(grid)}",
                "use the processor that the dataset was cached for",
            )
        return patches

    def _read(self, what: str, name: str, digest: str) -> bytes:
        """Return the bytes of a picture from the first root that has the file with that digest."""
        looked = [
            os.path.join(folder, name[len(prefix) :]) for prefix, folder in self._roots if name.startswith(prefix)
        ]
        changed = ""
        for path in looked:
            try:
                data = Path(path).read_bytes()
            except (OSError, ValueError):
                continue
            if digest_bytes(data) == digest:
                return data
            changed = path
        if changed:
            raise Mismatch(
                f"{what} is another than when it was cached: {changed!r}", "put it back, or run the job again"
            )
        places = ", ".join(map(repr, looked)) or "no root fits its name"
        raise NotFound(f"{what} is not there ({places})", "put it back, or give its folder as a root")


def _root(root: str) -> tuple[str, str]:
    """Return the prefix and the folder of a root."""
    prefix, found, folder = root.partition("=")
    return (prefix, folder) if found and not os.path.isdir(root) else ("", root)

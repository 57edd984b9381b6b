"""Picture processors: how many tokens a picture of a size takes, and the patches of pixels behind those tokens.

A picture is resized to a grid of patches. A token stands for a square of ``merge_size`` × ``merge_size`` patches; the
patches of a token lie side by side, and the tokens row by row. Legend: N patches, C = 3 colours, P ``patch_size``.
"""

import json
import math
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from packhouse.client.digest import canonical_json
from packhouse.client.errors import InvalidRequest, Mismatch

if TYPE_CHECKING:
    from PIL.Image import Image

Grid = tuple[int, int, int]
"""Patches of a picture by time (1 for a still one), height and width."""
Pixels = npt.NDArray[np.float32]

MAX_ASPECT = 200
"""Longer side by shorter side of the most extreme picture that is taken."""
MAX_TOKENS = 1 << 20
"""Most tokens of a picture, which may be enlarged to ``min_pixels``."""


class Processor(Protocol):
    """What turns pictures into patches. The same settings must give the same patches."""

    merge_size: int

    def grid(self, width: int, height: int) -> Grid:
        """Return the grid of a picture of that many pixels; raise ``ValueError`` for one that cannot be taken."""

    def patches(self, image: "Image") -> Pixels:
        """Return the patches of an RGB picture, float32 (N, values of a patch), in the order of its tokens."""

    def settings(self) -> dict[str, Any]:
        """Return what ``make_processor`` makes the same processor of, as JSON."""


def tokens(processor: Processor, grid: Grid) -> int:
    """Return how many tokens a picture with that grid takes."""
    return math.prod(grid) // processor.merge_size**2


class PatchProcessor:
    """Resizes by bicubic interpolation, normalizes, cuts into patches of (C, P, P) values.

    Both sides become multiples of ``patch_size * merge_size``, the area between ``min_pixels`` and ``max_pixels``, and
    the ratio of the sides stays as near as that allows. Source of the rule: Qwen2-VL (arXiv 2409.12191), section 2.1.
    """

    def __init__(
        self,
        patch_size: int = 14,
        merge_size: int = 2,
        min_pixels: int = 56 * 56,
        max_pixels: int = 28 * 28 * 1280,
        mean: tuple[float, ...] = (0.48145466, 0.4578275, 0.40821073),
        std: tuple[float, ...] = (0.26862954, 0.26130258, 0.27577711),
    ) -> None:
        whole = (patch_size, merge_size, min_pixels, max_pixels)
        if not all(type(value) is int and value > 0 for value in whole) or min_pixels > max_pixels:
            raise InvalidRequest(
                f"patch_size, merge_size, min_pixels and max_pixels are {whole}",
                "use whole numbers above 0, and no min_pixels above max_pixels",
            )
        if max_pixels < (patch_size * merge_size) ** 2:
            raise InvalidRequest(
                f"max_pixels {max_pixels} does not hold one token of {patch_size * merge_size} pixels a side",
                "raise it",
            )
        if max_pixels // (patch_size * merge_size) ** 2 > MAX_TOKENS:
            raise InvalidRequest(
                f"max_pixels {max_pixels} allows a picture more than {MAX_TOKENS:,} tokens", "lower it"
            )
        if len(mean) != 3 or len(std) != 3 or not all(value > 0 for value in std):
            raise InvalidRequest(f"mean is {mean} and std {std}", "give three numbers each, std above 0")
        self.patch_size, self.merge_size = patch_size, merge_size
        self.min_pixels, self.max_pixels = min_pixels, max_pixels
        self.mean, self.std = tuple(map(float, mean)), tuple(map(float, std))

    def settings(self) -> dict[str, Any]:
        """Return the arguments."""
        names = ("patch_size", "merge_size", "min_pixels", "max_pixels")
        return {name: getattr(self, name) for name in names} | {"mean": list(self.mean), "std": list(self.std)}

    def grid(self, width: int, height: int) -> Grid:
        """Return 1, and how many patches the resized picture has in height and width."""
        if min(width, height) < 1 or max(width, height) > MAX_ASPECT * min(width, height):
            raise ValueError(f"{width} × {height} pixels: one side is more than {MAX_ASPECT} times the other")
        unit = self.patch_size * self.merge_size
        most, least = self.max_pixels // unit**2, self.min_pixels / unit**2
        rows, columns = max(1, round(height / unit)), max(1, round(width / unit))
        if rows * columns < least:
            grow = math.sqrt(self.min_pixels / (height * width))
            rows, columns = (math.ceil(side * grow / unit) for side in (height, width))
        if rows * columns > most:  # also where min_pixels leaves no room for whole tokens
            shrink = math.sqrt(height * width / self.max_pixels)
            rows, columns = (max(1, math.floor(side / shrink / unit)) for side in (height, width))
            # A side that cannot become shorter than one token takes its share from the other.
            rows, columns = min(rows, most // columns or 1), min(columns, most // rows or 1)
        return 1, rows * self.merge_size, columns * self.merge_size

    def patches(self, image: "Image") -> Pixels:
        """Return float32 (N, C * P * P)."""
        from PIL.Image import Resampling

        _, rows, columns = self.grid(*image.size)
        size, merge = self.patch_size, self.merge_size
        resized = image.convert("RGB").resize((columns * size, rows * size), Resampling.BICUBIC)
        values: Pixels = np.asarray(resized, np.float32) / np.float32(255)
        values -= np.asarray(self.mean, np.float32)
        values /= np.asarray(self.std, np.float32)
        cut = values.reshape(rows // merge, merge, size, columns // merge, merge, size, 3)
        ordered = cut.transpose(0, 3, 1, 4, 6, 2, 5)
        return np.ascontiguousarray(ordered).reshape(rows * columns, 3 * size * size)


class TransformersProcessor:
    """A transformers image processor that gives ``pixel_values`` (N, D) and ``image_grid_thw``, as Qwen2-VL's does."""

    def __init__(self, image_processor: Any) -> None:
        merge = getattr(image_processor, "merge_size", None)
        if not isinstance(merge, int):
            name = type(image_processor).__name__
            raise InvalidRequest(
                f"the image processor {name} has no merge_size, so its tokens cannot be counted",
                "take one that gives image_grid_thw, such as Qwen2-VL's",
            )
        self.merge_size: int = merge
        self._processor = image_processor
        self._grid = lru_cache(4096)(self._grid_of_blank)

    def __reduce__(self) -> tuple[Any, ...]:
        return TransformersProcessor, (self._processor,)  # a cache cannot be sent to another process

    @classmethod
    def named(cls, name: str, settings: Mapping[str, Any]) -> "TransformersProcessor":
        """Make the image processor of transformers with that class name; raise ``InvalidRequest``."""
        try:
            import transformers
            from transformers.image_processing_utils import BaseImageProcessor
        except ImportError as error:
            raise InvalidRequest(f"the image processor {name} needs transformers ({error})", "install it") from None
        try:
            kind = getattr(transformers, name, None)
        except (ImportError, RuntimeError):  # a part of it whose own imports fail
            kind = None
        if isinstance(kind, type) and issubclass(kind, BaseImageProcessor):
            try:
                return cls(kind(**settings))
            except (ImportError, TypeError, ValueError) as error:
                raise InvalidRequest(f"{name} cannot be made of these settings ({error})", "correct them") from None
        raise InvalidRequest(f"transformers has no image processor {name!r}", "name a class of it")

    def settings(self) -> dict[str, Any]:
        """Return what transformers writes to preprocessor_config.json."""
        made = {name: value for name, value in self._processor.to_dict().items() if value is not None}
        plain: dict[str, Any] = json.loads(canonical_json(made))
        return plain

    def grid(self, width: int, height: int) -> Grid:
        """Return ``image_grid_thw`` of a picture of that size: what the processor makes of a blank one."""
        if min(width, height) < 1 or max(width, height) > MAX_ASPECT * min(width, height):
            raise ValueError(f"{width} × {height} pixels: one side is more than {MAX_ASPECT} times the other")
        return self._grid(width, height)

    def patches(self, image: "Image") -> Pixels:
        """Return ``pixel_values``, float32 (N, D)."""
        return np.asarray(self._run(image)["pixel_values"], np.float32)

    def _grid_of_blank(self, width: int, height: int) -> Grid:
        from PIL import Image

        t, h, w = np.asarray(self._run(Image.new("RGB", (width, height)))["image_grid_thw"])[0].tolist()
        return t, h, w

    def _run(self, image: "Image") -> Any:
        made = self._processor(images=[image], return_tensors="np")
        if "pixel_values" not in made or "image_grid_thw" not in made:
            raise Mismatch(f"{type(self._processor).__name__} gives {sorted(made)}", "it must give image_grid_thw")
        return made


def make_processor(settings: Mapping[str, Any]) -> Processor:
    """Return the processor of these settings; raise ``InvalidRequest``.

    With ``image_processor_type``, as in a preprocessor_config.json, it is that class of transformers; else ours.
    """
    given = dict(settings)
    name = given.pop("image_processor_type", None)
    if name is not None:
        return TransformersProcessor.named(str(name), given)
    try:
        return PatchProcessor(**given)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(
            f"the picture processor does not take these settings ({error})",
            "it takes patch_size, merge_size, min_pixels, max_pixels, mean and std; transformers' own are taken with "
            "their image_processor_type",
        ) from None

"""Pictures as files: their size from the header alone, and their pixels; both upright, as EXIF says.

What the cache keeps of a sample with pictures are these columns, each a list with an entry for each picture:

================  ==================  =============================================================================
column            type                meaning
================  ==================  =============================================================================
pictures          list<string>        the file, as the record names it
picture_digests   list<string>        xxh3-128 of its bytes
picture_grids     list<list<int32>>   its patches by time, height and width
picture_places    list<int32>         token of the sample at which its tokens begin
================  ==================  =============================================================================
"""

import os
import warnings
from io import BytesIO
from typing import TYPE_CHECKING, Any

from packhouse.client.errors import InvalidRequest

if TYPE_CHECKING:
    from PIL.Image import Image

COLUMNS = {
    "pictures": "list<string>",
    "picture_digests": "list<string>",
    "picture_grids": "list<list<int32>>",
    "picture_places": "list<int32>",
}
"""The extra columns of samples with pictures, and their types."""

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")
MAX_PIXELS = 1 << 27
"""Pixels of the largest picture: what is larger is taken for a bomb."""

_ORIENTATION = 0x0112
_SIDEWAYS = (5, 6, 7, 8)
_TURNS: dict[int, Any] = {2: 0, 3: 3, 4: 1, 5: 5, 6: 4, 7: 6, 8: 2}
"""The ``PIL.Image.Transpose`` that puts each orientation right."""


class BrokenPicture(ValueError):
    """A file that is no picture that can be used."""


def check_pillow() -> None:
    """Raise ``InvalidRequest`` where pictures cannot be read."""
    try:
        import PIL.Image  # noqa: F401
    except ModuleNotFoundError:
        detail = "pictures need pillow, which is not installed"
        raise InvalidRequest(detail, "pip install 'packhouse[vision]'") from None


def picture_size(source: str | os.PathLike[str] | bytes) -> tuple[int, int]:
    """Return the width and height in pixels of a picture as it is seen, from its header: no pixel is decoded.

    Raises ``BrokenPicture``.
    """
    with _open(source) as image:
        width, height = image.size
        return (height, width) if _orientation(image) in _SIDEWAYS else (width, height)


def read_picture(source: str | os.PathLike[str] | bytes) -> "Image":
    """Return a picture's pixels, upright and as RGB; of an animation the first frame. Raises ``BrokenPicture``."""
    with _open(source) as image:
        turn = _TURNS.get(_orientation(image))
        try:
            image.load()
            return (image if turn is None else image.transpose(turn)).convert("RGB")
        except Exception as error:  # decoders raise OSError, SyntaxError, struct.error and more
            raise BrokenPicture(f"its pixels cannot be read ({_words(error)})") from None


def _orientation(image: "Image") -> int:
    """Return the EXIF orientation that stands before the pixels: Pillow's getexif would decode some formats for it."""
    from PIL.Image import Exif

    exif = Exif()
    try:
        exif.load(image.info.get("exif", b""))
        return int(exif.get(_ORIENTATION, 1))
    except Exception as error:  # whatever the parser of broken tags raises
        raise BrokenPicture(f"its EXIF data cannot be read ({_words(error)})") from None


def _open(source: str | os.PathLike[str] | bytes) -> "Image":
    from PIL import Image

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # MAX_PIXELS is the limit
            image = Image.open(BytesIO(source) if isinstance(source, bytes) else source, formats=FORMATS)
    except Exception as error:  # Pillow's parsers raise more than they document
        raise BrokenPicture(f"it is not a picture of the formats {', '.join(FORMATS)} ({_words(error)})") from None
    if image.width * image.height > MAX_PIXELS:
        image.close()
        raise BrokenPicture(f"it has {image.width:,} × {image.height:,} pixels, and the limit is {MAX_PIXELS:,}")
    return image


def _words(error: Exception) -> str:
    """Return what went wrong, without the name of the file."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return (
        "unknown format" if type(error).__name__ == "UnidentifiedImageError" else (text or type(error).__name__)[:200]
    )

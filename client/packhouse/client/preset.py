"""Presets: packs in the form in which XTuner reads and writes them, out of a plan, in a folder, and on the wire.

Four files: ``boundaries.npy`` int64 (packs + 1,), where each pack's rows begin; ``samples.npy`` int64 (segments, 6), a
row the path, the sample in it, char_start, char_end (-1, -1 for a sample that is not cut by characters), and the first
and last token; ``paths.json``, the names of the paths; ``order.npy`` int64 (packs,), the packs in training order, which
may be left out. On the wire they are one ZIP.
"""

import io
import json
import zipfile
import zlib
from pathlib import Path

import numpy as np

from packhouse.client.errors import InvalidRequest
from packhouse.client.pack_table import decode_steps, joined
from packhouse.client.plan import PlanSource

FILES = ("boundaries.npy", "samples.npy", "paths.json", "order.npy")

MOST_BYTES = 1 << 30
"""Longest preset that is taken in, unpacked."""

_STEPS_AT_ONCE = 256
_UNREADABLE = NotImplementedError, OSError, EOFError, RuntimeError, zlib.error


def export_preset(plan: PlanSource, folder: Path, paths: list[str] | None = None) -> None:
    """Write the plan's packs to ``folder`` for XTuner to replay, padded where short.

    ``paths[i]`` is the file that XTuner reads dataset i from, by default the dataset's id; the lines of that file must
    be the dataset's samples, in order. Packs without a segment are left out: XTuner has none.
    """
    header = plan.header
    names = [dataset.id for dataset in header.datasets] if paths is None else paths
    if len(names) != len(header.datasets):
        raise InvalidRequest(f"there are {len(names)} paths for {len(header.datasets)} datasets", "name one for each")
    steps = range(0, header.steps, _STEPS_AT_ONCE)
    batches = [plan.slice(first, min(first + _STEPS_AT_ONCE, header.steps), 0, 1) for first in steps]
    packs = joined([decode_steps(batch).packs for batch in batches])
    rows = [sum(shard.rows for shard in dataset.shards) for dataset in header.datasets]
    bounds = np.cumsum([0, *rows])
    path = np.searchsorted(bounds, packs.sample, side="right") - 1
    chars = np.full(len(path), -1)
    columns = [path, packs.sample - bounds[path], chars, chars, packs.start, packs.start + packs.length]
    boundaries = np.unique(packs.offsets)
    arrays = boundaries, np.stack(columns, axis=1).astype(np.int64), np.arange(len(boundaries) - 1)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, array in zip((FILES[0], FILES[1], FILES[3]), arrays, strict=True):
            np.save(folder / name, array)
        (folder / FILES[2]).write_text(json.dumps(names), encoding="utf-8")
    except OSError as error:
        raise InvalidRequest(f"the folder {str(folder)!r} cannot be written ({error})", "name another one") from None


def read_files(folder: Path) -> dict[str, bytes]:
    """Return the preset's files in ``folder``; raise ``InvalidRequest`` where one is missing."""
    try:
        return {name: (folder / name).read_bytes() for name in FILES if name != FILES[3] or (folder / name).exists()}
    except OSError as error:
        raise InvalidRequest(f"{str(folder)!r} is not a preset ({error})", f"it needs {', '.join(FILES[:3])}") from None


def to_zip(files: dict[str, bytes]) -> bytes:
    """Return the files as one ZIP."""
    body = io.BytesIO()
    with zipfile.ZipFile(body, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return body.getvalue()


def from_zip(data: bytes) -> dict[str, bytes]:
    """Return the files of a ZIP; raise ``InvalidRequest`` for one that is none, is too long, or holds other files."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            members = archive.infolist()
            strange = [member.filename for member in members if member.filename not in FILES]
            if strange or len(members) > len(FILES):
                raise InvalidRequest(f"a preset has no file {strange[:1]}", f"put {', '.join(FILES)} in it")
            if sum(member.file_size for member in members) > MOST_BYTES:
                raise InvalidRequest(f"the preset unpacks to over {MOST_BYTES:,} bytes", "cut it in parts")
            return {member.filename: archive.read(member) for member in members}
    except (zipfile.BadZipFile, zipfile.LargeZipFile, *_UNREADABLE) as error:
        raise InvalidRequest(f"the preset is not a ZIP ({error})", "send its files in one") from None

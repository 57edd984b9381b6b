"""Strategy preset: packs brought along, in the form in which XTuner reads and writes them.

Four files: ``boundaries.npy`` int64 (packs + 1,), where each pack's rows begin; ``samples.npy`` int64 (segments, 6), a
row the path, the sample in it, char_start, char_end (-1, -1 for a sample that is not cut by characters), and the first
and last token; ``paths.json``, the names of the paths; ``order.npy`` int64 (packs,), the packs in training order, which
may be left out. Here path i is the i-th dataset of the plan and its name is not looked at.
"""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np

from packhouse.client.digest import digest_bytes, digest_json
from packhouse.client.errors import InvalidRequest, NotFound
from packhouse.client.pack_table import PackTable
from packhouse.client.store import ReadStore, Store
from packhouse.worker.packing.segments import Int32, Int64, Packing, narrow

FILES = ("boundaries.npy", "samples.npy", "paths.json", "order.npy")


def preset(boundaries: Int64, samples: Int64, order: Int64, lengths: Int32, bounds: list[int]) -> Packing:
    """Return the packs ``order`` of the three arrays; ``bounds`` (datasets + 1,) is where the datasets' samples begin.

    Raises ``InvalidRequest`` for packs, paths, samples or tokens that are not there.
    """
    if samples.ndim != 2 or samples.shape[1] != 6 or len(boundaries) == 0 or boundaries[-1] != len(samples):
        raise InvalidRequest("the preset's boundaries do not fit its samples", "give samples.npy the shape (n, 6)")
    path, row, _, _, start, end = samples.T
    datasets = len(bounds) - 1
    _refuse((np.diff(boundaries) < 0) | (boundaries[0] != 0), "boundary {} of the preset falls")
    _refuse((order < 0) | (order >= len(boundaries) - 1), "place {} of the preset's order names no pack")
    _refuse((path < 0) | (path >= datasets), f"row {{}} of the preset names a path over the {datasets} datasets")
    base = np.array(bounds)
    _refuse((row < 0) | (row >= np.diff(base)[path]), "row {} of the preset names a sample over its dataset's")
    sample = base[path] + row
    _refuse((start < 0) | (end <= start) | (end > lengths[sample]), "row {} of the preset has tokens over its sample's")
    kind = narrow(bounds[-1])
    packs = Packing(boundaries, sample.astype(kind), start.astype(np.int32), (end - start).astype(np.int32))
    return packs.take(order)


def _refuse(wrong: Any, message: str) -> None:
    if np.any(wrong):
        raise InvalidRequest(
            message.format(int(np.argmax(wrong))), "write the preset for these datasets, in this order"
        )


def put_preset(store: Store, files: dict[str, bytes]) -> str:
    """Store the ``FILES`` of a preset and return its digest; raise ``InvalidRequest`` for files that cannot be read."""
    missing = [name for name in FILES[:3] if name not in files]
    if missing or set(files) - set(FILES):
        raise InvalidRequest(f"a preset has the files {', '.join(FILES)}, not {', '.join(files)}", "order.npy may miss")
    for name in files:
        _load(name, files[name])
    digest = digest_json({name: digest_bytes(data) for name, data in files.items()})
    for name, data in files.items():
        store.write(_path(digest, name), data)
    return digest


def read_preset(store: ReadStore, digest: str) -> tuple[Int64, Int64, Int64]:
    """Return boundaries, samples and order of a stored preset; raise ``NotFound``."""
    try:
        boundaries, samples = (_load(name, store.open(_path(digest, name))) for name in FILES[:2])
    except NotFound:
        raise NotFound(f"there is no preset {digest}", "store its files first") from None
    try:
        order = _load(FILES[3], store.open(_path(digest, FILES[3])))
    except NotFound:
        order = np.arange(len(boundaries) - 1)
    return boundaries, samples, order


def _path(digest: str, name: str) -> str:
    if not digest.isalnum():
        raise NotFound(f"{digest!r} is not a preset's digest", "use the one that storing it told")
    return f"presets/{digest}/{name}"


def _load(name: str, data: Any) -> Any:
    try:
        if name == "paths.json":
            return json.loads(bytes(data))
        return np.load(io.BytesIO(data), allow_pickle=False).astype(np.int64, casting="safe")
    except (ValueError, TypeError, EOFError) as error:
        raise InvalidRequest(f"{name} of the preset cannot be read ({error})", "write it with numpy.save") from error


def read_files(folder: Path) -> dict[str, bytes]:
    """Return the preset's files in ``folder``."""
    return {name: (folder / name).read_bytes() for name in FILES if (folder / name).exists()}


def export_preset(folder: Path, packs: PackTable, bounds: list[int], paths: list[str]) -> None:
    """Write ``packs`` as a preset for XTuner to replay, padded where short; ``paths[i]`` is its file of dataset i.

    Holds where that file's lines are the dataset's samples, in order. ``bounds`` (datasets + 1,) is where the datasets'
    samples begin. Packs without a segment are left out: XTuner has none.
    """
    folder.mkdir(parents=True, exist_ok=True)
    sample = packs.sample.astype(np.int64)
    path = np.searchsorted(bounds, sample, side="right") - 1
    chars = np.full(len(sample), -1)
    columns = [path, sample - np.array(bounds)[path], chars, chars, packs.start, packs.start + packs.length]
    boundaries = np.unique(packs.offsets)
    arrays = boundaries, np.stack(columns, axis=1).astype(np.int64), np.arange(len(boundaries) - 1)
    for name, array in zip((FILES[0], FILES[1], FILES[3]), arrays, strict=True):
        np.save(folder / name, array)
    (folder / FILES[2]).write_text(json.dumps(paths))

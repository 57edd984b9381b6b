"""Strategy preset: packs brought along, in the form in which XTuner reads and writes them (``client/preset.py``).

Path i is the i-th dataset of the plan and its name is not looked at.
"""

import io
import json
import math
from typing import Any

import numpy as np

from packhouse.client.digest import digest_bytes, digest_json
from packhouse.client.errors import InvalidRequest, NotFound
from packhouse.client.preset import FILES
from packhouse.client.store import ReadStore, Store
from packhouse.worker.packing.segments import Int32, Int64, Packing, narrow

DIMENSIONS = {FILES[0]: 1, FILES[1]: 2, FILES[3]: 1}


def preset(boundaries: Int64, samples: Int64, order: Int64, lengths: Int32, bounds: list[int]) -> Packing:
    """Return the packs ``order`` of the three arrays; ``bounds`` (datasets + 1,) is where the datasets' samples begin.

    Raises ``InvalidRequest`` for packs, paths, samples or tokens that are not there.
    """
    if samples.shape[1] != 6 or len(boundaries) == 0 or boundaries[-1] != len(samples):
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
    """Return an array of ``DIMENSIONS``, int64, or the list of paths; raise ``InvalidRequest`` for anything else."""
    if name == FILES[2]:
        return _paths(bytes(data))
    try:
        stream = io.BytesIO(data)
        header = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
        shape, _, kind = header[np.lib.format.read_magic(stream)](stream)
        if len(shape) != DIMENSIONS[name]:
            raise ValueError(f"it has the shape {shape}")
        # A header may claim more than there is, and numpy would take memory for all of it.
        if min(shape) < 0 or math.prod(shape) * kind.itemsize != len(stream.getbuffer()) - stream.tell():
            raise ValueError(f"it does not hold {shape} numbers")
        return np.load(io.BytesIO(data), allow_pickle=False).astype(np.int64, casting="safe")
    except (ValueError, TypeError, EOFError, KeyError) as error:
        raise InvalidRequest(f"{name} of the preset cannot be read ({error})", "write it with numpy.save") from error


def _paths(data: bytes) -> list[str]:
    try:
        names = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{FILES[2]} of the preset cannot be read ({error})", "write a JSON list") from None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise InvalidRequest(f"{FILES[2]} of the preset is not a list of names", "write a JSON list of strings")
    return names

"""Peers of ``streaming.py``, measured by the interpreter that ``make bench-peers`` makes: it has them and no packhouse.

The ids of all samples lie in ``{samples}.ids.npy``, uint32, and where each ends in ``{samples}.ends.npy``.
"""

import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from parts import Figures, main

LIMIT = 2.0
"""Seconds that a part is measured for."""


def rate(batches: Iterator[Any]) -> Figures:
    """Take batches of ids for some seconds; return tokens, seconds and the CPU time of this process."""
    for _ in zip(range(3), batches, strict=False):
        pass  # what is compiled or mapped once
    start, cpu, tokens, passed = time.perf_counter(), time.process_time(), 0, 0.0
    for batch in batches:
        tokens += batch.numel()
        passed = time.perf_counter() - start
        if passed > LIMIT:
            break
    return {"tokens": tokens, "seconds": passed, "cpu_s": time.process_time() - cpu}


def litdata(samples: str, length: int) -> Figures:
    """Read blocks of ids by litdata's TokensLoader, which gives views on its file: no packs, labels or positions."""
    from litdata import StreamingDataset, TokensLoader, optimize

    out = f"{samples}.litdata"
    given: Any = {"chunk_size": 1 << 22, "num_workers": 1, "item_loader": TokensLoader()}
    optimize(_load_ids, [f"{samples}.ids.npy"], out, **given)
    start = time.perf_counter()
    rows = _again_and_again(StreamingDataset(out, item_loader=TokensLoader(block_size=length), shuffle=True))
    next(rows)
    return {"first_batch_s": time.perf_counter() - start, **rate(rows)}


def _load_ids(path: str) -> Iterator[Any]:
    import torch

    yield torch.from_numpy(np.load(path).view(np.int32))


def mosaic(samples: str, length: int) -> Figures:
    """Read samples by MosaicML's StreamingDataset, one by one, unpacked."""
    import torch

    here = sys.path.pop(0)  # streaming.py beside this file has the name of their package
    from streaming import MDSWriter, StreamingDataset  # type: ignore[attr-defined]

    sys.path.insert(0, here)
    out = f"{samples}.mosaic"
    ids, begin = np.load(f"{samples}.ids.npy"), 0
    with MDSWriter(out=out, columns={"input_ids": "ndarray:uint32"}) as writer:
        for end in np.load(f"{samples}.ends.npy").tolist():
            writer.write({"input_ids": ids[begin:end]})
            begin = end
    start = time.perf_counter()
    rows = _again_and_again(StreamingDataset(local=out, batch_size=1, shuffle=True))
    next(rows)
    read = (torch.from_numpy(row["input_ids"].view(np.int32)) for row in rows)
    return {"first_batch_s": time.perf_counter() - start, **rate(read)}


def _again_and_again(dataset: Any) -> Iterator[Any]:
    while True:
        yield from dataset


def _nothing(_: Any) -> Any:
    raise SystemExit("streaming.py runs the parts of this program")


if __name__ == "__main__":
    main("stream_peers", {"litdata": litdata, "mosaic": mosaic}, _nothing, _nothing)

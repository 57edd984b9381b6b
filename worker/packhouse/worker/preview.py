"""Preview: the first records of a job's first source, made to samples at once, to see a wrong template before a run."""

import time
from itertools import groupby

import numpy as np

from packhouse.client.store import Store
from packhouse.client.wire import Preview, PreviewPiece, PreviewSample, PreviewSpec, Rejected
from packhouse.worker.engines import Encoder
from packhouse.worker.recipe import TokenizerContent, load_tokenizer, resolve
from packhouse.worker.samples import Samples
from packhouse.worker.sources import expand
from packhouse.worker.tokenize import Toolkit, tokenize
from packhouse.worker.unpacked import first_lines, first_records


def preview(spec: PreviewSpec, store: Store) -> Preview:
    """Return what the records become; raise what would be wrong with the job.

    The Hugging Face engine and transformers' renderer make it: the fast ones give the same and take time to prove.
    """
    started = time.monotonic()
    job = spec.job
    files = expand(job.sources)
    first = first_records(files, job.documents) if job.format is None else []
    resolved = resolve(job, store, first)
    recipe = resolved.recipe_
    content, _ = load_tokenizer(job.tokenizer)
    toolkit = Toolkit(recipe, content, fast=False, encoder=_encoder(content))
    samples = tokenize(b"\n".join(first_lines(files[0], job.documents, spec.records)), toolkit)
    return Preview(
        source=files[0],
        form=recipe.record,
        kind=recipe.kind,
        loss=recipe.loss,
        warnings=list(resolved.warnings),
        samples=[_sample(samples, index, toolkit.encoder) for index in range(len(samples.rows))],
        rejected=_rejected(samples, files[0]),
        dropped=samples.dropped,
        truncated=samples.truncated,
        split=samples.split,
        seconds=round(time.monotonic() - started, 3),
    )


_ENCODERS: dict[str, Encoder] = {}
_MAX_ENCODERS = 4


def _encoder(content: TokenizerContent) -> Encoder:
    """Return the tokenizer's encoder; the process keeps the last few."""
    encoder = _ENCODERS.pop(content.digest, None) or Encoder(content.backend, fast=False)
    _ENCODERS[content.digest] = encoder
    for digest in list(_ENCODERS)[:-_MAX_ENCODERS]:
        _ENCODERS.pop(digest, None)
    return encoder


def _rejected(samples: Samples, source: str) -> list[Rejected]:
    return [
        Rejected(
            source=source, line=one.row + 1, offset=one.offset, length=one.length, reason=one.reason, detail=one.detail
        )
        for one in samples.rejects
    ]


def _sample(samples: Samples, index: int, encoder: Encoder) -> PreviewSample:
    begin, end = int(samples.offsets[index]), int(samples.offsets[index + 1])
    ids = samples.ids[begin:end].tolist()
    mask = np.ones(end - begin, np.bool_) if samples.mask is None else samples.mask[begin:end]
    trained: list[bool] = mask.tolist()
    pieces = []
    place = 0
    for flag, run in groupby(trained):
        count = len(list(run))
        text = encoder.slow.decode(ids[place : place + count])
        pieces.append(PreviewPiece(text=text, tokens=count, trained=flag))
        place += count
    return PreviewSample(line=int(samples.rows[index]) + 1, ids=ids, trained=trained, pieces=pieces)

"""Preview: the first records of a job, made to samples at once, to see a wrong template before a run."""

import threading
import time
from collections.abc import Collection
from itertools import groupby

import numpy as np

from packhouse.client.store import Store
from packhouse.client.wire import Preview, PreviewPiece, PreviewSample, PreviewSpec, Rejected
from packhouse.worker.by_function import names_in
from packhouse.worker.engines import Encoder
from packhouse.worker.files import at_once
from packhouse.worker.recipe import Recipe, ResolvedRecipe, TokenizerContent, load_tokenizer, resolve
from packhouse.worker.samples import Samples
from packhouse.worker.sources import expand
from packhouse.worker.tokenize import Toolkit, tokenize
from packhouse.worker.unpacked import first_lines, first_records


def preview(spec: PreviewSpec, store: Store, modules: Collection[str] = ()) -> Preview:
    """Return what the records become; raise what would be wrong with the job. For ``modules`` see ``resolve``.

    The Hugging Face engine and transformers' renderer make it: the fast ones give the same and take time to prove.
    """
    started = time.monotonic()
    job = spec.job
    files = expand(job.sources)
    first = first_records(files, job.documents) if job.format is None and job.tokenize is None else []
    resolved = resolve(job, store, first, modules)
    recipe = resolved.recipe_
    content, _ = load_tokenizer(job.tokenizer)
    if recipe.tokenize is not None:
        with _ALONE:  # functions need not be safe to be called by several threads
            return _preview(spec, files, resolved, _function_toolkit(recipe, content), started)
    toolkit = Toolkit(recipe, content, fast=False, encoder=_encoder(content))
    return _preview(spec, files, resolved, toolkit, started)


def _preview(
    spec: PreviewSpec, files: list[str], resolved: ResolvedRecipe, toolkit: Toolkit, started: float
) -> Preview:
    job, recipe = spec.job, resolved.recipe_
    source, data = _first(files, job.documents, spec.records)
    named = {} if toolkit.function is None else at_once(names_in(data, toolkit.function), source, job.file_roots)
    samples = tokenize(data, toolkit, named)
    return Preview(
        source=source,
        form=recipe.record,
        kind=recipe.kind,
        loss=recipe.loss,
        warnings=list(resolved.warnings),
        samples=[_sample(samples, index, toolkit.encoder) for index in range(len(samples.rows))],
        rejected=_rejected(samples, source),
        dropped=samples.dropped,
        truncated=samples.truncated,
        split=samples.split,
        seconds=round(time.monotonic() - started, 3),
    )


def _first(files: list[str], documents: str, count: int) -> tuple[str, bytes]:
    """Return the first file that has any records, and the lines of the first of those."""
    for file in files:
        if data := b"\n".join(first_lines(file, documents, count)).rstrip():
            return file, data
    return files[0], b""


_ALONE = threading.Lock()
_TOOLKITS: dict[Recipe, Toolkit] = {}
_MAX_TOOLKITS = 4


def _function_toolkit(recipe: Recipe, content: TokenizerContent) -> Toolkit:
    """Return the toolkit of a recipe with a function; the process keeps the last few."""
    toolkit = _TOOLKITS.pop(recipe, None) or Toolkit(recipe, content, fast=False, encoder=_encoder(content))
    _TOOLKITS[recipe] = toolkit
    for old in list(_TOOLKITS)[:-_MAX_TOOLKITS]:
        del _TOOLKITS[old]
    return toolkit


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

"""Lengths: the special ids around samples, and what happens to those that are too long or have nothing to train."""

import numpy as np
import pyarrow as pa

from packhouse.client.errors import InvalidRequest
from packhouse.worker.recipe import Recipe
from packhouse.worker.records import Reject
from packhouse.worker.samples import Mask, Samples


class TooLong(InvalidRequest):
    """A sample longer than max_length, under overflow 'error'."""

    kind = "too-long"

    row: int = -1
    """Line of the record in its block, from 0."""


def add_special(samples: Samples, recipe: Recipe) -> Samples:
    """Put the bos id before and the eos id behind each sample, where it does not stand already."""
    if recipe.bos_id is None and recipe.eos_id is None:
        return samples
    starts, stops = samples.offsets[:-1], samples.offsets[1:]
    filled = stops > starts
    before = np.full(len(starts), recipe.bos_id is not None)
    behind = np.full(len(starts), recipe.eos_id is not None)
    if len(samples.ids):
        last = len(samples.ids) - 1
        before &= ~(filled & (samples.ids[np.minimum(starts, last)] == recipe.bos_id))
        behind &= ~(filled & (samples.ids[np.maximum(stops - 1, 0)] == recipe.eos_id))
    counts = stops - starts + before + behind
    offsets = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=offsets[1:])
    bodies = np.ones(offsets[-1], np.bool_)
    bodies[offsets[:-1][before]] = False
    bodies[offsets[1:][behind] - 1] = False
    ids = np.empty(offsets[-1], np.uint32)
    ids[bodies] = samples.ids
    if recipe.bos_id is not None:
        ids[offsets[:-1][before]] = recipe.bos_id
    if recipe.eos_id is not None:
        ids[offsets[1:][behind] - 1] = recipe.eos_id
    if samples.mask is not None:
        mask = np.zeros(offsets[-1], np.bool_)
        mask[bodies] = samples.mask
        # An end of sequence is trained where what it ends is.
        ends = offsets[1:][behind & filled] - 1
        mask[ends] = mask[ends - 1]
        samples.mask = mask
    samples.ids, samples.offsets = ids, offsets
    return samples


def cut(samples: Samples, recipe: Recipe, data: bytes) -> Samples:
    """Apply max_length, and keep out what has nothing left to train."""
    if recipe.overflow == "split":
        return _split(samples, recipe, data)
    counts = np.diff(samples.offsets)
    kept = np.minimum(counts, recipe.max_length) if recipe.max_length is not None else counts
    long = counts > kept
    if recipe.overflow == "error" and long.any():
        raise _too_long(samples, int(np.argmax(long)), recipe)
    begins = samples.offsets[:-1] + (counts - kept if recipe.overflow == "truncate_left" else 0)
    keep = ~long if recipe.overflow == "drop" else np.ones(len(counts), np.bool_)
    if samples.mask is not None:
        keep &= _still_trained(samples, begins, kept, keep, data)
    if recipe.overflow == "drop":
        samples.dropped = int(long.sum())
        samples.truncated_tokens = int(counts[long].sum())
    else:
        samples.truncated = int((long & keep).sum())
        samples.truncated_tokens = int((counts - kept)[long & keep].sum())
    return samples if keep.all() and not long.any() else _select(samples, begins, np.where(keep, kept, 0), keep)


def _too_long(samples: Samples, first: int, recipe: Recipe) -> TooLong:
    count = int(samples.offsets[first + 1] - samples.offsets[first])
    detail = f"a sample of {count:,} tokens is longer than max_length {recipe.max_length:,}"
    error = TooLong(detail, "raise max_length, or set overflow to 'truncate', 'split' or 'drop'")
    error.row = int(samples.rows[first])
    return error


def _split(samples: Samples, recipe: Recipe, data: bytes) -> Samples:
    """Cut long samples into pieces of max_length, each a sample with its place in the whole.

    A piece without a token to train is left out and counted; a sample that has none at all is kept out as ever.
    """
    assert recipe.max_length is not None
    counts = np.diff(samples.offsets)
    if samples.mask is not None:
        everything = np.ones(len(counts), np.bool_)
        keep = _still_trained(samples, samples.offsets[:-1], counts, everything, data)
        if not keep.all():
            samples = _select(samples, samples.offsets[:-1], np.where(keep, counts, 0), keep)
            counts = counts[keep]
    pieces = np.maximum(-(-counts // recipe.max_length), 1)
    whole = np.repeat(np.arange(len(counts)), pieces)
    number = np.arange(len(whole)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    samples.places = number * recipe.max_length
    lengths = np.minimum(counts[whole] - samples.places, recipe.max_length)
    samples.rows = samples.rows[whole]
    samples.offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])
    samples.split, samples.fragments = int((pieces > 1).sum()), int(pieces[pieces > 1].sum())
    if samples.mask is None:
        return samples
    sums = np.concatenate([np.zeros(1, np.int64), np.cumsum(samples.mask, dtype=np.int64)])
    trained: Mask = np.diff(sums[samples.offsets]) > 0
    samples.truncated_tokens = int(lengths[~trained].sum())
    samples.fragments -= int((~trained).sum())
    return samples if trained.all() else _select(samples, samples.offsets[:-1], np.where(trained, lengths, 0), trained)


def _still_trained(samples: Samples, begins: np.ndarray, kept: np.ndarray, keep: Mask, data: bytes) -> Mask:
    """Return which samples have a trained token in ``begins:begins + kept``; reject those of ``keep`` without one."""
    assert samples.mask is not None
    sums = np.concatenate([np.zeros(1, np.int64), np.cumsum(samples.mask, dtype=np.int64)])
    trained: Mask = sums[begins + kept] > sums[begins]
    if not trained.all():
        ends = np.append(np.flatnonzero(np.frombuffer(data, np.uint8) == ord("\n")), len(data))
    for index in np.flatnonzero(keep & ~trained):
        row, count = int(samples.rows[index]), int(samples.offsets[index + 1] - samples.offsets[index])
        begin = int(ends[row - 1]) + 1 if row else 0
        detail = f"no trained token is among the {int(kept[index]):,} of {count:,} that max_length leaves"
        if kept[index] == count:
            detail = f"no token of {count:,} is trained: the tokenizer makes none of what the assistant says"
        samples.rejects.append(Reject(row, begin, int(ends[row]) - begin, "nothing_to_train", detail))
    return trained


def _select(samples: Samples, begins: np.ndarray, counts: np.ndarray, keep: Mask) -> Samples:
    """Keep the tokens ``begins[i]:begins[i] + counts[i]`` of each sample, and of the samples those in ``keep``."""
    change = np.zeros(len(samples.ids) + 1, np.int32)
    np.add.at(change, begins, 1)
    np.add.at(change, begins + counts, -1)
    chosen = np.cumsum(change[:-1]) > 0
    samples.ids = samples.ids[chosen]
    samples.mask = samples.mask[chosen] if samples.mask is not None else None
    samples.rows = samples.rows[keep]
    samples.places = samples.places[keep] if samples.places is not None else None
    samples.extra = samples.extra.filter(pa.array(keep)) if samples.extra is not None else None
    samples.offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts[keep], dtype=np.int64)])
    return samples

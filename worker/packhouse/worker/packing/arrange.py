"""From samples to the packs of whole steps: draws, strategy, order and tail, each pass derivable without the others."""

from dataclasses import replace
from functools import partial

import numpy as np

from packhouse.client.errors import InvalidRequest
from packhouse.client.wire_plans import PlanSpec
from packhouse.worker.packing.balanced import balanced, deal_to_ranks
from packhouse.worker.packing.best_fit import best_fit
from packhouse.worker.packing.hard import hard
from packhouse.worker.packing.internevo import internevo
from packhouse.worker.packing.internevo_unpacked import internevo_unpacked
from packhouse.worker.packing.length_grouped import by_rank, length_grouped
from packhouse.worker.packing.mixture import Draw, interleaved
from packhouse.worker.packing.none import none
from packhouse.worker.packing.pieces import Pieces
from packhouse.worker.packing.segments import Ids, Int32, Packing, costs, joined, narrow
from packhouse.worker.packing.shuffle import GROUPS, PACKS, SAMPLES, shuffled
from packhouse.worker.packing.soft import soft

CUTTING = ("hard", "internevo")
"""Strategies that cut samples of any length themselves."""


def arrange(lengths: Int32, drawn: list[Draw], spec: PlanSpec, pieces: Pieces | None = None) -> Packing:
    """Return the packs of all passes over samples, or their pieces, of ``lengths`` tokens, in whole steps.

    Raises ``InvalidRequest`` where the tail policy leaves no step.
    """
    sources = []
    for draw in drawn:
        parts: list[Packing] = []
        for epoch in range(draw.passes + (draw.extra > 0)):
            parts += one_pass(lengths, draw, epoch, spec, pieces)
        sources.append(joined(parts, lengths))
    return in_steps(sources.pop() if len(sources) == 1 else _mixed(sources, lengths, spec), lengths, spec)


def one_pass(lengths: Int32, draw: Draw, epoch: int, spec: PlanSpec, pieces: Pieces | None) -> list[Packing]:
    """Return the packs of pass ``epoch`` over the samples of ``draw``, in parts; it depends on no other pass.

    Those of ``balanced`` come group by group, in whole groups; in whole steps where there is one draw only.
    """
    order = shuffled(draw.last - draw.first, spec.seed, epoch, SAMPLES, *draw.key)
    if epoch == draw.passes:
        order = order[: draw.extra]
    if draw.first:
        order = np.add(order, draw.first, dtype=narrow(draw.last))
    if pieces is None:
        return _packed(lengths, order, draw, epoch, spec)
    order = pieces.of(order)
    return [replace(part, pieces=pieces) for part in _packed(lengths, order, draw, epoch, spec)]


def _packed(lengths: Int32, order: Ids, draw: Draw, epoch: int, spec: PlanSpec) -> list[Packing]:
    """Return the packs of the samples ``order``, whose memory is used up."""
    size, most = spec.pack_length, spec.max_segments

    def shuffle(count: int, *key: int) -> Ids:
        return shuffled(count, spec.seed, epoch, *key, *draw.key)

    match spec.strategy:
        case "none":
            return [none(lengths, order)]
        case "soft":
            return [soft(lengths, order, size, spec.chunk_size, spec.extra_buffer, most)]
        case "hard":
            return [hard(lengths, order, size, most)]
        case "internevo":
            return [internevo(lengths, order, size, spec.seq_len or size, most)]
        case "internevo_unpacked":
            return [internevo_unpacked(lengths, order, min(size // (spec.seq_len or size), most or size))]
        case "best_fit":
            # Without a shuffle of the packs, steps would run from long samples to short ones.
            return [best_fit(lengths, order, size, most, lambda count: shuffle(count, PACKS), out=order)]
        case _:
            micro = 1 if draw.key else spec.micro_batches
            packing, left = balanced(lengths, order, size, spec.ranks, micro, shuffle, most)
            rest = _in_groups(best_fit(lengths, left, size, most), lengths, spec, micro)
            return [part for part in (packing, rest) if part.packs] or [packing]


def _in_groups(packing: Packing, lengths: Int32, spec: PlanSpec, micro_batches: int) -> Packing:
    """Return leftover packs by falling cost, so that a group's are alike, in whole steps by the tail policy."""
    _, cost = costs(packing, lengths, spec.cost.token, spec.cost.square)
    width = spec.ranks * micro_batches
    rows = np.argsort(-cost, kind="stable")
    over = len(rows) % width
    if spec.tail == "drop":
        rows = rows[: len(rows) - over]
    elif over:
        rows = np.append(rows, np.full(width - over, -1))
    return packing.take(rows)


def _mixed(sources: list[Packing], lengths: Int32, spec: PlanSpec) -> Packing:
    """Return the packs of several sources, each evenly spread; those of ``balanced`` by whole groups."""
    unit = spec.ranks if spec.strategy == "balanced" else 1
    packs = [source.packs for source in sources]
    turn = interleaved([count // unit for count in packs])
    mixed = joined(sources, lengths)
    rows = np.empty((len(turn), unit), narrow(mixed.packs + 1))
    begin = 0
    for number, count in enumerate(packs):
        rows[turn == number] = np.arange(begin, begin + count, dtype=rows.dtype).reshape(-1, unit)
        begin += count
    return mixed.take(rows.reshape(-1))


def in_steps(packing: Packing, lengths: Int32, spec: PlanSpec) -> Packing:
    """Return the packs in whole steps by the tail policy, those of a rank side by side."""
    width = spec.ranks * spec.micro_batches
    over = packing.packs % width
    whole = packing.packs - over if spec.tail == "drop" else packing.packs + -packing.packs % width
    if not whole:
        raise InvalidRequest(
            f"{over} packs do not fill a step of {spec.ranks} ranks x {spec.micro_batches} micro-batches",
            'ask for fewer, or set tail to "pad"',
        )
    if spec.order == "length_grouped":
        return packing.take(_grouped(packing, lengths, spec, whole))
    packing = packing.head(whole) if whole <= packing.packs else packing.padded(whole)
    if spec.strategy == "balanced":
        deal_to_ranks(packing, lengths, spec.ranks, spec.micro_batches, spec.cost.token, spec.cost.square)
    return packing


def _grouped(packing: Packing, lengths: Int32, spec: PlanSpec, whole: int) -> Ids:
    """Return the packs in length_grouped order, ``whole`` in all, -1 for empty ones; those of a rank side by side."""
    _, cost = costs(packing, lengths, spec.cost.token, spec.cost.square)
    everything = np.arange(packing.packs, dtype=narrow(whole + 1))
    shuffle = partial(_shuffled_groups, spec.seed)
    rows = length_grouped(cost, everything, spec.ranks, spec.micro_batches, shuffle)[:whole]
    del cost, everything
    rows = np.pad(rows, (0, whole - len(rows)), constant_values=-1)
    return rows[by_rank(whole, spec.ranks, spec.micro_batches)]


def _shuffled_groups(seed: int | None, count: int, stretch: int) -> Ids:
    return shuffled(count, seed, 0, GROUPS, stretch)

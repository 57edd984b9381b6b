"""Plans: from the datasets' manifests and per-sample numbers to the stored plan and its report; no token is read.

What is held at once is some numbers a sample: its length, its place in the packs, its shard. The packs are measured and
written part by part; the header comes last.
"""

from itertools import accumulate

import numpy as np

from packhouse.client.errors import Damaged, InvalidRequest, NotFound
from packhouse.client.format import Manifest
from packhouse.client.plan import PlanFile, PlanHeader, dump_header, plan_id, plan_path
from packhouse.client.store import ReadStore, Store
from packhouse.client.wire_plans import Balance, DatasetShare, Plan, PlanSpec
from packhouse.worker.packing import balance
from packhouse.worker.packing.arrange import CUTTING, arrange, in_steps
from packhouse.worker.packing.measure import Measures
from packhouse.worker.packing.mixture import draws
from packhouse.worker.packing.overlong import fit, piece_counts
from packhouse.worker.packing.pieces import split
from packhouse.worker.packing.preset import preset, read_preset
from packhouse.worker.packing.segments import Ids, Int32, Packing, costs, joined
from packhouse.worker.plan_check import MOST_DRAWS, check_draws, check_spec
from packhouse.worker.plan_inputs import described, known_samples, read_lengths, read_manifests
from packhouse.worker.plan_report import asked, length_histogram, report
from packhouse.worker.plan_write import steps_per_part, write_parts


def build_plan(store: Store, spec: PlanSpec, *, write: bool = True, most: int = MOST_DRAWS) -> Plan:
    """Return the plan that ``spec`` asks for, built and put in ``store`` unless it is there.

    With ``write`` false nothing is stored. Raises ``NotFound`` for an unknown dataset, ``Damaged`` for an altered file,
    ``TooManyDraws`` for more than ``most`` draws, and ``InvalidRequest`` for what cannot be packed as asked.
    """
    check_spec(spec)
    manifests = read_manifests(store, spec)
    stored = _stored(store, spec, manifests)
    if stored is not None:
        return Plan(id=stored.id, spec=spec, report=stored.report, stored=True)
    lengths = read_lengths(store, manifests)
    bounds = [0, *accumulate(manifest.rows for manifest in manifests)]
    histogram = length_histogram(lengths)
    if spec.strategy == "preset":
        packing, counts = _preset(store, spec, lengths, bounds, most)
    else:
        packed = _fitted(lengths, spec)
        drawn = draws(spec, packed, bounds)
        check_draws(sum(draw.count for draw in drawn), most)
        counts = asked(lengths, drawn, spec)
        pieces = None
        if spec.strategy not in CUTTING:
            packed, pieces = split(packed, spec.sample_limit)
        del lengths  # while packing, only what is packed is held
        packing = arrange(packed, drawn, spec, pieces)
        lengths = packed if pieces is None else pieces.whole(packed)
        del packed
    height = steps_per_part(packing, spec)
    measures = Measures(spec, known_samples(store, manifests, lengths), _watched(spec, packing))
    parts = write_parts(store if write else None, plan_id(spec), packing, lengths, measures)
    del packing
    told = report(spec, counts, measures, _compared(spec, lengths, measures), _shares(manifests, measures), histogram)
    header = PlanHeader(
        id=plan_id(spec),
        spec=spec,
        packs_per_step=spec.ranks * spec.micro_batches,
        steps=told.steps,
        datasets=described(manifests),
        report=told,
        steps_per_part=height,
        parts=parts,
    )
    if write:
        store.write(plan_path(header.id), dump_header(header, measures.table()))
    return Plan(id=header.id, spec=spec, report=told, stored=write)


def _stored(store: ReadStore, spec: PlanSpec, manifests: list[Manifest]) -> PlanFile | None:
    """Return the stored plan if it is whole and its shards are those the datasets now have."""
    try:
        plan = PlanFile.open(store, plan_id(spec))
        # A shard that was built again by another library version holds the same tokens in other bytes.
        if plan.header.datasets != described(manifests):
            return None
        plan.check()
    except (NotFound, Damaged):
        return None
    return plan


def _fitted(lengths: Int32, spec: PlanSpec) -> Int32:
    fitted = fit(lengths, spec)
    if not fitted.any():
        raise InvalidRequest(
            f"none of the {len(lengths):,} samples has tokens to pack",
            'set overlong to "split"' if lengths.any() else "add a dataset that has some",
        )
    return fitted


def _preset(
    store: ReadStore, spec: PlanSpec, lengths: Int32, bounds: list[int], most: int
) -> tuple[Packing, dict[str, int]]:
    """Return the packs of a stored preset in whole steps, and what they ask for."""
    assert spec.preset is not None
    packs = preset(*read_preset(store, spec.preset), lengths, bounds)
    check_draws(len(packs.sample) * spec.epochs, most)
    tokens, _ = costs(packs, lengths, 1, 0)
    longest = int(tokens.max(initial=0))
    if not longest or longest > spec.pack_length:
        raise InvalidRequest(
            f"the preset's longest pack has {longest:,} tokens, for pack_length {spec.pack_length}",
            "raise pack_length to its longest pack, or bring packs",
        )
    packing = joined([packs] * spec.epochs, lengths)
    names = ("zero_length", "truncated_samples", "truncated_tokens", "dropped_samples")
    begun = len(packing.sample) if packing.start is None else int(np.count_nonzero(packing.start == 0))
    counts = {"samples": begun, "tokens": int(tokens.sum(dtype=np.int64)) * spec.epochs}
    return in_steps(packing, lengths, spec), dict.fromkeys(names, 0) | counts


def _watched(spec: PlanSpec, packing: Packing) -> Ids:
    """Return the packs whose costs ``_compared`` needs: none where they are not compared, or cost nothing."""
    needed = spec.ranks > 1 and spec.strategy != "balanced" and (spec.cost.token or spec.cost.square)
    return balance.compared(int(np.count_nonzero(packing.offsets[1:] > packing.offsets[:-1])) if needed else 0, spec)


def _compared(spec: PlanSpec, lengths: Int32, measures: Measures) -> dict[str, Balance]:
    """Return how even the ranks would be in other orders, and under balanced also with packs of best_fit."""
    if spec.ranks == 1:
        return {}
    if spec.strategy != "balanced":
        return balance.orders(measures.watched_cost(), spec, spec.strategy)
    fits = balance.best_fit_costs(piece_counts(lengths, spec.pack_length), spec)
    whole = measures.whole_packs // (spec.ranks * spec.micro_batches)
    cost, micro_high = np.concatenate(measures.rank_cost)[:whole], np.concatenate(measures.micro_high)[:whole]
    ours = {"balanced": balance.evenness(cost, micro_high)} if whole else {}
    return ours | balance.orders(fits, spec, "best_fit")


def _shares(manifests: list[Manifest], measures: Measures) -> list[DatasetShare]:
    tokens = int(measures.by_shard[:, 0].sum())
    shares, first = [], 0
    for manifest in manifests:
        size, drawn = measures.by_shard[first : first + len(manifest.shards)].sum(axis=0).tolist()
        first += len(manifest.shards)
        epochs = drawn / max(manifest.rows, 1)
        shares.append(DatasetShare(id=manifest.id, samples=drawn, tokens=size, share=size / tokens, epochs=epochs))
    return shares

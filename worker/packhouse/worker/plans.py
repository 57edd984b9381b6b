"""Plans: from the datasets' manifests and per-sample numbers to the stored plan and its report; no token is read."""

from functools import partial

import numpy as np

from packhouse.client.errors import Damaged, InvalidRequest, NotFound
from packhouse.client.format import Manifest, read_manifest, read_meta
from packhouse.client.plan import PackTable, PlanDataset, PlanFile, PlanHeader, dump_plan, plan_id, plan_path
from packhouse.client.store import ReadStore, Store
from packhouse.client.wire import Plan, PlanReport, PlanSpec
from packhouse.worker.packing.best_fit import best_fit
from packhouse.worker.packing.internevo import internevo
from packhouse.worker.packing.overlong import Fitted, fit
from packhouse.worker.packing.report import measured
from packhouse.worker.packing.segments import Int32, Packing, costs, joined
from packhouse.worker.packing.shuffle import PACKS, SAMPLES, shuffled


def build_plan(store: Store, spec: PlanSpec, *, write: bool = True) -> Plan:
    """Return the plan that ``spec`` asks for, built and put in ``store`` unless it is there.

    With ``write`` false nothing is stored. Raises ``NotFound`` for an unknown dataset, ``Damaged`` for an altered file
    and ``InvalidRequest`` for what cannot be packed as asked.
    """
    _check(spec)
    datasets = _datasets(store, spec)
    stored = _stored(store, spec, datasets)
    if stored is not None:
        return Plan(id=stored.id, spec=spec, report=stored.report, stored=True)
    header, packs = _plan(store, spec, datasets)
    if write:
        store.write(plan_path(header.id), dump_plan(header, packs))
    return Plan(id=header.id, spec=spec, report=header.report, stored=write)


def _check(spec: PlanSpec) -> None:
    """Refuse what no data can satisfy."""
    if spec.seq_len is not None and spec.strategy != "internevo":
        raise InvalidRequest(
            f"seq_len {spec.seq_len} has no meaning for strategy {spec.strategy}", "leave it out, or use internevo"
        )
    if spec.seq_len is not None and spec.seq_len > spec.pack_length:
        raise InvalidRequest(
            f"seq_len {spec.seq_len} is longer than pack_length {spec.pack_length}",
            "lower it, or raise pack_length",
        )
    step = (spec.cost.token + spec.cost.square * spec.pack_length) * spec.pack_length * spec.micro_batches * spec.ranks
    if step >= 2**63:
        raise InvalidRequest(
            f"a step may cost {step:,}, which is over 2**63", "make cost.token and cost.square smaller"
        )


def _datasets(store: ReadStore, spec: PlanSpec) -> list[Manifest]:
    """Return the manifests; raise ``InvalidRequest`` unless they are of one tokenizer."""
    manifests = []
    for dataset in spec.datasets:
        try:
            manifests.append(read_manifest(store, dataset))
        except NotFound:
            raise NotFound(f"there is no dataset {dataset}", "use the id that a finished caching job tells") from None
    first = manifests[0]
    for manifest in manifests[1:]:
        ours, theirs = first.recipe.get("tokenizer"), manifest.recipe.get("tokenizer")
        if ours != theirs:
            raise InvalidRequest(
                f"dataset {first.id} has the tokenizer {ours} and dataset {manifest.id} has {theirs}",
                "plan them apart, or cache one of them again with the other's tokenizer",
            )
    return manifests


def _stored(store: ReadStore, spec: PlanSpec, datasets: list[Manifest]) -> PlanFile | None:
    """Return the stored plan if it is whole and its shards are those the datasets now have."""
    try:
        plan = PlanFile.open(store, plan_id(spec))
    except (NotFound, Damaged):
        return None
    # A shard that was built again by another library version holds the same tokens in other bytes.
    return plan if plan.header.datasets == _described(datasets) else None


def _described(datasets: list[Manifest]) -> tuple[PlanDataset, ...]:
    return tuple(
        PlanDataset(manifest.id, manifest.recipe_digest, manifest.vocab_size, manifest.shards) for manifest in datasets
    )


def _plan(store: ReadStore, spec: PlanSpec, datasets: list[Manifest]) -> tuple[PlanHeader, PackTable]:
    receipts = [receipt for manifest in datasets for receipt in manifest.shards]
    columns = [read_meta(store, receipt).column("num_tokens").to_numpy() for receipt in receipts]
    lengths = np.concatenate([np.zeros(0, np.int32), *columns])
    fitted = fit(lengths, spec)
    tokens = int(fitted.lengths.sum(dtype=np.int64))
    if not tokens:
        raise InvalidRequest(
            f"none of the {len(lengths):,} samples has tokens to pack", 'add a dataset, or set overlong to "split"'
        )
    packing = joined([_pack(fitted.lengths, spec, epoch) for epoch in range(spec.epochs)])
    split = int(np.count_nonzero((packing.start == 0) & (packing.length < fitted.lengths[packing.sample])))
    table = _whole_steps(packing, spec)
    shard_of = np.repeat(np.arange(len(receipts), dtype=np.int32), [receipt.rows for receipt in receipts])
    report = _report(fitted, spec, table, shard_of, split)
    per_step = spec.ranks * spec.micro_batches
    return PlanHeader(plan_id(spec), spec, per_step, report.steps, _described(datasets), report), table


def _pack(lengths: Int32, spec: PlanSpec, epoch: int) -> Packing:
    """Return the packs of one epoch; their segments name samples by their place in ``lengths``."""
    order = shuffled(len(lengths), spec.seed, epoch, SAMPLES)
    if spec.strategy == "internevo":
        packing = internevo(lengths[order], spec.pack_length, spec.seq_len or spec.pack_length)
    else:
        # Without a shuffle of the packs, steps would run from long samples to short ones.
        shuffle = partial(shuffled, seed=spec.seed, epoch=epoch, purpose=PACKS)
        packing = best_fit(lengths[order], spec.pack_length, shuffle)
    return Packing(packing.offsets, order[packing.sample], packing.start, packing.length)


def _whole_steps(packing: Packing, spec: PlanSpec) -> PackTable:
    """Apply the tail policy, then measure the packs."""
    per_step = spec.ranks * spec.micro_batches
    over = packing.packs % per_step
    if over and spec.tail == "drop":
        packing = packing.head(packing.packs - over)
        if not packing.packs:
            raise InvalidRequest(
                f"{over} packs do not fill a step of {spec.ranks} ranks x {spec.micro_batches} micro-batches",
                'ask for fewer, or set tail to "pad"',
            )
    elif over:
        packing = packing.padded(packing.packs - over + per_step)
    tokens, cost = costs(packing.offsets, packing.length, spec.cost.token, spec.cost.square)
    return PackTable(packing.offsets, packing.sample, packing.start, packing.length, tokens, cost)


def _report(fitted: Fitted, spec: PlanSpec, table: PackTable, shard_of: Int32, split: int) -> PlanReport:
    epochs = spec.epochs
    figures = measured(table, spec, shard_of)
    packed = int(fitted.lengths.sum(dtype=np.int64)) * epochs
    return PlanReport(
        samples=len(fitted.lengths) * epochs,
        zero_length=fitted.zero_length * epochs,
        truncated_samples=fitted.truncated_samples * epochs,
        truncated_tokens=fitted.truncated_tokens * epochs,
        split_samples=split,
        dropped_samples=fitted.dropped_samples * epochs,
        dropped_tokens=fitted.dropped_tokens * epochs + packed - figures["tokens"],
        **figures,
    )

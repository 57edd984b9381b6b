"""What a plan reads: its datasets' manifests and the numbers of their samples; never a token."""

import re
from collections.abc import Iterator

import numpy as np

from packhouse.client.errors import InvalidRequest, NotFound
from packhouse.client.format import Manifest, Receipt, read_manifest, read_meta
from packhouse.client.plan import PlanDataset
from packhouse.client.store import ReadStore
from packhouse.client.wire_plans import PlanSpec
from packhouse.worker.packing.measure import Samples
from packhouse.worker.packing.segments import Int32

_ID = re.compile("[0-9a-f]{32}")


def read_manifests(store: ReadStore, spec: PlanSpec) -> list[Manifest]:
    """Return the datasets' manifests; raise ``NotFound``, or ``InvalidRequest`` unless they are of one tokenizer."""
    manifests = []
    for dataset in spec.datasets:
        try:
            # What is no id is no key of the store either, and may be too long a name for it.
            manifests.append(read_manifest(store, dataset if _ID.fullmatch(dataset) else "none"))
        except NotFound:
            name = dataset if len(dataset) <= 64 else f"{dataset[:64]}…"
            raise NotFound(f"there is no dataset {name!r}", "use the id that a finished caching job tells") from None
    first = manifests[0]
    for manifest in manifests[1:]:
        ours, theirs = first.recipe.get("tokenizer"), manifest.recipe.get("tokenizer")
        if ours != theirs:
            raise InvalidRequest(
                f"dataset {first.id} has the tokenizer {ours} and dataset {manifest.id} has {theirs}",
                "plan them apart, or cache one of them again with the other's tokenizer",
            )
    return manifests


def described(manifests: list[Manifest]) -> tuple[PlanDataset, ...]:
    """Return the datasets as a plan's header names them."""
    return tuple(PlanDataset(one.id, one.recipe_digest, one.vocab_size, one.shards) for one in manifests)


def read_lengths(store: ReadStore, manifests: list[Manifest]) -> Int32:
    """Return the tokens of each sample in the order of datasets, shards and rows, int32 (samples,)."""
    return _column(store, manifests, "num_tokens")


def known_samples(store: ReadStore, manifests: list[Manifest], lengths: Int32) -> Samples:
    """Return what measuring needs; ``lengths`` are the tokens of each sample after the overlong policy.

    Labels are read only where some token is not trained.
    """
    receipts = list(_receipts(manifests))
    starts = np.cumsum([0, *(receipt.rows for receipt in receipts)])
    if all(receipt.trained_tokens == receipt.tokens for receipt in receipts):
        return Samples(lengths, starts, None, None)
    labels, whole = _column(store, manifests, "labels"), read_lengths(store, manifests)
    return Samples(lengths, starts, labels, whole)


def _column(store: ReadStore, manifests: list[Manifest], name: str) -> Int32:
    column = np.empty(sum(manifest.rows for manifest in manifests), np.int32)
    at = 0
    for receipt in _receipts(manifests):
        column[at : at + receipt.rows] = read_meta(store, receipt).column(name).to_numpy()
        at += receipt.rows
    return column


def _receipts(manifests: list[Manifest]) -> Iterator[Receipt]:
    return (receipt for manifest in manifests for receipt in manifest.shards)

"""Rescan: the inventory made anew from the store, one folder of shards in memory at a time."""

from collections.abc import Iterable, Iterator

from sqlalchemy import select, update

from packhouse.client.errors import Damaged, NotFound
from packhouse.client.format import read_manifest
from packhouse.client.plan import PlanFile, part_path, plan_path
from packhouse.client.receipt_file import read_receipt
from packhouse.client.store import Store
from packhouse.client.wire_cache import RescanReport
from packhouse.service.database import chunks, now
from packhouse.service.inventory import Inventory
from packhouse.service.tables import DatasetRow, PlanRow, ShardRow, ShardState

FOLDERS = tuple(f"{number:02x}" for number in range(256))
"""Shards lie in folders by the first two digits of their keys."""


def rescan(inventory: Inventory, store: Store, *, keep_uses: bool = False) -> Iterator[RescanReport]:
    """Make ``inventory`` what ``store`` is; yield how far it is, the last time when it is done.

    Datasets and plans count as used now; with ``keep_uses`` those that were known stay as they were. What cannot be
    read is named, and left to those who read it.
    """
    report = RescanReport()
    steps = (_datasets(inventory, store, keep_uses), _plans(inventory, store, keep_uses), _shards(inventory, store))
    for step in steps:
        for change in step:
            damaged = (*report.damaged, *change.damaged)[:100]
            sums = {name: getattr(report, name) + getattr(change, name) for name in _COUNTS}
            report = RescanReport(**sums, damaged=damaged)
            yield report
    yield report.model_copy(update={"done": True})


_COUNTS = ("datasets", "plans", "shards", "found", "lost")


def stored_plan(store: Store, plan_id: str) -> tuple[int, list[str]]:
    """Return the bytes of a plan in ``store`` and its datasets; raise ``NotFound`` or ``Damaged``."""
    header = PlanFile.open(store, plan_id).header
    paths = [plan_path(plan_id), *(part_path(plan_id, number) for number in range(len(header.parts)))]
    return sum(store.size(path) or 0 for path in paths), [dataset.id for dataset in header.datasets]


def _datasets(inventory: Inventory, store: Store, keep_uses: bool) -> Iterator[RescanReport]:
    present, kept = set(), _known(inventory, DatasetRow) if keep_uses else set()
    for dataset in _ids(store.list("datasets"), "datasets/", ".json"):
        try:
            if dataset not in kept:
                inventory.add_manifest(read_manifest(store, dataset))
        except (NotFound, Damaged) as error:
            yield RescanReport(damaged=(str(error),))
        else:
            present.add(dataset)
            yield RescanReport(datasets=1)
    _note_lost(inventory, DatasetRow, present)


def _plans(inventory: Inventory, store: Store, keep_uses: bool) -> Iterator[RescanReport]:
    present, kept = set(), _known(inventory, PlanRow) if keep_uses else set()
    for plan in _ids(store.list("plans"), "plans/", ".arrow"):
        try:
            if plan not in kept:
                inventory.add_plan(plan, *stored_plan(store, plan))
        except (NotFound, Damaged) as error:
            yield RescanReport(damaged=(str(error),))
        else:
            present.add(plan)
            yield RescanReport(plans=1)
    _note_lost(inventory, PlanRow, present)


def _shards(inventory: Inventory, store: Store) -> Iterator[RescanReport]:
    """Compare folder by folder: shards of no dataset are found, those that are gone are noted."""
    for folder in FOLDERS:
        with inventory.engine.connect() as connection:
            within = (ShardRow.key >= folder, ShardRow.key < folder + "g", ShardRow.state == ShardState.PRESENT)
            known = set(connection.scalars(select(ShardRow.key).where(*within)))
        # After that: a job may add one meanwhile.
        present = set(_ids(store.list(f"shards/{folder}"), f"shards/{folder}/", ".json"))
        found, damaged = _sizes(store, present - known)
        inventory.made(found, "")
        lost = known - present
        for some in chunks(sorted(lost)):
            with inventory.engine.begin() as connection:
                gone = (ShardRow.key.in_(some), ShardRow.state == ShardState.PRESENT)
                connection.execute(update(ShardRow).where(*gone).values(state=ShardState.EVICTED))
        yield RescanReport(shards=len(present), found=len(found), lost=len(lost), damaged=tuple(damaged))


def _sizes(store: Store, keys: set[str]) -> tuple[dict[str, int], list[str]]:
    """Return the bytes of shards by their receipts, and what is wrong with those that cannot be read."""
    sizes, damaged = {}, []
    for key in sorted(keys):
        try:
            receipt = read_receipt(store, key).receipt
            sizes[key] = receipt.data.bytes + receipt.meta.bytes
        except NotFound:
            continue  # it was evicted just now
        except Damaged as error:
            damaged.append(str(error))
    return sizes, damaged


def is_another(inventory: Inventory, store: Store) -> bool:
    """Return whether ``store`` is not the one that ``inventory`` knows: they have no dataset in common, but some."""
    known, present = _known(inventory, DatasetRow), set(_ids(store.list("datasets"), "datasets/", ".json"))
    return known.isdisjoint(present) and bool(known or present)


def _known(inventory: Inventory, table: type[DatasetRow] | type[PlanRow]) -> set[str]:
    with inventory.engine.connect() as connection:
        return set(connection.scalars(select(table.id).where(table.evicted_at.is_(None))))


def _note_lost(inventory: Inventory, table: type[DatasetRow] | type[PlanRow], present: set[str]) -> None:
    known = _known(inventory, table)
    with inventory.engine.begin() as connection:
        for some in chunks(sorted(known - present)):
            connection.execute(update(table).where(table.id.in_(some)).values(evicted_at=now()))


def _ids(keys: Iterable[str], before: str, behind: str) -> Iterator[str]:
    for key in keys:
        if key.endswith(behind):
            yield key.removeprefix(before).removesuffix(behind)

"""The store's format: which version of shards and plans it holds, so that a program of another one does not guess."""

import json
from dataclasses import dataclass

from packhouse.client.digest import sealed, unsealed
from packhouse.client.errors import Damaged, InvalidRequest, NotFound
from packhouse.client.format import FORMAT_VERSION
from packhouse.client.plan_header import PLAN_FORMAT
from packhouse.client.store import Store

KEY = "format.json"
"""Where the store says it; one without it was written before it was said, or is new."""


@dataclass(frozen=True, slots=True)
class StoreFormat:
    """Versions of what a store holds."""

    shards: int = FORMAT_VERSION
    plans: int = PLAN_FORMAT


OURS = StoreFormat()


def read_format(store: Store) -> StoreFormat | None:
    """Return what ``store`` holds, None where there is nothing yet; raise ``Damaged``."""
    try:
        found = unsealed(bytes(store.open(KEY)))
        return StoreFormat(int(found["shards"]), int(found["plans"]))
    except NotFound:
        return _told_by_a_dataset(store)
    except (ValueError, KeyError, TypeError) as error:
        fact = f"{KEY} of the store {store.location} cannot be read ({error})"
        raise Damaged(fact, "remove it if no other version of packhouse has used the store") from None


def check_format(store: Store) -> None:
    """Let a store be used that has this program's format, or none yet; it is noted. Raise ``InvalidRequest`` else."""
    found = read_format(store)
    if found is None:
        note_format(store)
    elif found != OURS:
        raise InvalidRequest(*unfit(store, found))


def unfit(store: Store, found: StoreFormat) -> tuple[str, str]:
    """Return why a store of another format cannot be used, and what to do."""
    held = f"the store {store.location} holds shards of format {found.shards} and plans of format {found.plans}"
    fact = f"{held}; this program knows {OURS.shards} and {OURS.plans}"
    if found.shards > OURS.shards or found.plans > OURS.plans:
        return fact, "it is newer: use the packhouse version that wrote it, or another PACKHOUSE_STORE"
    return fact, "it is older: 'packhouse upgrade' says what that costs, and goes on with it"


def note_format(store: Store) -> None:
    """Write down that ``store`` holds what this program writes."""
    store.write(KEY, sealed({"shards": OURS.shards, "plans": OURS.plans}))


def _told_by_a_dataset(store: Store) -> StoreFormat | None:
    """Return the format that the first manifest states; plans had that of the shards."""
    for name in store.list("datasets"):
        try:
            version = int(json.loads(bytes(store.open(name)))["format"])
        except (ValueError, KeyError, TypeError, NotFound):
            continue  # 'packhouse cache verify' tells of it
        return OURS if version == OURS.shards else StoreFormat(version, version)
    return None

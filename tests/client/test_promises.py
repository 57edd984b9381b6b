"""The promises P1 to P5 over the grid of worlds, workers, micro-batches and strategies, by digests of a step's tokens.

The data are thousands of tiny documents in two datasets of two recipes, one masked, one with records in quarantine.
How workers split the steps is driven in this process, by what torch tells a worker of itself; real ones are asked at
some points of the grid, and spawned ones in ``test_batches.py``. P6 is in ``test_fire.py``.
"""

import hashlib
import json
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain, cycle, islice
from typing import Any

import numpy as np
import pytest
import torch.utils.data._utils.worker as torch_worker

from packhouse.client import loader
from packhouse.client.batches import _Deliveries
from packhouse.client.dataset import Options, PackedDataset
from packhouse.client.errors import Mismatch
from packhouse.client.format import manifest_path, read_manifest
from packhouse.client.pack import Pack
from packhouse.client.plan import PlanFile
from packhouse.client.plan_header import part_path, plan_path
from packhouse.client.store import LocalStore
from packhouse.client.wire_plans import PlanSpec
from packhouse.worker.plans import build_plan

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
]

WORLDS = range(1, 10)
WORKERS = range(5)
STRATEGIES: list[dict[str, Any]] = [
    {"strategy": "best_fit", "overlong": "split"},
    {"strategy": "best_fit", "ranks": 1, "micro_batches": 7, "epochs": 2},
    {"strategy": "best_fit", "overlong": "truncate", "order": "length_grouped", "pack_length": 96},
    {"strategy": "best_fit", "weights": [0.7, 0.3]},
    {"strategy": "balanced", "overlong": "drop", "ranks": 4, "micro_batches": 3},
    {"strategy": "internevo", "seq_len": 24},
    {"strategy": "internevo_unpacked", "seq_len": 16, "overlong": "truncate"},
    {"strategy": "hard", "tail": "drop", "ranks": 5, "micro_batches": 1},
    {"strategy": "soft", "overlong": "truncate"},
    {"strategy": "none", "overlong": "truncate", "dataset_epochs": [0.5, 1]},
]


@dataclass(frozen=True)
class Data:
    store: LocalStore
    datasets: list[str]
    tokens: int


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, write_dataset: Callable[..., str]) -> Data:
    store = LocalStore(tmp_path_factory.mktemp("store"))
    chance = random.Random(5)
    lengths = [0 if chance.random() < 0.02 else min(90, 1 + int(chance.expovariate(1 / 9))) for _ in range(2400)]
    texts = [[(100 * i + j) % 997 + 1 for j in range(n)] for i, n in enumerate(lengths[:1600])]
    chats = [[(31 * i + j) % 991 + 1 for j in range(n)] for i, n in enumerate(lengths[1600:])]
    masks = [[chance.getrandbits(1) for _ in chat] for chat in chats]
    first = write_dataset(store, texts, rows_per_shard=300)
    second = write_dataset(store, chats, masks, rows_per_shard=150)
    quarantine(store, second)
    return Data(store, [first, second], sum(lengths))


def quarantine(store: LocalStore, dataset: str) -> None:
    """Let every shard of ``dataset`` have two records that were kept out: they are in no row and in no plan."""
    whole = read_manifest(store, dataset)
    shards = tuple(replace(one, rejected={"not-json": 2}, records=one.records + 2) for one in whole.shards)
    store.write(manifest_path(dataset), replace(whole, shards=shards).dump())


def make(data: Data, **changes: Any) -> PlanFile:
    spec = PlanSpec(datasets=data.datasets, **{"pack_length": 64, "ranks": 6, "micro_batches": 2, "seed": 1, **changes})
    return PlanFile.open(data.store, build_plan(data.store, spec).id)


def digest(packs: Sequence[Pack], step: int) -> list[str]:
    """Return a digest of each pack with tokens: ids, labels, positions and borders. It takes the layout's place."""
    made = []
    for pack in packs:
        if pack.num_tokens:
            state = hashlib.sha256(pack.input_ids.tobytes())
            for array in (pack.labels, pack.positions, pack.cu_seqlens):
                state.update(array.tobytes())
            made.append(state.hexdigest())
    return made


def tokens(packs: Sequence[Pack], step: int) -> int:
    return sum(pack.num_tokens for pack in packs)


@contextmanager
def worker(number: int, workers: int) -> Iterator[None]:
    """Let torch say that this process is loader worker ``number`` of ``workers``."""
    dataset: Any = None
    info = torch_worker.WorkerInfo(id=number, num_workers=workers, seed=0, dataset=dataset)
    before, torch_worker._worker_info = torch_worker._worker_info, info
    try:
        yield
    finally:
        torch_worker._worker_info = before


def by_torch(dataset: PackedDataset, workers: int) -> Iterator[Any]:
    """Yield what a DataLoader yields: workers in turn, each with an iterator of its own."""
    if not workers:
        yield from dataset
        return
    iterators = [iter(dataset) for _ in range(workers)]
    ended = 0
    for number in cycle(range(workers)):
        with worker(number, workers):
            item = next(iterators[number], None)
        assert item is None or not ended  # or a later worker would have a step that an earlier one has not
        ended += item is None
        if ended == workers:
            return
        if item is not None:
            yield item


def by_loader(dataset: PackedDataset, workers: int, run: int) -> Iterator[Any]:
    """Yield what a Loader is handed by its workers, ``run`` steps at once."""
    made = _Deliveries(dataset, dataset.start_step, False, run, None)
    iterators = [made._hand_overs(number, workers) for number in range(workers)]
    for turn in cycle(iterators):
        item = next(turn, None)
        if item is None:
            assert all(next(other, None) is None for other in iterators)
            return
        assert item.error is None
        yield from (step.batch for step in item.steps)


def steps(
    plan: PlanFile, world: int, start: int = 0, workers: int = 0, run: int = 0, count: int | None = None
) -> list[list[str]]:
    """Return the digests of ``count`` steps from ``start`` on as ``world`` ranks see them, one's after the other's."""
    options = Options(kernel="numba")
    ranks = [PackedDataset(plan, plan.store, rank, world, digest, start, options) for rank in range(world)]
    seen = [by_loader(rank, workers, run) if run else by_torch(rank, workers) for rank in ranks]
    return [[*chain(*parts)] for parts in islice(zip(*seen, strict=True), count)]


@pytest.fixture(scope="module", params=STRATEGIES, ids=lambda spec: "-".join(map(str, spec.values())))
def plan(data: Data, request: pytest.FixtureRequest) -> PlanFile:
    return make(data, **request.param)


@pytest.fixture(scope="module")
def whole(plan: PlanFile) -> list[list[str]]:
    return steps(plan, 1)


def test_p1_two_builds_are_byte_identical(data: Data, plan: PlanFile, memory_store: Callable[[], Any]) -> None:
    copy = memory_store()
    for path in data.store.list("datasets"):
        copy.write(path, data.store.open(path))
    for path in data.store.list("shards"):
        copy.write(path, data.store.open(path))
    assert build_plan(copy, plan.spec).id == plan.id
    for key in (plan_path(plan.id), *(part_path(plan.id, number) for number in range(len(plan.header.parts)))):
        assert bytes(copy.open(key)) == bytes(data.store.open(key))


@pytest.mark.parametrize("workers", WORKERS)
def test_p2_the_ranks_packs_in_order_are_the_step(plan: PlanFile, whole: list[list[str]], workers: int) -> None:
    for world in WORLDS:
        assert steps(plan, world, 0, workers) == whole, world


@pytest.mark.parametrize("run", [1, 3, 64])
def test_p2_holds_however_many_steps_are_handed_on_at_once(plan: PlanFile, whole: list[list[str]], run: int) -> None:
    for workers in WORKERS[1:]:
        assert steps(plan, 1 + workers * run % 9, 5, workers, run) == whole[5:], workers


def test_p2_all_ranks_have_equally_many_packs(data: Data) -> None:
    plan = make(data)
    for world in WORLDS:
        for rank in range(world):
            counts = set(PackedDataset(plan, plan.store, rank, world, lambda packs, step: len(packs)))
            assert counts == {-(-12 // world)}


@pytest.mark.parametrize(("strategy", "world", "workers"), [(0, 1, 4), (2, 3, 2), (5, 9, 1), (7, 5, 3)])
def test_p2_and_p3_hold_with_real_workers(data: Data, strategy: int, world: int, workers: int) -> None:
    """Each loader loops twice: first from a state, then whole, by the workers that have stayed."""
    plan = make(data, **STRATEGIES[strategy])
    whole, start = steps(plan, 1), 3
    first, second = [], []
    for rank in range(world):
        dataset = PackedDataset(plan, plan.store, rank, world, digest, options=Options(kernel="numba"))
        batches = loader(dataset, workers=workers, method="fork")
        batches.load_state_dict({"plan": plan.id, "step": start})
        first.append([*batches])
        second.append([*batches] if rank == 0 else whole)
    assert [[*chain(*parts)] for parts in zip(*first, strict=True)] == whole[start:]
    assert len(second[0]) == plan.steps


@pytest.mark.parametrize("micro_batches", [1, 2, 3, 4, 6, 12])
def test_p2_micro_batches_share_out_the_same_step(data: Data, micro_batches: int) -> None:
    """A step of 12 packs is the same for 12 ranks of one micro-batch and for one rank of 12."""
    plan = make(data, ranks=12 // micro_batches, micro_batches=micro_batches)
    assert steps(plan, 12 // micro_batches) == steps(make(data, ranks=12, micro_batches=1), 1)


def test_p3_every_step_can_be_resumed_in_any_world(plan: PlanFile, whole: list[list[str]]) -> None:
    chance = random.Random(plan.id)
    for at in range(plan.steps + 1):
        world, workers, run = chance.choice(WORLDS), chance.choice(WORKERS), chance.choice([0, 0, 1, 2, 5])
        count = None if at % 20 == 0 else 2
        found = steps(plan, world, at, workers, run if workers else 0, count)
        assert found == whole[at:][:count], (at, world, workers, run)


def test_p3_a_run_may_change_its_world_at_every_step(plan: PlanFile, whole: list[list[str]]) -> None:
    """The state is taken from what was delivered, one step after the other, each by another world."""
    chance, seen = random.Random(plan.id), []
    state: dict[str, Any] = {"plan": plan.id, "step": 0}
    while state["step"] < plan.steps:
        world = chance.choice(WORLDS)
        ranks = [loader(PackedDataset(plan, plan.store, rank, world, digest), workers=0) for rank in range(world)]
        for rank in ranks:
            rank.load_state_dict(state)
        running = [iter(rank) for rank in ranks]
        for _ in range(chance.randint(1, 3)):
            if state["step"] < plan.steps:
                seen.append([one for rank in running for one in next(rank)])
                (state,) = {json.dumps(rank.state_dict()): rank.state_dict() for rank in ranks}.values()
    assert seen == whole


def test_p4_every_planned_token_is_delivered_and_the_rest_is_counted(data: Data, plan: PlanFile) -> None:
    delivered = sum(sum(PackedDataset(plan, plan.store, rank, 3, tokens)) for rank in range(3))
    report = plan.report
    assert delivered == report.tokens
    if plan.spec.weights is None and plan.spec.dataset_epochs is None:
        assert report.tokens + report.truncated_tokens + report.dropped_tokens == data.tokens * plan.spec.epochs
    assert report.padding_tokens == report.steps * plan.packs_per_step * plan.spec.pack_length - report.tokens


def test_p4_no_sample_is_taken_twice(data: Data) -> None:
    table = make(data, strategy="internevo", seq_len=24).packs
    for dataset, (first, last) in enumerate(((0, 1600), (1600, 2400))):
        taken = np.zeros(last - first, np.int64)
        own = (table.sample >= first) & (table.sample < last)
        np.add.at(taken, table.sample[own] - first, table.length[own])
        assert taken.sum() == read_manifest(data.store, data.datasets[dataset]).tokens


def test_p5_a_state_of_another_plan_is_refused(data: Data, plan: PlanFile) -> None:
    other = make(data, seed=99)
    for dataset in (PackedDataset(plan, plan.store), loader(PackedDataset(plan, plan.store))):
        with pytest.raises(Mismatch, match=f"the state belongs to plan {other.id} and this data set reads plan"):
            dataset.load_state_dict({"plan": other.id, "step": 0})

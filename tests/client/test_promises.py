"""The promises P1 to P6 over a grid of worlds, workers, micro-batches and strategies, by digests of each step's tokens.

The data are thousands of tiny documents in two datasets of two recipes, one masked, one with records in quarantine.
"""

import hashlib
import json
import multiprocessing
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from packhouse.client import loader
from packhouse.client.dataset import PackedDataset
from packhouse.client.ledger import audit
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
STRATEGIES: list[dict[str, Any]] = [
    {"strategy": "best_fit", "overlong": "split"},
    {"strategy": "best_fit", "overlong": "truncate", "order": "length_grouped"},
    {"strategy": "best_fit", "weights": [0.7, 0.3]},
    {"strategy": "balanced", "overlong": "drop"},
    {"strategy": "internevo", "seq_len": 24},
    {"strategy": "internevo_unpacked", "seq_len": 16, "overlong": "truncate"},
    {"strategy": "hard", "tail": "drop"},
    {"strategy": "soft", "overlong": "truncate"},
    {"strategy": "none", "overlong": "truncate", "dataset_epochs": [1.5, 1]},
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
    path = store.path(f"datasets/{dataset}.json")
    manifest = json.loads(path.read_bytes())
    for shard in manifest["shards"]:
        shard["rejected"] = {"not-json": 2}
        shard["records"] += 2
    path.write_text(json.dumps(manifest))


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


def steps(plan: PlanFile, world: int, start: int = 0, stop: int | None = None) -> list[list[str]]:
    """Return the digests of the steps as ``world`` ranks see them, one rank's after the other's."""
    window = (plan.steps if stop is None else stop) - start
    ranks = [iter(PackedDataset(plan, plan.store, rank, world, digest, start)) for rank in range(world)]
    return [[one for rank in ranks for one in next(rank)] for _ in range(window)]


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


@pytest.mark.parametrize("world", WORLDS)
def test_p2_the_ranks_packs_in_order_are_the_step(plan: PlanFile, whole: list[list[str]], world: int) -> None:
    assert steps(plan, world) == whole


def test_p2_all_ranks_have_equally_many_packs(data: Data) -> None:
    plan = make(data)
    for world in WORLDS:
        for rank in range(world):
            counts = set(PackedDataset(plan, plan.store, rank, world, lambda packs, step: len(packs)))
            assert counts == {-(-12 // world)}


@pytest.mark.parametrize("workers", [0, 1, 2, 3, 4])
def test_p2_and_p3_hold_for_any_number_of_workers(data: Data, workers: int) -> None:
    plan = make(data)
    whole = steps(plan, 1)
    for world, start in ((1, 0), (5, 3)):
        ranks = []
        for rank in range(world):
            batches = loader(PackedDataset(plan, plan.store, rank, world, digest), workers=workers)
            batches.load_state_dict({"plan": plan.id, "step": start})
            ranks.append(list(batches))
        assert [[*chain(*parts)] for parts in zip(*ranks, strict=True)] == whole[start:]


@pytest.mark.parametrize("micro_batches", [1, 2, 3, 4, 6, 12])
def test_p2_micro_batches_share_out_the_same_step(data: Data, micro_batches: int) -> None:
    """A step of 12 packs is the same for 12 ranks of one micro-batch and for one rank of 12."""
    plan = make(data, ranks=12 // micro_batches, micro_batches=micro_batches)
    assert steps(plan, 12 // micro_batches) == steps(make(data, ranks=12, micro_batches=1), 1)


def test_p3_prefix_and_suffix_are_the_unbroken_run(plan: PlanFile, whole: list[list[str]]) -> None:
    chance = random.Random(plan.id)
    for at in [0, 1, plan.steps - 1, plan.steps, *chance.sample(range(plan.steps), 3)]:
        before, after = chance.choices(WORLDS, k=2)
        assert steps(plan, before, 0, at) + steps(plan, after, at) == whole


def test_p4_every_planned_token_is_delivered_and_the_rest_is_counted(data: Data, plan: PlanFile) -> None:
    delivered = sum(sum(PackedDataset(plan, plan.store, rank, 3, tokens)) for rank in range(3))
    report = plan.report
    assert delivered == report.tokens
    if plan.spec.weights is None and plan.spec.dataset_epochs is None:
        assert report.tokens + report.truncated_tokens + report.dropped_tokens == data.tokens
    assert report.padding_tokens == report.steps * 12 * 64 - report.tokens


def test_p4_no_sample_is_taken_twice(data: Data) -> None:
    table = make(data, strategy="internevo", seq_len=24).packs
    for dataset, (first, last) in enumerate(((0, 1600), (1600, 2400))):
        taken = np.zeros(last - first, np.int64)
        own = (table.sample >= first) & (table.sample < last)
        np.add.at(taken, table.sample[own] - first, table.length[own])
        manifest = json.loads(data.store.path(f"datasets/{data.datasets[dataset]}.json").read_bytes())
        assert taken.sum() == sum(shard["tokens"] for shard in manifest["shards"])


def rank_process(plan: PlanFile, rank: int, world: int, start: int, log: Path, trainer: Connection) -> None:
    """Be one rank: hand each step's number to the trainer, and take the next when it says so."""
    batches = loader(PackedDataset(plan, plan.store, rank, world), workers=1, method="fork", log=log)
    batches.load_state_dict({"plan": plan.id, "step": start})
    for data, _ in batches:
        trainer.send(data["step"])
        trainer.recv()


@dataclass(frozen=True)
class Rank:
    process: Any
    pipe: Connection


def launch(plan: PlanFile, folder: Path, world: int, start: int) -> list[Rank]:
    context = multiprocessing.get_context("fork")
    ranks = []
    for rank in range(world):
        ours, theirs = context.Pipe()
        arguments = plan, rank, world, start, folder / f"{rank}.jsonl", theirs
        process = context.Process(target=rank_process, args=arguments)
        process.start()
        theirs.close()
        ranks.append(Rank(process, ours))
    return ranks


def train(ranks: list[Rank], steps: int) -> Iterator[int]:
    """Let all ranks take ``steps`` steps together, as collectives make them; yield each step once all have it."""
    for _ in range(steps):
        got = {rank.pipe.recv() for rank in ranks}
        assert len(got) == 1
        yield got.pop()
        for rank in ranks:
            rank.pipe.send("next")


def test_p6_a_run_whose_processes_are_killed_still_has_each_token_once(data: Data, tmp_path: Path) -> None:
    """A rank dies, then a rank's loader worker; each time the run goes on from a checkpoint in another world."""
    plan = make(data, pack_length=256)
    checkpoint = 0
    for world, victim in ((2, "rank"), (5, "worker"), (3, "rank"), (2, None)):
        ranks = launch(plan, tmp_path, world, checkpoint)
        try:
            for step in train(ranks, plan.steps - checkpoint if victim is None else 2):
                checkpoint = step + 1 if step % 2 == 0 or victim is None else checkpoint
            if victim == "rank":
                ranks[0].process.kill()
            elif victim == "worker":
                (worker,) = psutil.Process(ranks[0].process.pid).children()
                worker.kill()
            # A loop whose worker died is told, and does not wait for ever. One that was killed leaves a worker behind
            # for some seconds, which holds what a join with a limit would wait for.
            ranks[0].process.join(None if victim == "rank" else 30)
            assert (ranks[0].process.exitcode == 0) is (victim is None)
        finally:
            for rank in ranks:
                rank.process.kill()
                rank.process.join()
    assert checkpoint == plan.steps
    found = audit(plan, plan.store, sorted(tmp_path.glob("*.jsonl")))
    assert found.exact
    assert found.tokens == plan.report.tokens

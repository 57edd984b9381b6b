"""The cache over REST and by command: what it holds, what goes, and how that is told."""

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from packhouse.client.api import Client
from packhouse.client.cli import main
from packhouse.client.errors import Evicted, NotFound, PackhouseError
from packhouse.client.format import read_manifest, read_shard
from packhouse.client.store import Store
from packhouse.client.wire import Job, JobSpec
from packhouse.client.wire_cache import parse_size, show_size
from packhouse.client.wire_plans import PlanSpec
from packhouse.service.keep import Keep
from packhouse.worker.shards import find_shard

Start = Callable[..., Any]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture
def running(start_service: Start, home: Path) -> Iterator[Any]:
    with start_service(home, keep=Keep(recent=0, plans=0)) as service:
        yield service


def job_spec(texts: Path, tokenizer_dir: Path) -> JobSpec:
    return JobSpec(sources=[str(texts)], tokenizer=str(tokenizer_dir))


def test_an_evicted_dataset_is_told_of_and_comes_back(running: Any, texts: Path, tokenizer_dir: Path) -> None:
    with Client(running.url) as client:
        job = client.wait(client.submit(job_spec(texts, tokenizer_dir)).id)
        assert job.dataset is not None
        plan = client.plan(PlanSpec(datasets=[job.dataset], pack_length=64))
        manifest = read_manifest(running.parts.store, job.dataset)
        usage = client.cache.usage()
        assert (usage.datasets, usage.plans, usage.shards) == (1, 1, len(manifest.shards))
        assert usage.recipes[0].recipe == job.recipe

        client.cache.pin(plan.id)
        *_, kept = client.cache.gc(0)
        assert (kept.freed, kept.over, kept.done) == (0, usage.bytes, True)
        assert {one.id: one.pinned for one in client.cache.entries()} == {plan.id: True, job.dataset: False}
        client.cache.unpin(plan.id)
        *_, foreseen = client.cache.gc(0, dry_run=True)
        assert client.dataset(job.dataset).rows == 300
        *_, gone = client.cache.gc(0)
        assert (gone.freed, gone.over) == (foreseen.freed, foreseen.over) == (usage.bytes, 0)

        steps = client.open_plan(plan.id)
        for asked in (
            lambda: client.dataset(str(job.dataset)),
            lambda: client.plan(plan.spec),
            lambda: steps.slice(0, 1, 0, 1),
            lambda: read_shard(client.open_store(running.parts.settings.home / "node"), manifest.shards[0]),
            lambda: client.cache.pin(plan.id),
        ):
            with pytest.raises(Evicted, match=r"evicted .*to make room.*pin"):
                asked()
        assert texts.exists()

        again = client.wait(client.submit(job_spec(texts, tokenizer_dir)).id)
        assert (again.dataset, again.progress.misses) == (job.dataset, {"evicted": len(manifest.shards)})
        assert client.plan(plan.spec).id == plan.id
        assert client.cache.usage() == usage


@dataclass
class Checked:
    """Work after which, while the job still runs, every shard of its dataset must be there."""

    work: Any
    store: Store

    def check(self, spec: JobSpec) -> Any:
        return self.work.check(spec)

    def run(self, *arguments: Any, **named: Any) -> str:
        dataset: str = self.work.run(*arguments, **named)
        lost = [one.key for one in read_manifest(self.store, dataset).shards if not find_shard(self.store, one.key)[0]]
        assert not lost, f"evicted under a job that runs: {lost}"
        return dataset


def test_eviction_never_takes_what_a_running_job_has_found(running: Any, texts: Path, tokenizer_dir: Path) -> None:
    """Jobs run over the same sources while everything is evicted again and again."""
    running.jobs._work = Checked(running.jobs._work, running.parts.store)
    ended, freed = threading.Event(), 0

    def evict() -> None:
        nonlocal freed
        while not ended.is_set():
            *_, report = running.parts.space.gc(0)
            freed += report.shards

    evicting = threading.Thread(target=evict)
    evicting.start()
    with Client(running.url) as client:
        specs = [job_spec(texts, tokenizer_dir).model_copy(update={"max_bad_share": 0.5 + n / 100}) for n in range(8)]
        jobs = [client.wait(client.submit(spec).id) for spec in specs]
    ended.set()
    evicting.join()
    assert len({job.dataset for job in jobs}) == 1
    assert freed > 0


def test_a_use_without_the_service_is_told(running: Any, texts: Path, tokenizer_dir: Path) -> None:
    with Client(running.url) as client:
        job: Job = client.wait(client.submit(job_spec(texts, tokenizer_dir)).id)
        before = client.cache.pin(str(job.dataset)).used_at
        client.cache.use(datasets=[str(job.dataset)])
        assert client.cache.unpin(str(job.dataset)).used_at > before
        with pytest.raises(NotFound, match="packhouse cache ls"):
            client.cache.pin("0" * 32)


def test_commands_for_people_and_for_scripts(
    running: Any, texts: Path, tokenizer_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*words: str, code: int = 0) -> str:
        assert main(["cache", *words, "--url", running.url]) == code
        return capsys.readouterr().out

    def answer(*words: str) -> Any:
        return json.loads(run(*words, "--json"))

    with Client(running.url) as client:
        dataset = str(client.wait(client.submit(job_spec(texts, tokenizer_dir)).id).dataset)
        plan = client.plan(PlanSpec(datasets=[dataset], pack_length=32)).id
    assert {one["id"] for one in answer("ls")} >= {dataset, plan}
    assert answer("pin", dataset, plan)[0]["pinned"] is True
    listed = run("ls")
    assert "pinned" in listed
    assert "no budget" in listed
    assert answer("usage")["plans"] >= 1
    assert main(["cache", "rm", dataset, "--yes", "--url", running.url]) == 2
    assert "unpin it first" in capsys.readouterr().err
    answer("unpin", dataset, plan)
    assert main(["cache", "rm", dataset, "--json", "--url", running.url]) == 2
    assert "--yes" in capsys.readouterr().err
    assert "would be freed" in run("gc", "--budget", "1kB", "--dry-run")
    assert answer("gc", "--budget", "500GB")["freed"] == 0
    assert answer("rescan")["datasets"] == 1
    assert answer("rm", plan, "--yes")[0]["plans"] == 1
    assert "freed" in run("rm", dataset, "--yes")
    assert dataset not in {one["id"] for one in answer("ls")}
    assert dataset in {one["id"] for one in answer("ls", "--evicted")}
    assert main(["cache", "gc", "--budget", "much", "--url", running.url]) == 2
    assert "500GB" in capsys.readouterr().err


def test_requests_that_are_refused(running: Any) -> None:
    with httpx.Client(base_url=running.url) as http:
        assert http.post("/v1/cache/gc", json={}).json()["remedy"].endswith("PACKHOUSE_STORE_BUDGET")
        for body in ({"budget": -1}, {"budget": "1"}, {"all": True}):
            assert http.post("/v1/cache/gc", json=body).status_code == 422, body
        assert http.delete("/v1/cache/entries/nothing").status_code == 404
        assert http.get("/v1/cache?deep=1").status_code == 422


@pytest.mark.parametrize(
    ("text", "size"), [("500GB", 5 * 10**11), ("1.5 TiB", 1_649_267_441_664), ("10kb", 10_000), ("7", 7), ("2 B", 2)]
)
def test_sizes_that_are_read(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-1", "1e3", "5 XB", "1ib", "nan"])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(PackhouseError, match="500GB"):
        parse_size(text)


def test_sizes_that_are_shown() -> None:
    shown = [show_size(size) for size in (0, 999, 1000, 123_456, 999_600_000, 5 * 10**11, 10**16)]
    assert shown == ["0 B", "999 B", "1 kB", "123 kB", "1 GB", "500 GB", "10 PB"]

"""The service's application over a store and a catalog of its own, for tests of its pages."""

from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import insert

from packhouse.client.store import LocalStore
from packhouse.client.wire import Job, JobSpec, JobState, Progress
from packhouse.service.app import create_app
from packhouse.service.catalog import Catalog
from packhouse.service.inventory import Inventory
from packhouse.service.jobs import Jobs
from packhouse.service.parts import Parts
from packhouse.service.settings import Settings
from packhouse.service.space import Space
from packhouse.service.tables import JobRow
from packhouse.service.work import CacheWork
from packhouse.worker.executor import Executor

NOW = datetime(2026, 5, 4, 12, 30, tzinfo=UTC)


class House:
    """The application over a store and a catalog of its own, with no job running."""

    def __init__(self, catalog: Catalog, home: Path) -> None:
        self.catalog, self.store = catalog, LocalStore(home / "store")
        settings = Settings(home=home, store=str(home / "store"), database_url="")
        executor = Executor(num_cpus=1)
        self.inventory = Inventory(catalog.engine)
        jobs = Jobs(catalog, CacheWork(self.store, catalog, executor, inventory=self.inventory))
        space = Space(self.inventory, self.store, jobs.signs)
        app = create_app(Parts(settings, self.store, catalog, jobs, executor, space))
        self.web = TestClient(app, base_url="http://localhost")

    def get(self, path: str, status: int = 200) -> str:
        answer = self.web.get(path)
        assert answer.status_code == status, answer.text
        return answer.text

    def add(self, *jobs: Job) -> None:
        rows = [
            {"id": job.id, "key": job.id, "state": job.state, "cancelling": False, "lease": 0, "version": job.version}
            | {"body": job.model_dump_json()}
            for job in jobs
        ]
        with self.catalog.engine.begin() as connection:
            connection.execute(insert(JobRow), rows)


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    with closing(Catalog(f"sqlite:///{tmp_path}/packhouse.db")) as catalog:
        yield House(catalog, tmp_path)


def job(number: int = 1, state: JobState = JobState.SUCCEEDED, **fields: Any) -> Job:
    ended = fields.pop("ended", NOW)
    ended = ended if state.final else None
    spec = fields.pop("spec", None) or JobSpec(sources=[f"/data/source-{number}.jsonl"], tokenizer="/models/mine")
    progress = fields.pop("progress", None) or Progress(phase="done", blocks=3, hits=2, misses={"new_block": 1})
    common: dict[str, Any] = {"id": f"{number:016x}", "state": state, "spec": spec, "recipe": "a" * 32, "version": 1}
    return Job(**common, progress=progress, created_at=NOW, finished_at=ended, **fields)


PATHS = ("/", "/?window=week", "/jobs", "/jobs?state=failed", "/datasets", "/plans", "/store", "/preview")

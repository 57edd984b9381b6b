"""Two services on one PostgreSQL and one store: one is killed in the middle of a job, and nothing is lost by it.

The one that is killed is the program in a process of its own; the other answers from this process.
"""

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.program import gone, serving

from packhouse.client.api import Client, JobFailed
from packhouse.client.faults import WRITTEN
from packhouse.client.wire import Job, JobSpec, JobState


def encoding(client: Client, job: Job) -> None:
    while client.job(job.id).progress.phase != "encoding":
        time.sleep(0.02)


def test_a_job_outlives_the_service_that_runs_it(
    start_service: Callable[..., Any],
    service: Any,
    postgres: Callable[[], str],
    tmp_path: Path,
    corpus: Path,
    tokenizer_dir: Path,
) -> None:
    """Cases B086 and B087, across services."""
    url, store = postgres(), str(tmp_path / "store")
    spec = JobSpec(sources=[str(corpus)], tokenizer=str(tokenizer_dir))
    slow = tmp_path / "slow.json"  # or its jobs might end before the other service is there
    slow.write_text(
        json.dumps([{"point": WRITTEN, "key": "shards/*", "action": "delay", "seconds": 1, "times": 10_000}])
    )
    settings = {"PACKHOUSE_DATABASE_URL": url, "PACKHOUSE_STORE": store, "PACKHOUSE_LEASE_SECONDS": "2"}
    with serving(tmp_path / "home", PACKHOUSE_FAULTS=str(slow), **settings) as program, Client(program.url) as first:
        cancelled, job = first.submit(spec.model_copy(update={"max_length": 9})), first.submit(spec)
        for one in (cancelled, job):  # both run here: there is no other service yet
            encoding(first, one)
        with (
            start_service(tmp_path / "other", database_url=url, store=store, lease=2.0) as other,
            Client(other.url) as second,
        ):
            assert second.cancel(cancelled.id).state is JobState.RUNNING
            with pytest.raises(JobFailed, match="cancelled"):
                second.wait(cancelled.id)
            seen: list[Job] = []
            waiting = threading.Thread(target=lambda: second.wait(job.id, seen.append))
            waiting.start()
            while not seen:
                time.sleep(0.02)
            assert second.job(job.id).state is JobState.RUNNING
            os.kill(program.process.pid, signal.SIGKILL)
            killed = time.monotonic()
            assert gone(program, 5), program.left()
            while not seen[-1].version - seen[0].version > 1 << 19:  # it was taken over
                assert time.monotonic() - killed < 15
                time.sleep(0.02)
            waiting.join(60)
            finished = second.job(job.id)
    assert finished.state is JobState.SUCCEEDED
    assert [one.version for one in seen] == sorted({one.version for one in seen})
    with Client(service.url) as client:
        undisturbed = client.wait(client.submit(spec).id)
    assert (finished.dataset, finished.progress.rows) == (undisturbed.dataset, undisturbed.progress.rows)

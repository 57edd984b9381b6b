"""The program dies in the commit path, and a block that kills its workers fails its own job alone."""

import json
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.program import gone, serving
from tests.worker.crash import digests

from packhouse.client import faults
from packhouse.client.api import Client, JobFailed
from packhouse.client.format import data_path, manifest_path, read_manifest
from packhouse.client.store import LocalStore
from packhouse.client.wire import Job, JobSpec
from packhouse.worker.verify import verify


def test_workers_and_the_service_die_in_mid_commit(
    tmp_path: Path, texts: Path, tokenizer_dir: Path, service: Any, cached: Job
) -> None:
    """A worker dies behind a shard's first file, the service behind the manifest: the dataset is the same.

    The job beside it has a block that kills every worker (B084): it fails by name after three, and holds up nothing.
    """
    (tmp_path / "deadly.jsonl").write_text('{"text": "kills"}\n')
    spec = JobSpec(sources=[str(texts)], tokenizer=str(tokenizer_dir))
    deadly = JobSpec(sources=[str(tmp_path / "deadly.jsonl")], tokenizer=str(tokenizer_dir))
    there = service.parts.store
    with Client(service.url) as client:
        harmless = client.wait(client.submit(deadly).id)
    (block,) = read_manifest(there, harmless.dataset or "").shards
    (shard,) = read_manifest(there, cached.dataset or "").shards
    kills: list[dict[str, Any]] = [
        {"point": faults.RENAMED, "key": data_path(shard.key)},
        {"point": faults.RENAMED, "key": manifest_path(cached.dataset or "")},
        # Three in the life in which its job fails, and up to three in the one before.
        {"point": faults.HALF_WRITTEN, "key": data_path(block.key), "times": 6},
    ]
    file, home = tmp_path / "faults.json", tmp_path / "home"
    file.write_text(json.dumps([kill | {"action": "kill"} for kill in kills]))
    with serving(home, PACKHOUSE_FAULTS=str(file)) as program:
        with Client(program.url) as client:
            job, doomed = client.submit(spec), client.submit(deadly)
        assert psutil.wait_procs([program.process], timeout=120)[0][0].returncode == -signal.SIGKILL
        assert gone(program, 5), program.left()
    store = LocalStore(home / "store")
    assert [one for one in verify(store) if one.findings] == []
    with serving(home, PACKHOUSE_FAULTS=str(file)) as program, Client(program.url) as client:
        finished = client.wait(job.id)
        with pytest.raises(JobFailed, match=r"3 workers died on '.*deadly\.jsonl', line"):
            client.wait(doomed.id)
        again = client.wait(client.submit(spec).id)
        assert (again.dataset, again.progress.hits) == (cached.dataset, 1)
    assert (finished.dataset, finished.progress.rows) == (cached.dataset, cached.progress.rows)
    assert digests(store).items() <= digests(there).items()
    assert list(store.list("datasets")) == [manifest_path(cached.dataset or "")]
    assert [path.name for path in (store.root / "tmp").iterdir()] == []

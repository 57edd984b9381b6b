"""The short form of ``make soak``: ten kills at random, and nothing lost, doubled or wrong."""

from pathlib import Path

from tests.soak import soak
from tests.worker.crash import job_processes


def test_jobs_that_die_at_random_lose_nothing(tmp_path: Path, tiny: Path) -> None:
    with job_processes() as jobs:
        summary = soak(jobs, tmp_path / "soak", tiny, kills=10, seed=4, seconds=12)
    assert summary.sound, summary
    assert summary.kills >= 2
    assert summary.jobs >= 1
    assert summary.rows > 0

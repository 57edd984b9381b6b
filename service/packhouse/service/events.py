"""A job's events: its newest snapshots, as fast as the reader takes them and never faster than a pace."""

import asyncio
from collections.abc import AsyncIterator

from anyio.to_thread import run_sync

from packhouse.client.wire import Job
from packhouse.service.jobs import Jobs

PACE = 0.2
"""Seconds between two snapshots of a job whose state stays the same."""


async def snapshots(
    jobs: Jobs, job_id: str, seen: int | None, *, heartbeat: float, pace: float = PACE
) -> AsyncIterator[Job | None]:
    """Yield the job whenever it is newer than version ``seen``; None after ``heartbeat`` seconds without a change.

    A slow reader gets fewer snapshots, not older ones. Ends when the job has or when the service hangs up; raises
    ``NotFound``.
    """
    loop = asyncio.get_running_loop()
    changed, urgent = asyncio.Event(), asyncio.Event()

    def listener(hurry: bool) -> None:
        loop.call_soon_threadsafe(changed.set)
        if hurry:
            loop.call_soon_threadsafe(urgent.set)

    with jobs.listening(job_id, listener):
        while True:
            changed.clear()
            urgent.clear()
            job = await run_sync(jobs.job, job_id)
            # Another service may know a job by an older version than the reader has seen there.
            if seen is None or job.version > seen or (job.state.final and job.version != seen):
                yield job
                seen = job.version
            if job.state.final or jobs.closing:
                return
            if await _within(changed, heartbeat):
                await _within(urgent, pace)
            else:
                yield None


async def _within(event: asyncio.Event, seconds: float) -> bool:
    try:
        async with asyncio.timeout(seconds):
            return await event.wait()
    except TimeoutError:
        return False

"""Parts of pages that follow what happens: the same HTML as event stream, or once, for who asks again and again."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable

from anyio.to_thread import run_sync
from fastapi.responses import HTMLResponse, Response, StreamingResponse

from packhouse.service.dashboard.render import HEADERS
from packhouse.service.events import snapshots
from packhouse.service.jobs import Jobs

PACE = 1.0
"""Seconds between two looks at all jobs."""
LAST = "event: last\ndata: 1\n\n"
"""Tells the script that nothing will follow; without it a browser would ask again."""

Draw = Callable[[], str]


async def once(draw: Draw) -> Response:
    """Return the part as it is now."""
    return HTMLResponse(await run_sync(draw), headers=HEADERS)


def stream(parts: AsyncIterator[str]) -> Response:
    """Return the event stream that carries ``parts``."""
    headers = {**HEADERS, "x-accel-buffering": "no"}
    return StreamingResponse(parts, headers=headers, media_type="text/event-stream")


async def of_job(jobs: Jobs, job_id: str, draw: Draw, heartbeat: float) -> AsyncIterator[str]:
    """Yield the part after each change of a job; ends with it."""
    yield "retry: 1000\n\n"
    ended = False
    async for job in snapshots(jobs, job_id, None, heartbeat=heartbeat):
        if job is None:
            yield ": nothing new\n\n"
            continue
        yield event(await run_sync(draw))
        ended = job.state.final
    if ended:
        yield LAST


async def of_jobs(jobs: Jobs, draw: Draw, heartbeat: float, pace: float = PACE) -> AsyncIterator[str]:
    """Yield the part whenever it has become another one, until the service stops."""
    yield "retry: 1000\n\n"
    before, told_at = "", time.monotonic()
    while not jobs.closing:
        now = await run_sync(draw)
        if now != before:
            before, told_at = now, time.monotonic()
            yield event(now)
        elif time.monotonic() - told_at >= heartbeat:
            told_at = time.monotonic()
            yield ": nothing new\n\n"
        await asyncio.sleep(pace)


def event(text: str) -> str:
    """Return the event that carries ``text``; whatever breaks a line there is a line of its own here."""
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    return "".join(f"data: {line}\n" for line in lines) + "\n"

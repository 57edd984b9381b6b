"""Routes of jobs: submit, look, cancel, follow."""

from collections.abc import AsyncIterator
from typing import Annotated

from anyio.to_thread import run_sync
from fastapi import APIRouter, Header, Query, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import Field

from packhouse.client.wire import Job, JobSpec, JobState, Rejected, Wire
from packhouse.service.access import Asking, Forbidden
from packhouse.service.events import snapshots
from packhouse.service.json_body import JsonRoute
from packhouse.service.openapi import also, gives, told
from packhouse.service.parts import Given
from packhouse.service.rejected import rejected_records
from packhouse.service.routes.params import NO_QUERY, Paged, next_page
from packhouse.service.tokens import Role

router = APIRouter(prefix="/v1/jobs", tags=["jobs"], route_class=JsonRoute)


class JobQuery(Wire):
    """Which jobs to list, newest first."""

    state: JobState | None = None
    after: str | None = None
    """Id of the last job of the page before."""
    limit: Annotated[int, Field(ge=1, le=1000)] = 100


@router.post(
    "",
    status_code=202,
    dependencies=[NO_QUERY],
    responses=also(200, Job, "An identical active job") | told(413, 429),
)
def submit(spec: JobSpec, parts: Given, caller: Asking, response: Response) -> Job:
    """Queue a job. An identical job that is still active is returned instead, with status 200.

    403 for a priority above 0 without the role admin, 429 for more active jobs than a token may have.
    """
    job, created = parts.jobs.submit(spec, caller)
    response.status_code = 202 if created else 200
    response.headers["location"] = f"/v1/jobs/{job.id}"
    return job


@router.get("")
def index(query: Annotated[JobQuery, Query()], parts: Given, request: Request, response: Response) -> list[Job]:
    """List jobs, newest first; the Link header leads to older ones."""
    jobs = parts.jobs.jobs(state=query.state, before=query.after, limit=query.limit)
    if len(jobs) == query.limit:
        response.headers.update(next_page(request, after=jobs[-1].id))
    return jobs


@router.get("/{job_id}", dependencies=[NO_QUERY], responses=told(404))
def show(job_id: str, parts: Given) -> Job:
    """Return one job."""
    return parts.jobs.job(job_id)


@router.delete(
    "/{job_id}",
    status_code=202,
    dependencies=[NO_QUERY],
    responses=also(200, Job, "It is cancelled") | told(404, 409),
)
def cancel(job_id: str, parts: Given, caller: Asking, response: Response) -> Job:
    """Cancel a job: status 200 when it is cancelled, 202 when it will be in a moment, 409 when it had ended.

    403 for the job of another one, without the role admin.
    """
    submitter = parts.jobs.job(job_id).submitter
    if caller.role < Role.ADMIN and caller.name != submitter:
        raise Forbidden(f"job {job_id} is {submitter!r}'s, and the token is {caller.name!r}'s", "ask them, or an admin")
    job = parts.jobs.cancel(job_id)
    response.status_code = 200 if job.state.final else 202
    return job


@router.get("/{job_id}/rejected", responses=told(404, 500))
def rejected(job_id: str, page: Paged, parts: Given, request: Request, response: Response) -> list[Rejected]:
    """List the records that were kept out, where they lie and why, in the order of the sources."""
    parts.jobs.job(job_id)
    blocks = parts.catalog.rejected(job_id)
    records = list(rejected_records(parts.store, blocks, offset=page.offset, limit=page.limit))
    if len(records) == page.limit:
        response.headers.update(next_page(request, offset=page.offset + page.limit, limit=page.limit))
    return records


@router.get(
    "/{job_id}/events",
    dependencies=[NO_QUERY],
    response_class=StreamingResponse,
    responses=gives("text/event-stream", empty=(204,)) | told(404),
)
async def events(job_id: str, parts: Given, last_event_id: Annotated[str | None, Header()] = None) -> Response:
    """Follow a job (server-sent events): each event is the whole job, its id the job's version."""
    job = await run_sync(parts.jobs.job, job_id)
    # A version has at most 19 digits; what is longer was never an id of ours.
    known = last_event_id is not None and last_event_id.isdecimal() and len(last_event_id) < 20
    seen = int(last_event_id) if last_event_id and known else None
    if job.state.final and job.version == seen:
        return Response(status_code=204)  # what makes a browser's EventSource stop asking
    stream = snapshots(parts.jobs, job_id, seen, heartbeat=parts.settings.heartbeat)
    headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
    return StreamingResponse(_event_stream(stream), headers=headers, media_type="text/event-stream")


async def _event_stream(stream: AsyncIterator[Job | None]) -> AsyncIterator[str]:
    yield "retry: 1000\n\n"
    async for job in stream:
        yield ": nothing new\n\n" if job is None else f"id: {job.version}\ndata: {job.model_dump_json()}\n\n"

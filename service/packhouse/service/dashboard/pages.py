"""Routes of the dashboard. Nothing here changes anything: what acts is the REST interface."""

from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Annotated, Any

from anyio.to_thread import run_sync
from fastapi import APIRouter, Depends, FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse
from fastapi.routing import APIRoute
from markupsafe import Markup
from pydantic import Field
from sqlalchemy.exc import DBAPIError

from packhouse.client import charts
from packhouse.client.errors import InvalidRequest, NotFound, PackhouseError
from packhouse.client.plan import PlanFile
from packhouse.client.wire import JobState, Wire
from packhouse.client.wire_plans import Plan
from packhouse.service import byte_ranges, problems, work
from packhouse.service.dashboard import live, pictures, preview_form
from packhouse.service.dashboard.dataset_facts import FactsOfDatasets
from packhouse.service.dashboard.history import History
from packhouse.service.dashboard.render import error_page, page, static_files
from packhouse.service.dashboard.stored import Stored
from packhouse.service.dashboard.views import PHASES, Views, done
from packhouse.service.json_body import JsonRequest
from packhouse.service.open_plans import Opener
from packhouse.service.parts import Parts
from packhouse.service.problems import Conflict
from packhouse.service.routes.params import ContentId

PER_PAGE = 40


class PageRoute(APIRoute):
    """A route whose errors are pages too."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Wrap the handler that FastAPI makes."""
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            try:
                return await handler(JsonRequest(request.scope, request.receive))
            except PackhouseError as error:
                return error_page(error)
            except DBAPIError as error:
                return error_page(problems.database_trouble(error))
            except RequestValidationError as error:
                item = error.errors()[0]
                fact = f"{item['loc'][-1]} is {str(item.get('input'))[:80]!r}: {item['msg']}"
                return error_page(InvalidRequest(fact, "go back, or start at the overview"))

        return handle


router = APIRouter(route_class=PageRoute, include_in_schema=False, default_response_class=HTMLResponse)


def install(app: FastAPI, parts: Parts) -> None:
    """Add the dashboard to an application."""
    history, stored = History(parts.catalog.engine), Stored(parts.space)
    app.state.views = Views(parts, history, stored, FactsOfDatasets(parts.store))
    app.include_router(router)


def _of_app(request: Request) -> Views:
    views = request.app.state.views
    assert isinstance(views, Views)
    return views


Seen = Annotated[Views, Depends(_of_app)]
Offset = Annotated[int, Query(ge=0, lt=2**31)]


class JobsQuery(Wire):
    """Which jobs to list."""

    state: JobState | None = None
    after: Annotated[str, Field(max_length=64)] | None = None


@router.get("/")
def overview(views: Seen, window: str = "day") -> Response:
    """Show the whole: what runs, what came of it, what the store holds."""
    if window not in pictures.WINDOWS:
        raise InvalidRequest(f"there is no window {window[:40]!r}", f"choose {', '.join(pictures.WINDOWS)}")
    chosen = pictures.WINDOWS[window]
    context = views.overview(chosen)
    jobs_now = Markup(views.jobs_now())
    return page("overview.html", window=window, windows=pictures.WINDOWS, jobs_now=jobs_now, **context)


@router.get("/jobs")
def jobs(views: Seen, query: Annotated[JobsQuery, Query()]) -> Response:
    """List jobs, newest first."""
    found = views.parts.jobs.jobs(state=query.state, before=query.after, limit=PER_PAGE + 1)
    shown, more = found[:PER_PAGE], len(found) > PER_PAGE
    return page(
        "jobs.html", jobs=shown, more=more, query=query, counts=views.counts(), states=list(JobState), done=done
    )


@router.get("/jobs/{job_id}")
def job(job_id: str, views: Seen) -> Response:
    """Show a job."""
    return page("job.html", job=views.parts.jobs.job(job_id), now_part=Markup(views.job(job_id)), phases=PHASES)


@router.get("/live/jobs")
async def live_jobs(views: Seen, once: bool = False) -> Response:
    """Follow all jobs."""
    if once:
        return await live.once(views.jobs_now)
    return live.stream(live.of_jobs(views.parts.jobs, views.jobs_now, views.parts.settings.heartbeat))


@router.get("/live/jobs/{job_id}")
async def live_job(job_id: str, views: Seen, once: bool = False) -> Response:
    """Follow a job."""
    draw = lambda: views.job(job_id)  # noqa: E731 - partial would hide its type
    if once:
        return await live.once(draw)
    await run_sync(views.parts.jobs.job, job_id)  # that it is there is known before the first byte
    return live.stream(live.of_job(views.parts.jobs, job_id, draw, views.parts.settings.heartbeat))


@router.get("/datasets")
def datasets(views: Seen, offset: Offset = 0) -> Response:
    """List datasets, newest first."""
    found = views.stored.datasets(offset=offset, limit=PER_PAGE + 1)
    shown = [(one, views.history.made(one.id), views.history.recipe(one.recipe)) for one in found[:PER_PAGE]]
    total = views.stored.usage().datasets
    return page("datasets.html", datasets=shown, offset=offset, more=len(found) > PER_PAGE, step=PER_PAGE, total=total)


@router.get("/datasets/{dataset_id}")
def dataset(dataset_id: ContentId, views: Seen) -> Response:
    """Show a dataset."""
    context = views.dataset(dataset_id)
    if context is None:
        counting = page("counting.html", dataset_id=dataset_id)
        counting.headers["refresh"] = "3"
        return counting
    return page("dataset.html", **{**context, "lengths": Markup(context["lengths"])})


@router.get("/plans")
def plans(views: Seen, offset: Offset = 0) -> Response:
    """List plans, newest first."""
    found = views.stored.plans(offset=offset, limit=PER_PAGE + 1)
    drawn = views.stored.datasets_of([one.id for one in found[:PER_PAGE]])
    shown = [(one, [(each, views.title(each)) for each in drawn[one.id]]) for one in found[:PER_PAGE]]
    total = views.stored.usage().plans
    return page("plans.html", plans=shown, offset=offset, more=len(found) > PER_PAGE, step=PER_PAGE, total=total)


@router.get("/plans/{plan_id}")
def plan(plan_id: ContentId, views: Seen, open_plan: Opener) -> Response:
    """Show a plan's report."""
    try:
        file: PlanFile = open_plan(plan_id)
    except NotFound:
        views.parts.space.inventory.check_plan(plan_id)
        raise
    shown = Plan(id=file.id, spec=file.spec, report=file.report, stored=True)
    report = shown.report
    return page(
        "plan.html",
        plan=shown,
        report=report,
        titles={one.id: views.title(one.id) for one in report.datasets},
        cost=Markup(charts.curve(report.cost, "Cost over the steps")),
        lengths=Markup(charts.bars(report.lengths, charts.tokens, "Samples by their length in tokens")),
        fills=Markup(charts.bars(report.fills, charts.percent, "Packs by the share that holds tokens")),
    )


@router.get("/store")
def store(views: Seen, budget: Annotated[str | None, Query(max_length=40)] = None) -> Response:
    """Show what takes the room, and what eviction would take."""
    foreseen, wrong = None, None
    try:
        if budget is not None:
            foreseen = views.foreseen(budget)
    except (InvalidRequest, Conflict) as error:
        wrong = error
    usage = views.store(PER_PAGE)
    titles = {one: views.title(one) for one in foreseen.examples} if foreseen else {}
    return page("store.html", foreseen=foreseen, wrong=wrong, budget=budget or "", titles=titles, **usage)


@router.get("/preview")
def preview_empty(views: Seen, job: str | None = None) -> Response:
    """Show the form, as it would be filled for a job."""
    form = dict(preview_form.EMPTY)
    if job is not None:
        form = preview_form.filled(views.parts.jobs.job(job).spec)
    return page("preview.html", form=form, choices=preview_form.CHOICES, shown=None, wrong=None)


@router.post("/preview")
async def preview(request: Request, views: Seen) -> Response:
    """Show what the first records become."""
    form = preview_form.typed(await request.body())
    shown, wrong = None, None
    try:
        spec = preview_form.request(form)
        modules = views.parts.settings.tokenize_modules
        shown = await run_sync(work.preview, spec, views.parts.store, modules)
    except PackhouseError as error:
        wrong = error
    status = wrong.status if wrong else 200
    return page("preview.html", status, form=form, choices=preview_form.CHOICES, shown=shown, wrong=wrong)


@router.get("/static/{name}")
def static(name: str, request: Request) -> Response:
    """Return the style sheet, the script or the icon."""
    with suppress(KeyError):
        data, digest, media_type = static_files()[name]
        return byte_ranges.respond(request, data, digest, media_type)
    raise NotFound(f"there is no file {name[:80]!r}", "start at the overview")

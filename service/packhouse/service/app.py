"""The HTTP application: routes, problem documents and limits, over parts that are passed in."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version

from fastapi import FastAPI

from packhouse.service import openapi, problems
from packhouse.service.access import Access
from packhouse.service.audit import AuditedRequests
from packhouse.service.checked_files import CheckedFiles
from packhouse.service.dashboard import login, pages
from packhouse.service.gauges import Gauges
from packhouse.service.open_plans import OpenPlans
from packhouse.service.parts import Parts
from packhouse.service.requests import WatchedRequests
from packhouse.service.routes import (
    cache,
    datasets,
    explain,
    health,
    jobs,
    metrics,
    plans,
    presets,
    preview,
    shards,
    tokens,
    verify,
)
from packhouse.service.traces import traced_requests


def create_app(parts: Parts) -> FastAPI:
    """Return the application; its parts outlive it, and its event streams end when it does."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        parts.jobs.hang_up()

    app = FastAPI(
        title="packhouse",
        version=version("packhouse"),
        lifespan=lifespan,
        docs_url=None,  # their pages load scripts from the internet
        redoc_url=None,
        telemetry=traced_requests(parts.traces),
        responses=openapi.told(*openapi.ANY),
    )
    app.state.parts = parts
    app.state.open_plans = OpenPlans(parts.store)
    app.state.checked_files = CheckedFiles(parts.store)
    parts.space.on_plans_gone = app.state.open_plans.forget
    app.add_middleware(AuditedRequests, audit=parts.audit)
    app.add_middleware(Access, tokens=parts.tokens, always=not parts.settings.on_loopback)
    app.add_middleware(WatchedRequests, metrics=parts.metrics)
    parts.metrics.registry.register(Gauges(parts))
    problems.install(app)
    openapi.install(app)
    for routes in (jobs, preview, datasets, plans, presets, shards, cache, explain, verify, health, metrics, tokens):
        app.include_router(routes.router)
    app.include_router(login.router)
    pages.install(app, parts)
    return app

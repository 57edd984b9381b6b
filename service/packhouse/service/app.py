"""The HTTP application: routes, problem documents and limits, over parts that are passed in."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version

from fastapi import FastAPI

from packhouse.service import problems
from packhouse.service.open_plans import OpenPlans
from packhouse.service.parts import Parts
from packhouse.service.routes import datasets, health, jobs, plans, presets, preview, shards


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
    )
    app.state.parts = parts
    app.state.open_plans = OpenPlans(parts.store)
    problems.install(app)
    for routes in (jobs, preview, datasets, plans, presets, shards, health):
        app.include_router(routes.router)
    return app

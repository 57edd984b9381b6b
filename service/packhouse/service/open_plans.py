"""Plans that are kept open: opening one checks all of its bytes, an open one is a memory map."""

from functools import lru_cache
from typing import Annotated

from fastapi import Depends, Request

from packhouse.client.errors import NotFound
from packhouse.client.plan import PlanFile
from packhouse.client.store import ReadStore


class OpenPlans:
    """The plans of a store, those used last open."""

    def __init__(self, store: ReadStore, limit: int = 32) -> None:
        @lru_cache(limit)
        def opened(plan_id: str) -> PlanFile:
            return PlanFile.open(store, plan_id)

        self._opened = opened

    def __call__(self, plan_id: str) -> PlanFile:
        """Return a plan; raise ``NotFound`` or ``Damaged``."""
        try:
            return self._opened(plan_id)
        except NotFound:
            raise NotFound(f"there is no plan {plan_id}", "'packhouse plan' builds one") from None

    def forget(self) -> None:
        """Open every plan anew from now on."""
        self._opened.cache_clear()


def _of_app(request: Request) -> OpenPlans:
    plans = request.app.state.open_plans
    assert isinstance(plans, OpenPlans)
    return plans


Opener = Annotated[OpenPlans, Depends(_of_app)]
"""A route's parameter that receives the open plans."""

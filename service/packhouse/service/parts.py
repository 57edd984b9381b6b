"""What the routes work with: built once by the program or a test, and passed in."""

from dataclasses import dataclass
from typing import Annotated, Protocol

from fastapi import Depends, Request

from packhouse.client.store import Store
from packhouse.service.catalog import Catalog
from packhouse.service.jobs import Jobs
from packhouse.service.settings import Settings


class Health(Protocol):
    """Something that can tell whether it works."""

    def healthy(self) -> bool:
        """Whether it can do its work now."""


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of a running service."""

    settings: Settings
    store: Store
    catalog: Catalog
    jobs: Jobs
    executor: Health


def _of_app(request: Request) -> Parts:
    parts = request.app.state.parts
    assert isinstance(parts, Parts)
    return parts


Given = Annotated[Parts, Depends(_of_app)]
"""A route's parameter that receives the parts."""

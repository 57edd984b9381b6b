"""What the routes work with: built once by the program or a test, and passed in."""

from dataclasses import dataclass, field
from typing import Annotated, Protocol

from fastapi import Depends, Request
from opentelemetry.trace import TracerProvider

from packhouse.client.store import Store
from packhouse.service.audit import Audit
from packhouse.service.catalog import Catalog
from packhouse.service.jobs import Jobs
from packhouse.service.metrics import Metrics
from packhouse.service.settings import Settings
from packhouse.service.space import Space
from packhouse.service.tokens import Tokens
from packhouse.service.traces import NO_TRACES


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
    space: Space
    metrics: Metrics = field(default_factory=Metrics)
    traces: TracerProvider = NO_TRACES
    tokens: Tokens = field(init=False)
    audit: Audit = field(init=False)

    def __post_init__(self) -> None:
        """Both are all in the database of the catalog."""
        object.__setattr__(self, "tokens", Tokens(self.catalog.engine))
        object.__setattr__(self, "audit", Audit(self.catalog.engine, self.settings.audit_days))


def _of_app(request: Request) -> Parts:
    parts = request.app.state.parts
    assert isinstance(parts, Parts)
    return parts


Given = Annotated[Parts, Depends(_of_app)]
"""A route's parameter that receives the parts."""

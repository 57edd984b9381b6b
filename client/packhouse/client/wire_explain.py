"""REST models of an explanation: what of a job is in the cache, and why the rest is not."""

from typing import Annotated

from pydantic import Field

from packhouse.client.wire import JobSpec, Miss, Wire


class ExplainSpec(Wire):
    """A request to explain a job before it runs."""

    job: JobSpec
    scan: bool = False
    """Whether sources that are new or have changed are read now, to say which of their blocks are hits."""
    limit: Annotated[int, Field(ge=0, le=10_000)] = 100
    """Most sources to list; the sums are over all."""


class ExplainedSource(Wire):
    """A source that is not all hits."""

    source: str
    scanned: bool
    """False for one that is new or has changed, and whose blocks are not known before it is read."""
    blocks: int
    hits: int
    misses: list[Miss]


class Explanation(Wire):
    """What of a job is in the cache, and why the rest is not."""

    recipe: str
    """Recipe digest."""
    sources: int
    unscanned: int
    """Sources that are new or have changed: nothing is said of their blocks."""
    unscanned_bytes: int
    blocks: int
    hits: int
    bytes: int
    hit_bytes: int
    misses: list[Miss]
    """All of them, by what changed."""
    listed: list[ExplainedSource]
    """Sources that are not all hits, in the job's order, the first ``limit`` of them."""
    seconds: float
    looked_up: int = 0
    """Blocks that were looked up so far: all of them once it is ``done``."""
    done: bool = True
    """False while it goes on; then misses and sources are not told yet."""

"""A job's numbers while it runs, and the progress they make."""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from packhouse.client.format import Receipt
from packhouse.client.wire import Miss, Progress
from packhouse.worker.work import Done

Phase = Literal["scanning", "encoding", "done"]


@dataclass(slots=True)
class Tally:
    """Sums over the blocks done so far. Blocks that occur twice count twice."""

    sources: int = 0
    blocks: int = 0
    blocks_done: int = 0
    hits: int = 0
    shared: int = 0
    why: list[Miss] = field(default_factory=list)
    misses: Counter[str] = field(default_factory=Counter)
    rows: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    records: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    dropped: int = 0
    truncated: int = 0
    truncated_tokens: int = 0
    split: int = 0
    fragments: int = 0
    bytes: int = 0
    bytes_done: int = 0
    bytes_read: int = 0
    engines: Counter[str] = field(default_factory=Counter)
    audited: int = 0
    fallbacks: Counter[str] = field(default_factory=Counter)
    started: float = field(default_factory=time.monotonic)
    encoding_since: float | None = None
    encoded_bytes: int = 0

    def add(self, receipt: Receipt, length: int, times: int = 1) -> None:
        """Count a block of ``length`` source bytes that is in the dataset ``times`` times; below 0, take it out."""
        self.blocks_done += times
        self.bytes_done += length * times
        self.rows += receipt.rows * times
        self.tokens += receipt.tokens * times
        self.trained_tokens += receipt.trained_tokens * times
        self.records += receipt.records * times
        self.dropped += receipt.dropped * times
        self.truncated += receipt.truncated * times
        self.truncated_tokens += receipt.truncated_tokens * times
        self.split += receipt.split * times
        self.fragments += receipt.fragments * times
        for reason, count in receipt.rejected.items():
            self.rejected[reason] += count * times
        self.rejected += Counter()  # leaves out the zeros

    def add_work(self, done: Done) -> None:
        """Count how a block was encoded."""
        self.encoded_bytes += done.block.length
        self.bytes_read += done.block.length
        self.engines[done.engine] += 1
        self.audited += done.audited
        self.fallbacks.update(done.fallbacks)

    def progress(self, phase: Phase) -> Progress:
        """Return the numbers as they go over the wire."""
        now = time.monotonic()
        speed = eta = 0.0
        if self.encoding_since is not None and self.encoded_bytes:
            speed = self.encoded_bytes / max(now - self.encoding_since, 1e-9)
            eta = (self.bytes - self.bytes_done) / speed
        fields = {name: getattr(self, name) for name in Progress.model_fields if hasattr(self, name)}
        counters = ("misses", "rejected", "engines", "fallbacks")
        fields |= {name: dict(sorted(fields[name].items())) for name in counters}
        return Progress.model_validate(
            fields
            | {
                "phase": phase,
                "seconds": round(now - self.started, 3),
                "mb_per_s": round(speed / 1e6, 3),
                "eta_seconds": round(eta, 1) if phase == "encoding" and self.encoded_bytes else None,
            }
        )


TELL_SECONDS = 0.25
"""Time between two reports of progress within a phase."""


@dataclass(slots=True)
class Report:
    """Tells a job's progress: each phase as it begins, and then a few times a second."""

    tally: Tally
    on_progress: Callable[[Progress], None]
    phase: Phase = "scanning"
    _told: float = 0.0

    def tell(self, phase: Phase, *, force: bool = False) -> None:
        """Tell where the job stands if that is due; always with ``force``."""
        now = time.monotonic()
        if force or phase != self.phase or now - self._told >= TELL_SECONDS:
            self._told, self.phase = now, phase
            self.on_progress(self.tally.progress(phase))

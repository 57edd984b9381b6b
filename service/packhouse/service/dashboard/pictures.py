"""The dashboard's own pictures, as SVG that the style sheet colours: columns over time, and bars beside names."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from html import escape

from markupsafe import Markup

from packhouse.client.charts import BOTTOM, HEIGHT, LEFT, TOP, WIDTH, picture, short
from packhouse.service.dashboard.history import Ended

HIT = "hit"
COLOURS = 7
"""Classes c0 to c6 of the style sheet; the last one is for all other series."""


@dataclass(frozen=True, slots=True)
class Window:
    """A stretch of time up to now, in equal buckets."""

    title: str
    bucket: timedelta
    buckets: int
    label: str
    """Format of a bucket's time."""

    def begin(self, now: float) -> float:
        """Return when the first bucket begins, a whole multiple of the bucket's length, in seconds since 1970."""
        size = self.bucket.total_seconds()
        return (now // size - self.buckets + 1) * size


WINDOWS = {
    "day": Window("24 hours", timedelta(hours=1), 24, "%H:%M"),
    "week": Window("7 days", timedelta(hours=6), 28, "%d %b %Hh"),
    "month": Window("30 days", timedelta(days=1), 30, "%d %b"),
}


@dataclass(frozen=True, slots=True)
class OverTime:
    """What jobs did, by the time they ended: each series has a value for each bucket."""

    times: list[datetime]
    labels: list[str]
    blocks: dict[str, list[int]]
    """Blocks by outcome: hits first, then misses by reason, the most frequent one first."""
    rates: list[float]
    """Millions of source bytes encoded per second of encoding; 0 where nothing was encoded."""

    @property
    def outcomes(self) -> dict[str, int]:
        """Blocks of all buckets by outcome."""
        return {name: sum(counts) for name, counts in self.blocks.items()}


def over_time(jobs: Sequence[Ended], window: Window, now: float) -> OverTime:
    """Return the sums of ``jobs`` by bucket."""
    begin, size = window.begin(now), window.bucket.total_seconds()
    times = [datetime.fromtimestamp(begin + size * number, UTC) for number in range(window.buckets)]
    blocks: dict[str, list[int]] = {HIT: [0] * window.buckets}
    encoded, seconds = [0] * window.buckets, [0.0] * window.buckets
    for job in jobs:
        at = int((job.at - begin) // size)
        if not 0 <= at < window.buckets:
            continue
        for reason, count in ((HIT, job.hits), *job.misses.items()):
            blocks.setdefault(reason, [0] * window.buckets)[at] += count
        encoded[at] += job.encoded
        seconds[at] += job.seconds
    order = sorted(blocks, key=lambda name: (name != HIT, -sum(blocks[name]), name))
    rates = [count / spent / 1e6 if spent else 0.0 for count, spent in zip(encoded, seconds, strict=True)]
    return OverTime(
        times, [time.strftime(window.label) for time in times], {name: blocks[name] for name in order}, rates
    )


def columns(series: Mapping[str, Sequence[float]], labels: Sequence[str], title: str, unit: str) -> Markup:
    """Return a column for each label, its series stacked; each part says what it is when it is pointed at."""
    count = len(labels)
    step = (WIDTH - LEFT) / max(count, 1)
    heights = [sum(values) for values in zip(*series.values(), strict=True)]
    most = max([*heights, 0]) or 1
    shapes = []
    for at, label in enumerate(labels):
        base = float(HEIGHT - BOTTOM)
        for number, (name, values) in enumerate(series.items()):
            tall = values[at] / most * (HEIGHT - BOTTOM - TOP)
            if tall:
                base -= tall
                shapes.append(
                    f'<rect class="c{min(number, COLOURS - 1)}" x="{LEFT + at * step + step * 0.1:.1f}" y="{base:.1f}" '
                    f'width="{step * 0.8:.1f}" height="{max(tall, 1):.1f}">'
                    f"<title>{escape(label)}: {escape(name)} {_amount(values[at])} {unit}</title></rect>"
                )
        if at % max(count // 6, 1) == 0:
            shapes.append(
                f'<text x="{LEFT + (at + 0.5) * step:.1f}" y="{HEIGHT - 8}" text-anchor="middle">{escape(label)}</text>'
            )
    told = ", ".join(f"{name} {_amount(max(values, default=0))}" for name, values in series.items())
    marks = [(0.0, "0"), (0.5, ""), (1.0, _amount(most))]
    return Markup(picture("".join(shapes), marks, title, f"at most, in one column, {told} {unit}"))


def bars(values: Mapping[str, float], total: float, title: str) -> Markup:
    """Return a thin bar for each value beside which a page writes its name: a share of ``total`` each."""
    shapes, x = [], 0.0
    for number, (name, value) in enumerate(values.items()):
        wide = value / total * 100 if total else 0.0
        shapes.append(
            f'<rect class="c{min(number, COLOURS - 1)}" x="{x:.3f}" y="0" width="{wide:.3f}" height="4">'
            f"<title>{escape(name)}: {_amount(value)}</title></rect>"
        )
        x += wide
    told = ", ".join(f"{name} {value / total:.1%}" for name, value in values.items()) if total else "nothing"
    label = escape(f"{title}: {told}")
    rail = '<rect class="rail" x="0" y="0" width="100" height="4"/>'
    return Markup(
        f'<svg class="share" viewBox="0 0 100 4" preserveAspectRatio="none" role="img" aria-label="{label}">'
        f"{rail}{''.join(shapes)}</svg>"
    )


def _amount(value: float) -> str:
    return short(value) if value >= 1000 or value == int(value) else f"{value:.3g}"

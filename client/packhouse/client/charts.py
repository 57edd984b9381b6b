"""The pictures of a report, as SVG that needs only a page's style: bars of a histogram, and a cost curve."""

from collections.abc import Callable, Sequence
from html import escape

from packhouse.client.wire_plans import CostCurve, Histogram

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 680, 220, 48, 28, 20
"""Size of a picture, and the room around its plot, in pixels."""
NARROW = 0.02
"""Least height of the curve's axis, as a share of the mean."""


def bars(histogram: Histogram, name: Callable[[float], str], title: str) -> str:
    """Return a histogram: a bar for each bound, which ``name`` writes; ``title`` is for who cannot see it."""
    most = max([*histogram.counts, 1])
    step = (WIDTH - LEFT) / max(len(histogram.counts), 1)
    crowded = len(histogram.counts) > 8
    shapes = []
    for i, (bound, count) in enumerate(zip(histogram.bounds, histogram.counts, strict=True)):
        tall = count / most * (HEIGHT - BOTTOM - TOP)
        x, label = LEFT + i * step, escape(name(bound))
        place = "odd" if crowded and i % 2 else "even"  # where there is little room, a page leaves the odd ones out
        shapes.append(
            f'<rect class="bar" x="{x + 2:.1f}" y="{HEIGHT - BOTTOM - tall:.1f}" width="{step - 4:.1f}" '
            f'height="{tall:.1f}"><title>up to {label}: {count:,}</title></rect>'
            f'<text x="{x + step / 2:.1f}" y="{HEIGHT - 10}" class="{place}" text-anchor="middle">{label}</text>'
        )
        if count:
            y = HEIGHT - BOTTOM - tall - 4
            shapes.append(
                f'<text x="{x + step / 2:.1f}" y="{y:.1f}" class="count" text-anchor="middle">{short(count)}</text>'
            )
    told = ", ".join(
        f"{count:,} up to {name(bound)}"
        for bound, count in zip(histogram.bounds, histogram.counts, strict=True)
        if count
    )
    return picture("".join(shapes), [(0.0, "0"), (1.0, short(most))], title, told)


def curve(cost: CostCurve, title: str) -> str:
    """Return the cost of the ranks over the steps: the least and the most loaded as a band, the mean as a line."""
    count = len(cost.steps)
    before = slice(0, max(count - 1, 1))
    low, top = min([*cost.low[before], 1 - NARROW]), max([*cost.high[before], 1 + NARROW])

    def height(value: float) -> float:
        return (min(max(value, low), top) - low) / (top - low)

    def points(values: Sequence[float]) -> list[str]:
        # Each run of steps is as wide as the others and level.
        edges = [(i + side, value) for i, value in enumerate(values) for side in (0, 1)]
        return [
            f"{LEFT + x / count * (WIDTH - LEFT):.1f},{HEIGHT - BOTTOM - height(value) * (HEIGHT - BOTTOM - TOP):.1f}"
            for x, value in edges
        ]

    band = points(cost.low) + points(cost.high)[::-1]
    shapes = (
        f'<polygon class="band" points="{" ".join(band)}"/>'
        f'<polyline class="mean" points="{" ".join(points(cost.mean))}"/>'
        f'<text x="{LEFT}" y="{HEIGHT - 10}">step 0</text>'
        f'<text x="{WIDTH}" y="{HEIGHT - 10}" text-anchor="end">step {cost.steps[-1]:,}</text>'
    )
    mean = height(1.0)
    middle = [(mean, "mean")] if 0.1 < mean < 0.9 else [(mean, "")]
    told = f"ranks between {min(cost.low):.3f} and {max(cost.high):.3f} of the mean"
    return picture(shapes, [(0.0, f"{low:.2f}"), *middle, (1.0, f"{top:.2f}")], title, told)


def picture(shapes: str, marks: Sequence[tuple[float, str]], title: str, told: str) -> str:
    """Return ``shapes`` over lines at ``marks``, shares of the height; ``told`` says in words what is seen."""
    lines = []
    for share, label in marks:
        y = HEIGHT - BOTTOM - share * (HEIGHT - BOTTOM - TOP)
        lines.append(
            f'<line class="axis" x1="{LEFT}" x2="{WIDTH}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{label}</text>'
        )
    named = f'role="img" aria-label="{escape(f"{title}: {told}" if told else title)}"'
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" {named}>{"".join(lines)}{shapes}</svg>'


def short(count: float) -> str:
    """Return a number in three digits and a unit."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return f"{count:.0f}"


def tokens(bound: float) -> str:
    """Return a length in tokens, in units of 1024 where it is long."""
    return f"{bound / 1024:.0f}k" if bound >= 1024 else f"{bound:.0f}"


def percent(bound: float) -> str:
    """Return a share in percent, without zeros at its end."""
    return f"{bound:.4%}".rstrip("0%").rstrip(".") + "%"

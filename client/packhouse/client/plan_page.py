"""A plan's report as one HTML page that needs nothing else: figures, tables, and pictures as SVG, light and dark."""

from collections.abc import Iterable, Sequence
from html import escape

from packhouse.client import charts
from packhouse.client.wire_plans import Balance, Plan

STYLE = """
:root{color-scheme:light dark;--ink:#1b1f24;--soft:#5d6673;--line:#d8dde3;--paper:#fff;--card:#f6f8fa;--bar:#2f6fde;
--band:#2f6fde33}
@media(prefers-color-scheme:dark){:root{--ink:#e6e9ee;--soft:#9aa4b2;--line:#343b45;--paper:#12161b;--card:#1a2027;
--bar:#6ea3ff;--band:#6ea3ff33}}
body{margin:0 auto;max-width:760px;padding:24px 16px 48px;background:var(--paper);color:var(--ink);
font:15px/1.5 system-ui,sans-serif}
h1{font-size:22px;margin:0}h2{font-size:16px;margin:32px 0 8px}p,figcaption{color:var(--soft);margin:4px 0}
code{overflow-wrap:anywhere}figure{margin:0}svg{width:100%;height:auto;display:block}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(200px,40%),1fr));gap:12px;margin:20px 0}
.cards div{background:var(--card);border-radius:8px;padding:12px}.cards b{display:block;font-size:20px}
.scroll{overflow-x:auto}table{border-collapse:collapse;width:100%}
th,td{padding:4px 12px 4px 0;border-bottom:1px solid var(--line);text-align:right;font-variant-numeric:tabular-nums}
th:first-child,td:first-child{text-align:left;overflow-wrap:anywhere;min-width:9em}th{font-weight:600}
svg text{fill:var(--soft);font-size:12px}.axis{stroke:var(--line)}.bar,.dot{fill:var(--bar)}.band{fill:var(--band)}
.mean{fill:none;stroke:var(--bar);stroke-width:1.5}
@media(max-width:600px){svg text{font-size:15px}svg .count,svg .odd{display:none}}
"""


CURVE = (
    "Least and most loaded rank (band) and mean (line) of each run of steps, as shares of the plan's mean. The axis "
    "covers what all but the last step reach, which may be padded."
)
BALANCE = "Greatest cost of a rank over the mean: 1 is even. Only this plan counts a last step that is padded."
LENGTHS = "Samples of up to so many tokens, and of more than the bar before."
FILLS = "Packs filled up to so much, and more than the bar before."


def page(plan: Plan) -> str:
    """Return the page: text of a whole HTML document, without a script or a link."""
    report = plan.report
    stored = "" if plan.stored else " · dry run, not stored"
    sections = [
        f"<h1>Pack plan</h1><p><code>{escape(plan.id)}</code>{stored}</p>",
        _cards(plan),
        _section("Cost over the steps", charts.curve(report.cost, "Cost over the steps"), CURVE),
        _section("Balance over the ranks", _balances(plan), BALANCE),
        _section("Lengths of the samples", charts.bars(report.lengths, charts.tokens, "Samples"), LENGTHS),
        _section("Fill of the packs", charts.bars(report.fills, charts.percent, "Packs"), FILLS),
        _section("Datasets", _datasets(plan), ""),
        _section("All figures", _figures(plan), ""),
        _section("Request", _table(["field", "value"], _request(plan)), ""),
    ]
    screen = '<meta name="viewport" content="width=device-width,initial-scale=1">'
    head = f'<meta charset="utf-8">{screen}<title>Plan {plan.id[:8]}</title>'
    body = "".join(sections)
    return f'<!doctype html><html lang="en"><head>{head}<style>{STYLE}</style></head><body>{body}</body></html>\n'


def _section(title: str, body: str, caption: str) -> str:
    return f"<h2>{title}</h2><figure>{body}<figcaption>{caption}</figcaption></figure>"


def _cards(plan: Plan) -> str:
    report = plan.report
    random = "too few steps" if report.randomness is None else f"{report.randomness:.2f}"
    cards = {
        "steps": f"{report.steps:,}",
        "packs": f"{report.packs:,}",
        "tokens": f"{report.tokens:,}",
        "padding": f"{report.padding:.3%}",
        "time added by waiting": f"{report.excess:.3%}",
        "randomness (1 = random)": random,
    }
    return f'<div class="cards">{"".join(f"<div><b>{value}</b>{name}</div>" for name, value in cards.items())}</div>'


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div>'


def _balances(plan: Plan) -> str:
    report = plan.report
    own = Balance(
        step_mean=report.imbalance_mean,
        step_p99=report.imbalance_p99,
        micro_mean=report.micro_imbalance_mean,
        micro_p99=report.micro_imbalance_p99,
    )
    rows = [
        (name, *(f"{value:.4f}" for value in (one.micro_mean, one.micro_p99, one.step_mean, one.step_p99)))
        for name, one in {"this plan": own, **report.compared}.items()
    ]
    return _table(["packs", "micro-batch, mean", "99 %", "step, mean", "99 %"], rows)


def _datasets(plan: Plan) -> str:
    rows = [
        (one.id, f"{one.samples:,}", f"{one.tokens:,}", f"{one.share:.2%}", f"{one.epochs:.3g}")
        for one in plan.report.datasets
    ]
    return _table(["dataset", "draws", "tokens", "share", "epochs"], rows)


def _figures(plan: Plan) -> str:
    values = plan.report.model_dump(exclude={"compared", "datasets", "lengths", "fills", "cost"})
    return _table(["figure", "value"], [(name.replace("_", " "), _figure(value)) for name, value in values.items()])


def _figure(value: object) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "-"}[value]
    return f"{value:,}" if isinstance(value, int) else f"{value:,.6g}"


def _request(plan: Plan) -> list[tuple[str, str]]:
    return [(name.replace("_", " "), _given(value)) for name, value in plan.spec.model_dump(exclude_none=True).items()]


def _given(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {one}" for name, one in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)

"""Packing, measured: packhouse's strategies and its peers' loops on the same lengths, in one run.

The lengths are drawn: chats (log-normal, median 500), web documents (median 700, up to 262,144, cut into pieces that
fit) and short ones (uniform, 64 to 512). Packs are put into steps of 8 ranks × 4 micro-batches in random order, those
of XTuner also by its length-grouped sampler. Run it with ``make bench``.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import peers
from rich.console import Console
from rich.table import Table

from packhouse.client.errors import InvalidRequest
from packhouse.client.wire_plans import PlanReport, PlanSpec
from packhouse.worker.packing.arrange import arrange, in_steps
from packhouse.worker.packing.measure import Measures, Samples
from packhouse.worker.packing.mixture import draws
from packhouse.worker.packing.pieces import split
from packhouse.worker.packing.segments import Int32, Packing
from packhouse.worker.packing.shuffle import PACKS, shuffled
from packhouse.worker.plan_report import asked, length_histogram, report
from packhouse.worker.plan_write import write_parts

RANKS, MICRO_BATCHES = 8, 4
DISTRIBUTIONS = ("chats", "web", "short")
LONGEST = 262_144


def documents(name: str, count: int, pack_length: int) -> Int32:
    """Draw ``count`` samples and return their lengths, int32; chats end at ``pack_length``, web documents do not."""
    generator = np.random.default_rng(DISTRIBUTIONS.index(name))
    if name == "short":
        return generator.integers(64, 513, count).astype(np.int32)
    median, sigma, longest = (500, 1.2, pack_length) if name == "chats" else (700, 1.4, LONGEST)
    return np.clip(generator.lognormal(np.log(median), sigma, count), 1, longest).astype(np.int32)


def lengths_of(name: str, count: int, pack_length: int) -> Int32:
    """Return the same, those over ``pack_length`` in pieces."""
    sizes, pieces = split(documents(name, count, pack_length), pack_length)
    return sizes if pieces is None else np.random.default_rng(9).permutation(sizes)


def spec_of(pack_length: int, **fields: Any) -> PlanSpec:
    """Return the request for a plan of these steps."""
    steps = {"ranks": RANKS, "micro_batches": MICRO_BATCHES, "tail": "drop"}
    return PlanSpec(**{"datasets": ["drawn"], "pack_length": pack_length, **steps, **fields})


def judged(packing: Packing, lengths: Int32, spec: PlanSpec) -> PlanReport:
    """Return the report on packs in whole steps."""
    measures = Measures(spec, Samples(lengths, np.array([0, len(lengths)]), None, None))
    write_parts(None, "", packing, lengths, measures)
    counts = asked(lengths, draws(spec, lengths, [0, len(lengths)]), spec)
    return report(spec, counts, measures, {}, [], length_histogram(lengths))


def ours(lengths: Int32, spec: PlanSpec) -> tuple[float, Packing]:
    """Build a plan's packs; return the seconds and the packs."""
    start = time.perf_counter()
    packing = arrange(lengths, draws(spec, lengths, [0, len(lengths)]), spec)
    return time.perf_counter() - start, packing


def theirs(pack: Callable[..., peers.Packs], lengths: Int32, spec: PlanSpec) -> tuple[float, Packing]:
    """Run a peer on the shuffled samples and put its packs into random steps; return the seconds and the packs."""
    order = shuffled(len(lengths), 0, 0).astype(np.int64)
    given = lengths[order].tolist()
    start = time.perf_counter()
    packs = pack(given, spec.pack_length)
    seconds = time.perf_counter() - start
    offsets = np.cumsum([0, *map(len, packs)])
    packing = Packing(offsets, order[np.concatenate([np.array(pack, np.int64) for pack in packs])])
    return seconds, in_steps(packing.take(shuffled(len(packs), 0, PACKS).astype(np.int64)), lengths, spec)


PEERS: dict[str, Callable[..., peers.Packs]] = {
    "TRL bfd, all at once": peers.trl_bfd,
    "TRL bfd, 1000 rows (default)": partial(peers.trl_bfd, batch=1000),
    "LLaMA-Factory knapsack": peers.llama_factory,
    "axolotl multipack": peers.axolotl,
    "XTuner soft": peers.xtuner_soft,
    "Megatron-LM next fit": peers.next_fit,
}


def compare(name: str, pack_length: int, count: int) -> dict[str, Any]:
    """Return the figures of every way to pack one kind of lengths."""
    lengths = lengths_of(name, count, pack_length)
    plain, grouped = spec_of(pack_length), spec_of(pack_length, order="length_grouped")
    balanced = spec_of(pack_length, strategy="balanced")
    rows: dict[str, Any] = {}
    for title, spec in {"best_fit": plain, "best_fit, length_grouped": grouped, "balanced": balanced}.items():
        rows[f"packhouse {title}"] = row(*ours(lengths, spec), lengths, spec)
    for title, pack in PEERS.items():
        rows[title] = row(*theirs(pack, lengths, plain), lengths, plain)
        if title == "XTuner soft":
            seconds, packing = theirs(pack, lengths, grouped)
            rows["XTuner soft, length-grouped"] = row(seconds, packing, lengths, grouped)
    whole = documents(name, count, pack_length)
    lost = peers.nanochat_lost(whole.tolist(), pack_length)
    rows["nanochat, cropping"] = {"truncated": lost / int(whole.sum())}
    return rows


def row(seconds: float, packing: Packing, lengths: Int32, spec: PlanSpec) -> dict[str, Any]:
    """Return the figures of one way to pack; what the last step lacks is not counted as padding."""
    told = judged(packing, lengths, spec)
    return {
        "padding": 1 - told.fill,
        "truncated": told.truncated_tokens / told.tokens,
        "us_per_sample": seconds / len(lengths) * 1e6,
        "excess": told.excess,
        "micro_mean": told.micro_imbalance_mean,
        "micro_p99": told.micro_imbalance_p99,
        "randomness": told.randomness,
    }


def scale() -> dict[str, Any]:
    """Return what large plans take and reach: the goals that have numbers."""
    figures: dict[str, Any] = {}
    for pack_length in (4096, 32768):
        for name in ("chats", "web"):
            lengths = lengths_of(name, 1_000_000, pack_length)
            spec = spec_of(pack_length)
            figures[f"best_fit, {name} {pack_length}, 1 M"] = row(*ours(lengths, spec), lengths, spec)
    for ranks, micro, count in ((8, 4, 1_000_000), (64, 1, 1_000_000)):
        lengths = lengths_of("chats", count, 32768)
        spec = spec_of(32768, strategy="balanced", ranks=ranks, micro_batches=micro)
        figures[f"balanced, chats 32768, {ranks} × {micro}, 1 M"] = row(*ours(lengths, spec), lengths, spec)
    lengths = lengths_of("chats", 10_000_000, 32768)
    for strategy in ("best_fit", "balanced"):
        spec = spec_of(32768, strategy=strategy)
        figures[f"{strategy}, chats 32768, 10 M"] = row(*ours(lengths, spec), lengths, spec)
    return figures


def show(title: str, rows: dict[str, Any], console: Console) -> None:
    """Print figures as a table."""
    table = Table("packing", "padding", "truncated", "µs/sample", "waiting", "micro mean", "p99", "random", title=title)
    formats = {
        "padding": "{:.4%}",
        "truncated": "{:.2%}",
        "us_per_sample": "{:.3f}",
        "excess": "{:.3%}",
        "micro_mean": "{:.4f}",
        "micro_p99": "{:.4f}",
        "randomness": "{:.2f}",
    }
    for name, figures in rows.items():
        cells = (figures.get(key) for key in formats)
        table.add_row(name, *("" if x is None else f.format(x) for f, x in zip(formats.values(), cells, strict=True)))
    console.print(table)


def warm_up() -> None:
    """Compile what is measured."""
    lengths: npt.NDArray[np.int32] = np.arange(1, 400, dtype=np.int32)
    for fields in ({}, {"order": "length_grouped"}, {"strategy": "balanced"}):
        spec = spec_of(1024, **{"ranks": 2, "micro_batches": 2, **fields})
        judged(ours(lengths, spec)[1], lengths, spec)
    peers.axolotl([3, 4], 8)


def main() -> None:
    """Measure everything."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("build/bench"))
    parser.add_argument("--samples", type=int, default=50_000)
    options = parser.parse_args()
    warm_up()
    console = Console(width=140)
    results: dict[str, Any] = {"cores": len(os.sched_getaffinity(0)), "samples": options.samples}
    for pack_length in (4096, 32768):
        for name in DISTRIBUTIONS:
            title = f"{name}, packs of {pack_length}"
            try:
                results[title] = compare(name, pack_length, options.samples)
            except InvalidRequest as error:
                print(f"{title}: {error}", file=sys.stderr)
                continue
            show(f"{title}, {options.samples:,} samples, {RANKS} × {MICRO_BATCHES}", results[title], console)
    results["scale"] = scale()
    show("packhouse at scale", results["scale"], console)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "packing.json").write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()

"""The trainer, measured: packed against padded, attention by segments, and what each parallel mode costs.

All in one run on the CPU, in float32. The peer is a Llama of transformers with the same shape, fed as usual: batches
of samples padded to their longest. Real tokens count, padding does not. Run: ``python tests/benchmarks/trainer.py``.
"""

import argparse
import json
import math
import multiprocessing
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

from packhouse.trainer.attention import varlen_attention
from packhouse.trainer.model import InternLM2, ModelConfig
from packhouse.trainer.parallel import Options, ShardedModel, build, make_groups, plain
from packhouse.trainer.step import accumulate_gradients, count_step, sum_gradients

SHAPE = ModelConfig(256, 2, num_heads=8, num_kv_heads=4, ffn_size=512, vocab_size=2048)
PACK, ROWS, SAMPLES = 1024, 8, 32
MODES: list[tuple[str, Any]] = [
    ("data parallel", ("mtp", 1, None, True)),
    ("mtp", ("mtp", 0, None, True)),
    ("msp", ("msp", 0, None, True)),
    ("fsp", ("fsp", 0, None, True)),
    ("isp", ("isp", 0, None, True)),
    ("isp, no overlap", ("isp", 0, None, False)),
    ("isp, sequence 1", ("isp", 1, 0, True)),
]
"""Label, and mode, tp, wp, overlap; 0 stands for the whole world."""


def sample_lengths(count: int, seed: int = 0) -> list[int]:
    """Lengths as chats have them: log-normal, 8 to 1,024 tokens."""
    drawn = np.random.default_rng(seed).lognormal(4.8, 0.9, count)
    return [int(length) for length in np.clip(drawn, 8, 1024)]


def best_of(measure: Callable[[], Any], times: int = 2) -> float:
    """Seconds of the fastest of some calls, after one that is not counted."""
    measure()
    seconds = []
    for _ in range(times):
        started = time.perf_counter()
        measure()
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def in_turns(measured: dict[str, Callable[[], Any]], before: Callable[[], Any] | None = None) -> dict[str, float]:
    """Seconds of the fastest of four calls of each; in turns, as a machine is busier in one minute than in another."""
    best = dict.fromkeys(measured, math.inf)
    for _ in range(4):
        for name, call in measured.items():
            if before is not None:
                before()
            started = time.perf_counter()
            call()
            best[name] = min(best[name], time.perf_counter() - started)
    return best


def packs_of(lengths: list[int], pack: int = PACK) -> list[list[int]]:
    """First-fit decreasing: which lengths share a pack."""
    packs: list[list[int]] = []
    for length in sorted(lengths, reverse=True):
        place = next((one for one in packs if sum(one) + length <= pack), None)
        if place is None:
            packs.append([length])
        else:
            place.append(length)
    return packs


def step_of(packs: list[list[int]], pack: int = PACK) -> tuple[dict[str, Any], Tensor]:
    """A step in the `internevo` layout, of random ids."""
    ids = torch.randint(1, SHAPE.vocab_size, (len(packs), pack))
    borders = [np.cumsum([0, *one, *([pack - sum(one)] if sum(one) < pack else [])]) for one in packs]
    indexes = torch.stack(
        [torch.cat([torch.arange(stop - start) for start, stop in pairwise(edges.tolist())]) for edges in borders]
    )
    data = {"input_ids": ids, "indexes": indexes}
    return {**data, "cu_seqlens": [torch.from_numpy(edges.astype(np.int32)) for edges in borders]}, ids


def packed_against_padded() -> dict[str, float]:
    """Real tokens per second, forward and backward."""
    from transformers import LlamaConfig, LlamaForCausalLM

    lengths = sample_lengths(SAMPLES)
    ours, step = plain(InternLM2(SHAPE)), step_of(packs_of(lengths))
    shape: dict[str, Any] = {"num_hidden_layers": SHAPE.num_layers, "num_key_value_heads": SHAPE.num_kv_heads}
    shape |= {"hidden_size": SHAPE.hidden_size, "intermediate_size": SHAPE.ffn_size}
    theirs = LlamaForCausalLM(LlamaConfig(vocab_size=SHAPE.vocab_size, num_attention_heads=SHAPE.num_heads, **shape))

    def packed() -> None:
        accumulate_gradients(ours, step[0], step[1], [1] * len(step[1]))

    def padded() -> None:
        for start in range(0, len(lengths), ROWS):
            batch = lengths[start : start + ROWS]
            mask = (torch.arange(max(batch)) < torch.tensor(batch)[:, None]).long()
            ids = torch.randint(1, SHAPE.vocab_size, mask.shape)
            theirs(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss.backward()

    seconds = in_turns({"packed": packed, "padded": padded})
    slots = sum(max(lengths[start : start + ROWS]) * ROWS for start in range(0, len(lengths), ROWS))
    return {
        **{name: sum(lengths) / value for name, value in seconds.items()},
        "times": seconds["padded"] / seconds["packed"],
        "padding_packed": 1 - sum(lengths) / step[1].numel(),
        "padding_padded": 1 - sum(lengths) / slots,
    }


def attention_by_segments(tokens: int = 4096) -> list[dict[str, float]]:
    """Seconds of attention, forward and backward, over one pack cut into segments of equal length."""
    rows = []
    q, k, v = (torch.randn(1, tokens, heads, 32, requires_grad=True) for heads in (8, 4, 4))
    for length in (32, 256, tokens):
        borders = torch.arange(0, tokens + 1, length, dtype=torch.int32)

        def attend(borders: Tensor = borders, length: int = length) -> None:
            torch.autograd.backward(varlen_attention(q, k, v, borders, length).sum())

        pairs = tokens * (length + 1) / 2
        rows.append({"segment": length, "seconds": best_of(attend), "pairs": pairs})
    segment = torch.arange(tokens) // 32
    mask = (segment[:, None] == segment[None, :]).tril()

    def masked() -> None:
        heads = [x.transpose(1, 2) for x in (q, k, v)]
        out = F.scaled_dot_product_attention(heads[0], heads[1], heads[2], attn_mask=mask, enable_gqa=True)
        torch.autograd.backward(out.sum())

    return [*rows, {"segment": -32, "seconds": best_of(masked), "pairs": tokens * 33 / 2}]


def one_step(model: ShardedModel, step: tuple[dict[str, Any], Tensor]) -> None:
    """All of a step but the optimizer."""
    counts = count_step(step[1], model, "token")
    accumulate_gradients(model, step[0], step[1], counts.divisors)
    sum_gradients(model)


def mode_speed(rank: int, world: int, files: str, results: Any) -> None:
    """Tokens per second of each mode in this world, all with the same tokens in a step."""
    torch.set_num_threads(1)
    from torch._C._distributed_c10d import FileStore

    dist.init_process_group("gloo", store=FileStore(files, world), rank=rank, world_size=world)
    packs = packs_of(sample_lengths(SAMPLES))
    packs = packs[: len(packs) // world * world]
    steps: dict[str, Callable[[], Any]] = {}
    for label, (mode, tp, wp, overlap) in MODES:
        groups = make_groups(tp or world, world if wp == 0 else wp)
        model = build(SHAPE, groups, mode, Options(overlap=overlap))
        steps[label] = partial(one_step, model, step_of(packs[groups.data.rank :: groups.data.size]))
    best = in_turns(steps, dist.barrier)
    speeds = {label: len(packs) * PACK / seconds for label, seconds in best.items()}
    dist.destroy_process_group()
    if rank == 0:
        results.put(speeds)


def in_world(world: int) -> dict[str, float]:
    """Run `mode_speed` in so many processes."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (world, f"{folder}/store", results)
        processes = [context.Process(target=mode_speed, args=(rank, *arguments)) for rank in range(world)]
        for process in processes:
            process.start()
        speeds: dict[str, float] = results.get(timeout=600)
        for process in processes:
            process.join()
    return speeds


def show(figures: dict[str, Any]) -> None:
    """Print the figures as tables."""
    console, one = Console(), figures["packed_against_padded"]
    table = Table("what", "real tokens/s", "padding", title="One process, forward and backward")
    table.add_row("packed (ours)", f"{one['packed']:,.0f}", f"{one['padding_packed']:.1%}")
    table.add_row("padded (Llama of transformers)", f"{one['padded']:,.0f}", f"{one['padding_padded']:.1%}")
    console.print(table)
    console.print(f"packed is {one['times']:.2f} × padded")
    table = Table("segment", "ms", "ns per pair", title="Attention over a pack of 4,096 tokens")
    for row in figures["attention"]:
        nanoseconds = row["seconds"] / row["pairs"] * 1e9
        name = f"{row['segment']:.0f}" if row["segment"] > 0 else "32, by a mask of pack × pack (the usual way)"
        table.add_row(name, f"{row['seconds'] * 1e3:.0f}", f"{nanoseconds:.1f}")
    console.print(table)
    worlds = figures["modes"]
    table = Table("mode", *(f"{world} processes, tokens/s" for world in worlds), title="Modes, same tokens in a step")
    for label, _ in MODES:
        base = {world: speeds["data parallel"] for world, speeds in worlds.items()}
        cells = [f"{speeds[label]:,.0f} ({speeds[label] / base[world]:.2f})" for world, speeds in worlds.items()]
        table.add_row(label, *cells)
    console.print(table)


def main() -> None:
    """Measure everything; the JSON lies beside the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("build/bench"))
    parser.add_argument("--worlds", type=int, nargs="*", default=[2])
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)  # one thread a process, alone as in a world: the figures are comparable
    figures = {
        "packed_against_padded": packed_against_padded(),
        "attention": attention_by_segments(),
        "modes": {str(world): in_world(world) for world in options.worlds},
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "trainer.json").write_text(json.dumps(figures, indent=2) + "\n")
    show(figures)


if __name__ == "__main__":
    main()

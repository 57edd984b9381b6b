"""One GPU, measured in under five minutes: is the fused attention right, and what MFU and memory has the 1.8B shape.

Run it with ``python -m packhouse.trainer.gpu_check``. It trains on packs of random ids in bfloat16 on float32 weights,
with segments of several lengths, with and without recomputed layers, and prints a table and JSON.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from packhouse.trainer.attention import varlen_attention
from packhouse.trainer.flops import peak_flops, step_flops
from packhouse.trainer.model import CONFIGS, InternLM2
from packhouse.trainer.optim import TrainConfig, make_optimizer
from packhouse.trainer.parallel import Options, ShardedModel, make_groups, parallelize
from packhouse.trainer.train import run_step

PACK = 16384
CASES = [(16384, 24), (4096, 24), (1024, 24), (256, 24), (4096, 12), (1024, 0)]
"""Tokens of a segment, layers that are recomputed."""
WARM, TIMED = 2, 4


def check_attention(device: torch.device) -> dict[str, float]:
    """The largest errors of the fused kernel, forward and backward, against float32 attention segment by segment."""
    torch.manual_seed(0)
    borders = torch.tensor([0, 1, 130, 700, 701, 1024], dtype=torch.int32, device=device)
    wide = [torch.randn(1, 1024, heads, 128, device=device) for heads in (16, 8, 8)]
    outs = []
    for dtype in (torch.bfloat16, torch.float32):
        q, k, v = (x.bfloat16().to(dtype).requires_grad_() for x in wide)
        out = varlen_attention(q, k, v, borders, 569)
        torch.autograd.backward(out.float().square().sum())
        outs.append([out.detach().float(), *(x.grad.float() for x in (q, k, v) if x.grad is not None)])
    errors = [float((a - b).abs().max() / b.abs().max()) for a, b in zip(*outs, strict=True)]
    return dict(zip(("out", "d_q", "d_k", "d_v"), errors, strict=True))


def make_step(segment: int, vocab_size: int, pack: int) -> tuple[dict[str, Any], Tensor]:
    """One pack of equal segments of random ids, as a step of one micro-batch."""
    edges = [*range(0, pack, segment), pack]
    indexes = torch.cat([torch.arange(stop - start) for start, stop in pairwise(edges)])[None]
    ids = torch.randint(vocab_size, (1, pack))
    data = {"input_ids": ids, "indexes": indexes, "cu_seqlens": [torch.tensor(edges, dtype=torch.int32)]}
    return data, ids.roll(-1, dims=1)


@torch.no_grad()
def make_model(name: str, recomputed: int, device: torch.device) -> ShardedModel:
    """A model with weights drawn on the GPU: the usual ones are drawn on the CPU, which takes longer than a case."""
    with torch.device("meta"):
        whole = InternLM2(CONFIGS[name])
    model = parallelize(whole, make_groups(), "mtp", Options(recompute_layers=recomputed))
    model.model.to_empty(device=device)
    for parameter in model.model.parameters():
        if parameter.ndim == 1:
            parameter.fill_(1.0)
        else:
            parameter.normal_(std=0.02)
    return model


def measure(model: ShardedModel, segment: int, pack: int, device: torch.device) -> dict[str, float]:
    """Seconds, tokens per second, MFU and peak memory of an optimizer step."""
    config = TrainConfig(steps=WARM + TIMED, peak_lr=1e-5, bf16=True)
    optimizer = make_optimizer(model, config)
    data, labels = make_step(segment, model.model.config.vocab_size, pack)
    started = 0.0
    torch.cuda.reset_peak_memory_stats(device)
    for step in range(WARM + TIMED):
        if step == WARM:
            torch.cuda.synchronize(device)
            started = time.perf_counter()
        loss, norm, _, skipped = run_step(model, optimizer, config, data, labels, step)
        if skipped:
            raise RuntimeError(f"step {step} with segments of {segment} was skipped: {skipped}")
    torch.cuda.synchronize(device)
    seconds = (time.perf_counter() - started) / TIMED
    flops = step_flops(model.model.config, data["cu_seqlens"])
    peak = peak_flops(device)
    return {
        "seconds": seconds,
        "tokens_per_s": pack / seconds,
        "tflops": flops / seconds / 1e12,
        "mfu": flops / seconds / peak if peak else 0.0,
        "peak_gib": torch.cuda.max_memory_allocated(device) / 2**30,
        "loss": loss,
        "grad_norm": norm,
    }


def check_logits(device: torch.device) -> float:
    """The largest difference between bfloat16 logits of a packed batch and float32 ones on the CPU, two layers."""
    config = replace(CONFIGS["1.8b"], num_layers=2, vocab_size=1024)
    data, _ = make_step(100, 1024, 512)
    borders, indexes = data["cu_seqlens"][0], data["indexes"][0]
    expected = InternLM2(config)(data["input_ids"], borders, indexes, 100)
    model = InternLM2(config).to(device).bfloat16()
    narrow = model(data["input_ids"].to(device), borders.to(device), indexes.to(device), 100)
    return float((narrow.float().cpu() - expected).abs().max())


def main(arguments: Sequence[str] | None = None) -> None:
    """Check, measure, print; exits with 1 where there is no GPU or attention is wrong."""
    parser = argparse.ArgumentParser(prog="packhouse.trainer.gpu_check", description=__doc__)
    parser.add_argument("--model", choices=sorted(CONFIGS), default="1.8b")
    parser.add_argument("--pack", type=int, default=PACK)
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        sys.exit("there is no GPU: run this where torch.cuda.is_available() is true")
    device = torch.device("cuda", 0)
    figures: dict[str, Any] = {"device": torch.cuda.get_device_name(device), "torch": torch.__version__}
    figures["attention_error"] = check_attention(device)
    with torch.no_grad():
        figures["logits_error"] = check_logits(device)
    print(json.dumps(figures), flush=True)
    figures["cases"] = []
    for segment, recomputed in CASES:
        model = make_model(options.model, recomputed, device)
        found = {"segment": segment, "recomputed": recomputed, **measure(model, segment, options.pack, device)}
        del model
        torch.cuda.empty_cache()
        print(json.dumps(found), flush=True)
        figures["cases"].append(found)
    print(json.dumps(figures))
    if max(figures["attention_error"].values()) > 0.02:
        sys.exit("the fused attention differs from the reference by more than bfloat16 explains")


if __name__ == "__main__":
    main()

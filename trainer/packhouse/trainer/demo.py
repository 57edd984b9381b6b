"""The demo: the main job end to end, on text that every machine has. Started by ``packhouse demo``."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import mkdtemp
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from torch.utils.data import DataLoader

from packhouse.client import console
from packhouse.client.api import Client
from packhouse.client.dataset import PackedDataset
from packhouse.client.errors import PackhouseError, Unavailable
from packhouse.client.store import LocalStore
from packhouse.client.wire import Job, JobSpec
from packhouse.client.wire_plans import Plan, PlanSpec
from packhouse.trainer.demo_data import sample_texts, train_tokenizer, write_corpus
from packhouse.trainer.model import CONFIGS, InternLM2
from packhouse.trainer.optim import TrainConfig
from packhouse.trainer.train import StepLog, train

STEPS = 90
PACK_LENGTH = 1024
MICRO_BATCHES = 4
FALLEN = 0.8
"""The loss has clearly fallen when the last steps' mean is below this share of the first steps'."""


def demo(
    home: Annotated[Path | None, typer.Option(help="Empty folder to work in and to keep; default a new one.")] = None,
) -> None:
    """Run the main job end to end; the last line of the output is a JSON object. Exits with 1 if any part failed."""
    out = console.out()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the service is stopped, too
    folder = (home or Path(mkdtemp(prefix="packhouse-demo-"))).absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise PackhouseError(f"the folder {folder} is not empty", "name another with --home")
        figures, faults = _run(out, folder)
    except (PackhouseError, OSError) as error:
        out.print(f"The demo failed: {error}", style="red")
        raise typer.Exit(1) from None
    _summarize(out, folder, figures, faults)
    print(json.dumps(figures), flush=True)
    if faults:
        raise typer.Exit(1)


def _run(out: Console, folder: Path) -> tuple[dict[str, Any], list[str]]:
    started = time.perf_counter()

    def say(text: str) -> None:
        out.print(f"\n[{time.perf_counter() - started:5.1f} s] {text}", style="bold")

    say("Writing a corpus: the standard library's sources, and chats made of its docstrings")
    texts, chats = write_corpus(folder)
    out.print(f"{texts.stat().st_size / 1e6:.1f} MB of text, {chats.stat().st_size / 1e6:.1f} MB of chats in {folder}")
    say("Training a tokenizer on it: byte-level BPE with a chat template")
    tokenizer = folder / "tokenizer"
    train_tokenizer(sample_texts(texts, chats), tokenizer)
    say("Starting the service: a local Ray, SQLite and a folder")
    with _service(folder / "home") as url, Client(url) as client:
        out.print(f"packhouse serves {url}")
        specs = [
            JobSpec(sources=[str(texts)], tokenizer=str(tokenizer), name="sources"),
            JobSpec(sources=[str(chats)], tokenizer=str(tokenizer), kind="chat", name="docstring chats"),
        ]
        say("Caching both: records are rendered, encoded, and kept as shards")
        first = [_cache(out, client, spec) for spec in specs]
        say("Caching both again: nothing has changed, so nothing is read")
        second = [_cache(out, client, spec) for spec in specs]
        say("Planning: which samples share a pack, and what each step holds")
        plan = _plan(client, first)
        out.print(console.plan_report(plan))
        say(f"Training a small InternLM2 for {STEPS} steps on batches streamed by that plan")
        logs = _train(out, client, plan, LocalStore(folder / "home" / "store"))
        say("Stopping the service")
    return _figures(first, second, plan, logs)


@contextmanager
def _service(home: Path) -> Iterator[str]:
    """Run ``packhouse serve`` as its own process; yield its address. Its log goes to a file in ``home``."""
    home.mkdir()
    log = home / "serve.log"
    command = [sys.executable, "-m", "packhouse.client", "serve", "--port", "0", "--home", str(home)]
    with open(log, "w", encoding="utf-8") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
    try:
        assert process.stdout is not None
        line = next((line for line in process.stdout if "http://" in line), None)
        if line is None:
            raise Unavailable(f"the service did not start (exit code {process.wait()})", f"see {log}")
        yield next(word for word in line.split() if word.startswith("http://"))
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _cache(out: Console, client: Client, spec: JobSpec) -> Job:
    with console.progress_bar(out) as show:
        job = client.wait(client.submit(spec).id, show)
    progress = job.progress
    out.print(
        f"{spec.name}: {progress.rows:,} rows, {progress.tokens:,} tokens, {progress.hits} of {progress.blocks} blocks "
        f"hit, {progress.bytes_read / 1e6:.1f} MB read, {progress.seconds:.2f} s; dataset {job.dataset}"
    )
    return job


def _plan(client: Client, jobs: list[Job]) -> Plan:
    datasets = [job.dataset for job in jobs if job.dataset]
    return client.plan(PlanSpec(datasets=datasets, pack_length=PACK_LENGTH, micro_batches=MICRO_BATCHES))


def _train(out: Console, client: Client, plan: Plan, store: LocalStore) -> list[StepLog]:
    """Train on the plan's first steps, as a trainer with the store mounted would."""
    torch.manual_seed(0)
    # So small a model gains nothing from more threads, and on busy cores they wait for each other at every operation:
    # two were seen to take up to 50 times as long as one.
    torch.set_num_threads(1)
    source = client.open_plan(plan.id, store)
    vocabulary = client.dataset(plan.spec.datasets[0]).vocab_size
    model = InternLM2(replace(CONFIGS["tiny"], vocab_size=vocabulary))
    loader = DataLoader(PackedDataset(source, store), batch_size=None)
    config = TrainConfig(steps=min(STEPS, plan.report.steps), peak_lr=1e-2, warmup_steps=10)

    def log(entry: StepLog) -> None:
        if entry.step % 10 == 0 or entry.step == config.steps - 1:
            out.print(
                f"plan step {entry.step:>3}   loss {entry.loss:6.3f}   {entry.tokens_per_s:8,.0f} tokens/s   "
                f"gradient norm {entry.grad_norm:.2f}"
            )

    return train(model, loader, config, log=log)


def _figures(first: list[Job], second: list[Job], plan: Plan, logs: list[StepLog]) -> tuple[dict[str, Any], list[str]]:
    """Return what the demo prints last, and what did not hold."""
    done, again = [job.progress for job in first], [job.progress for job in second]
    blocks = sum(progress.blocks for progress in again)
    few = max(1, len(logs) // 10)
    figures: dict[str, Any] = {
        "rows": sum(progress.rows for progress in done),
        "tokens": sum(progress.tokens for progress in done),
        "mb_per_s": round(done[0].mb_per_s, 2),
        "second_run_hit_rate": sum(progress.hits for progress in again) / blocks if blocks else 0.0,
        "plan": {"id": plan.id, "packs": plan.report.packs, "padding": plan.report.padding},
        "loss_first": round(sum(entry.loss for entry in logs[:few]) / few, 4),
        "loss_last": round(sum(entry.loss for entry in logs[-few:]) / few, 4),
    }
    checks = {
        "the second run read data": all(progress.bytes_read == 0 for progress in again),
        "the second run had misses": figures["second_run_hit_rate"] == 1.0,
        "the second run gave other datasets": [job.dataset for job in first] == [job.dataset for job in second],
        "the loss did not fall clearly": figures["loss_last"] < FALLEN * figures["loss_first"],
        "a training step was skipped": not any(entry.skipped for entry in logs),
    }
    return figures, [fault for fault, held in checks.items() if not held]


def _summarize(out: Console, folder: Path, figures: dict[str, Any], faults: list[str]) -> None:
    out.print("\nWhat happened", style="bold")
    out.print(
        f"- {figures['rows']:,} records became {figures['tokens']:,} tokens, once; the text at "
        f"{figures['mb_per_s']:.0f} MB/s, loading and proving the tokenizer included.\n"
        f"- Asked again, {figures['second_run_hit_rate']:.0%} of the blocks were found by their content.\n"
        f"- A plan put them into {figures['plan']['packs']:,} packs with {figures['plan']['padding']:.4%} padding.\n"
        f"- A small model trained on them: its loss went from {figures['loss_first']:.2f} to "
        f"{figures['loss_last']:.2f}.\n"
        f"- Everything is in {folder}; 'packhouse serve --home {folder / 'home'}' serves it again."
    )
    for fault in faults:
        out.print(f"- NOT as it should be: {fault}", style="red")

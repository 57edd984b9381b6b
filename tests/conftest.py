"""What the tests share: a store in memory, datasets with given ids, a tokenizer, and Ray, started once."""

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import settings
from tests.postgres import database_url, postgres  # noqa: F401 - fixtures
from tests.s3_server import S3Server
from tests.s3_server import s3_server as _s3_server

from packhouse.client.api import Client
from packhouse.client.digest import digest_bytes, digest_json
from packhouse.client.errors import NotFound
from packhouse.client.format import (
    META_SCHEMA,
    FileInfo,
    Manifest,
    Receipt,
    data_path,
    manifest_path,
    meta_path,
    shard_schema,
)
from packhouse.client.store import Store, store_at
from packhouse.client.wire import Job, JobSpec
from packhouse.service.app import create_app
from packhouse.service.catalog import Catalog
from packhouse.service.inventory import Inventory
from packhouse.service.jobs import Jobs
from packhouse.service.metrics import Metrics
from packhouse.service.observed import ObservedWork
from packhouse.service.parts import Parts
from packhouse.service.server import answering, listening
from packhouse.service.settings import Settings
from packhouse.service.space import Space
from packhouse.service.work import CacheWork
from packhouse.worker.executor import Executor
from packhouse.worker.sources import Fingerprint

# A first call may compile a kernel, and the machine may be busy.
settings.register_profile("packhouse", deadline=None)
settings.load_profile("packhouse")

Samples = Sequence[Sequence[int]]


class MemoryStore:
    """A store in a dictionary."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}

    def open(self, key: str) -> pa.Buffer:
        if key not in self.files:
            raise NotFound(f"the store has no {key}")
        return pa.py_buffer(self.files[key])

    def write(self, key: str, data: Any) -> None:
        self.files[key] = bytes(data)

    def size(self, key: str) -> int | None:
        return len(self.files[key]) if key in self.files else None

    location = "memory"

    def check(self) -> None:
        """It can always be written."""

    def sweep(self) -> int:
        return 0

    def sizes(self, keys: Sequence[str]) -> list[int | None]:
        return [self.size(key) for key in keys]

    def pieces(self, key: str) -> Iterator[bytes]:
        yield bytes(self.open(key))

    def delete(self, key: str) -> None:
        self.files.pop(key, None)

    def move(self, key: str, to: str) -> None:
        if key in self.files:
            self.files[to] = self.files.pop(key)

    def list(self, prefix: str) -> Iterator[str]:
        yield from sorted(key for key in self.files if key.startswith(f"{prefix}/"))


@pytest.fixture(scope="session")
def memory_store() -> type[MemoryStore]:
    return MemoryStore


def _dataset(
    store: Store,
    samples: Samples,
    masks: Samples | None = None,
    *,
    rows_per_shard: int = 3,
    vocab_size: int = 1000,
    tokenizer: str = "t" * 32,
) -> str:
    """Write the samples as shards of ``rows_per_shard`` rows and a manifest; return the dataset's id."""
    recipe = {"tokenizer": tokenizer, "vocab_size": vocab_size}
    receipts = []
    for begin in range(0, len(samples), rows_per_shard):
        part = slice(begin, begin + rows_per_shard)
        mask = None if masks is None else masks[part]
        receipts.append(_shard(store, samples[part], mask, vocab_size, digest_json([recipe, begin])))
    manifest = Manifest(recipe, vocab_size, tuple(receipts))
    store.write(manifest_path(manifest.id), manifest.dump())
    return manifest.id


def _shard(store: Store, samples: Samples, masks: Samples | None, vocab_size: int, salt: str) -> Receipt:
    key = digest_json([salt, [list(sample) for sample in samples], masks and [list(mask) for mask in masks]])
    lengths = np.array([len(sample) for sample in samples], np.int64)
    trained = lengths if masks is None else np.array([sum(mask) for mask in masks])
    labels = np.maximum(lengths - 1, 0) if masks is None else np.array([sum(mask[1:]) for mask in masks])
    columns = [lengths.astype(np.int32), lengths * (lengths + 1) // 2, trained.astype(np.int32)]
    columns += [labels.astype(np.int32), np.arange(len(samples), dtype=np.int32)]
    meta = [pa.array(column) for column in columns]
    schema = shard_schema(vocab_size, masked=masks is not None)
    lists = [pa.array(samples, schema.field("input_ids").type)]
    if masks is not None:
        lists.append(pa.array([[bool(bit) for bit in mask] for mask in masks], schema.field("loss_mask").type))
    return Receipt(
        key=key,
        rows=len(samples),
        tokens=int(lengths.sum()),
        trained_tokens=int(trained.sum()),
        attention_cost=int(columns[1].sum()),
        records=len(samples),
        data=_write(store, data_path(key), pa.RecordBatch.from_arrays([*lists, *meta], schema=schema)),
        meta=_write(store, meta_path(key), pa.RecordBatch.from_arrays(meta, schema=META_SCHEMA)),
    )


def _write(store: Store, key: str, batch: pa.RecordBatch) -> FileInfo:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch)
    data = sink.getvalue()
    store.write(key, data)
    return FileInfo(data.size, digest_bytes(data))


@pytest.fixture(scope="session")
def write_dataset() -> Callable[..., str]:
    """Return a function (store, samples, masks=None, ...) -> dataset id."""
    return _dataset


@pytest.fixture(scope="session")
def executor() -> Iterator[Executor]:
    """A local Ray with two CPUs, shared by all tests of the session."""
    started = Executor(num_cpus=2)
    started.start()
    yield started
    started.shutdown()


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    """A real S3 server in a process of its own, on a free port of loopback, with empty buckets of any name."""
    with _s3_server() as server:
        yield server


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE with 600 entries, ChatML marks and a chat template, trained on this project's own sources."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    specials = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=specials, initial_alphabet=alphabet, show_progress=False
    )
    texts = [path.read_text() for path in sorted(Path(__file__).parent.rglob("*.py"))]
    tokenizer.train_from_iterator(texts, trainer)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="</s>")
    wrapped.chat_template = CHATML
    folder = tmp_path_factory.mktemp("tokenizer")
    wrapped.save_pretrained(folder)
    return folder


CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@dataclass(frozen=True, slots=True)
class RunningService:
    """A service that answers on loopback, in this process."""

    url: str
    parts: Parts

    @property
    def jobs(self) -> Jobs:
        return self.parts.jobs


@contextmanager
def _running(home: Path, executor: Executor, **changes: Any) -> Iterator[RunningService]:
    options = {"home": home, "store": str(home / "store"), "database_url": f"sqlite:///{home}/packhouse.db"}
    settings = Settings(**{**options, **changes})
    with listening("127.0.0.1", 0) as listener, closing(Catalog(settings.database_url)) as catalog:
        store = store_at(settings.store)
        metrics = Metrics()
        inventory = Inventory(catalog.engine, lease=settings.lease)
        doing = CacheWork(store, catalog, executor, metrics.encoded, settings.tokenize_modules, inventory=inventory)
        at_once, quota = settings.jobs_at_once, settings.jobs_per_token
        jobs = Jobs(catalog, ObservedWork(doing, metrics), at_once=at_once, lease=settings.lease, quota=quota)
        space = Space(inventory, store, jobs.signs, budget=settings.store_budget, keep=settings.keep, tick=0.2)
        parts = Parts(settings, store, catalog, jobs, executor, space, metrics)
        with answering(create_app(parts), listener, jobs, threading.Event()):
            jobs.start()
            space.start()
            yield RunningService(f"http://127.0.0.1:{listener.getsockname()[1]}", parts)
            space.stop()
            assert jobs.stop(30)


@pytest.fixture(scope="session")
def start_service(executor: Executor) -> Callable[..., AbstractContextManager[RunningService]]:
    """A function (home, **settings) -> context with a running service: the real application, job table and workers."""
    return partial(_running, executor=executor)


@pytest.fixture(scope="session")
def service(executor: Executor, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    """A running service that the tests of a session share."""
    with _running(tmp_path_factory.mktemp("home"), executor, heartbeat=0.3) as running:
        yield running


def settled(file: Path) -> Path:
    """Return the file when it is so old that its blocks will be remembered: those of a fresh one are not."""
    while not Fingerprint.of(str(file)).settled():
        time.sleep(0.02)
    return file


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A JSON lines file with 300 texts, and one line that is not JSON (line 201, after a blank one)."""
    file = tmp_path_factory.mktemp("texts") / "texts.jsonl"
    lines = [
        json.dumps({"text": f"text {number}: " + "words and more words, " * (number % 40)}) for number in range(300)
    ]
    file.write_text("\n".join([*lines[:199], "", '{"text": not json', *lines[199:]]))
    return settled(file)


@pytest.fixture(scope="session")
def cached(service: RunningService, texts: Path, tokenizer_dir: Path) -> Job:
    """A finished job of the shared service over ``texts``."""
    with Client(service.url) as client:
        return client.wait(client.submit(JobSpec(sources=[str(texts)], tokenizer=str(tokenizer_dir))).id)

"""Tokenize functions and pictures from a request to the trainer's batches: real service, workers, plan and pixels."""

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tests.pictures import END, PAD, SETTINGS, SIZES, START, TOKENS, asked, seeing, write_pictures
from tests.worker.conftest import tiny_files, write_tokenizer

from packhouse.client import (
    Client,
    InvalidRequest,
    Job,
    JobSpec,
    LocalStore,
    Mismatch,
    Options,
    PackedDataset,
    PlanSpec,
)
from packhouse.client.bundle import bundle, unbundle
from packhouse.client.cli import main
from packhouse.client.errors import Damaged, NotFound, PackhouseError
from packhouse.client.format import read_manifest
from packhouse.client.picture_files import read_picture
from packhouse.client.picture_runtime import Pictures
from packhouse.client.plan import PlanFile
from packhouse.client.processor import make_processor
from packhouse.service.settings import Settings

__all__ = ["seeing", "tiny_files", "write_tokenizer"]

FUNCTIONS = "tests.worker.functions"
QWEN = {"image_processor_type": "Qwen2VLImageProcessor", "size": {"shortest_edge": 3136, "longest_edge": 50176}}


@pytest.fixture(scope="module")
def running(
    start_service: Callable[..., AbstractContextManager[Any]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    with start_service(tmp_path_factory.mktemp("home"), tokenize_modules=(FUNCTIONS,)) as service:
        yield service


@pytest.fixture
def run(running: Any) -> Callable[..., Job]:
    """Return a function (**fields of a job) -> the ended job."""

    def make(*sources: Path, **fields: Any) -> Job:
        with Client(running.url) as client:
            return client.wait(client.submit(JobSpec(sources=[str(one) for one in sources], **fields)).id)

    return make


@pytest.fixture
def packed(running: Any) -> Callable[..., Any]:
    """Return a function (job, layout, runtime or its roots, **fields of a plan) -> the data set of its one rank."""

    def make(job: Job, layout: Any = "internevo", runtime: Any = None, collate_fn: Any = None, **fields: Any) -> Any:
        store = LocalStore(running.parts.settings.store)
        spec = {"datasets": [job.dataset], "pack_length": 96, "ranks": 2, "micro_batches": 2, **fields}
        with Client(running.url) as client:
            plan = client.plan(PlanSpec(**spec))
        if isinstance(runtime, list):
            runtime = Pictures.of(store, [str(job.dataset)], runtime)
        options = Options(runtime=runtime, collate_fn=collate_fn)
        return PackedDataset(PlanFile.open(store, plan.id), store, layout=layout, options=options)

    return make


def test_a_function_of_a_listed_module_makes_a_dataset(
    run: Callable[..., Job], packed: Callable[..., Any], running: Any, tmp_path: Path, tokenizer_dir: Path
) -> None:
    source = tmp_path / "texts.jsonl"
    lines = [{"text": f"text number {number}", "marks": [number, 0.5]} for number in range(200)]
    source.write_text("".join(json.dumps(line) + "\n" for line in [*lines, {"text": "bad"}]))
    fields: dict[str, Any] = {"tokenizer": str(tokenizer_dir), "tokenize": f"{FUNCTIONS}:Words"}
    job = run(source, **fields)
    assert (job.progress.rows, job.progress.rejected, job.progress.engines) == (200, {"not_wanted": 1}, {"function": 1})
    assert run(source, **fields, tokenize_options={"untrained": 2}).progress.misses == {"tokenize": 1}
    assert run(source, **fields).progress.hits == 1
    manifest = read_manifest(LocalStore(running.parts.settings.store), str(job.dataset))
    assert manifest.recipe["tokenize"] == {
        "name": f"{FUNCTIONS}:Words",
        "options": {},
        "hash": "words-1",
        "extra": {"length": "int64", "marks": "list<float32>"},
        "files": False,
    }
    marks = []
    for data, labels in packed(job, pack_length=64):
        for row, segments in enumerate(data["extra"]):
            for (begin, end), extra in zip(pairwise(data["cu_seqlens"][row].tolist()), segments, strict=False):
                assert extra["length"] == len(f"text number {int(extra['marks'][0])}")
                assert (labels[row, begin:end] >= 0).sum() == end - begin - 1
                marks.append(int(extra["marks"][0]))
    assert sorted(marks) == list(range(200)) != marks


def test_a_preview_shows_what_a_function_makes(running: Any, tmp_path: Path, tokenizer_dir: Path) -> None:
    source = tmp_path / "texts.jsonl"
    source.write_text('{"text": "one two"}\n{"text": "bad"}\n')
    spec = JobSpec(sources=[str(source)], tokenizer=str(tokenizer_dir), tokenize=f"{FUNCTIONS}:Words")
    with Client(running.url) as client:
        shown = client.preview(spec, records=5)
        assert "".join(piece.text for piece in shown.samples[0].pieces) == "one two"
        assert shown.samples[0].trained == [False] + [True] * (len(shown.samples[0].ids) - 1)
        assert [(one.line, one.reason) for one in shown.rejected] == [(2, "not_wanted")]
        assert client.preview(spec, records=5).seconds < 1
        for module in ("os", f"{FUNCTIONS}.more", "tests"):
            other = spec.model_copy(update={"tokenize": f"{module}:Words"})
            with pytest.raises(InvalidRequest, match="PACKHOUSE_TOKENIZE_MODULES"):
                client.submit(other)
            with pytest.raises(InvalidRequest, match="PACKHOUSE_TOKENIZE_MODULES"):
                client.preview(other)
        with pytest.raises(InvalidRequest, match=r"file root .* is not a folder"):
            client.submit(spec.model_copy(update={"file_roots": {"": str(source)}}))


@pytest.fixture(scope="module")
def album(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with pictures and 60 records about them; which ones follows from the number that a record holds."""
    folder = write_pictures(tmp_path_factory.mktemp("album"))
    records = [asked(*shown(number), text=f"q{number};") for number in range(60)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def shown(number: int) -> list[str]:
    names = list(SIZES)
    return [names[(number // 3**place) % 3] for place in range(number % 4)]


def number_of(ids: list[int]) -> int:
    """Return the number of the record that some ids of the tiny tokenizer were made of."""
    text = "".join(chr(token - 5 + 33) if 5 <= token < 99 else " " for token in ids)
    return int(text.partition("q")[2].partition(";")[0])


@pytest.fixture
def vision(run: Callable[..., Job], album: Path, seeing: Path) -> Callable[..., Job]:
    def make(source: str = "rows.jsonl", **fields: Any) -> Job:
        given = {"tokenize_options": {"processor": SETTINGS}, **fields}
        return run(album / source, tokenizer=str(seeing), tokenize="vision", **given)

    return make


def test_pixels_come_with_the_tokens_of_their_own_sample(
    vision: Callable[..., Job], packed: Callable[..., Any], album: Path
) -> None:
    processor = make_processor(SETTINGS)
    patches = {name: processor.patches(read_picture(album / name)) for name in SIZES}
    numbers = []
    for batch in packed(vision(), runtime=[album]):
        data, labels = unbundle(bundle(batch))
        for row, segments in enumerate(data["extra"]):
            borders = pairwise(data["cu_seqlens"][row].tolist())
            for (begin, end), extra in zip(borders, segments, strict=False):
                ids = data["input_ids"][row, begin:end].tolist()
                number = number_of(ids)
                numbers.append(number)
                names = shown(number)
                assert extra["pictures"] == names
                places = extra["image_places"].tolist() if names else []
                assert ("pixel_values" in extra) == bool(names)
                for name, place in zip(names, places, strict=True):
                    stop = place + TOKENS[name]
                    assert ids[place - 1 : stop + 1] == [START, *[PAD] * TOKENS[name], END]
                    assert (labels[row, begin + place - 2 : begin + stop] == -100).all()
                assert ids.count(PAD) == sum(TOKENS[name] for name in names)
                if names:
                    assert np.array_equal(extra["pixel_values"], np.concatenate([patches[name] for name in names]))
                    assert extra["image_grid_thw"].prod(1).tolist() == [4 * TOKENS[name] for name in names]
    assert sorted(numbers) == list(range(60)) != numbers


def test_a_collator_is_given_the_pixels(vision: Callable[..., Job], packed: Callable[..., Any], album: Path) -> None:
    def collate(instances: Any, pack_max_length: int, padding_token_idx: int) -> list[Any]:
        return [item for row in instances for item in row]

    items = [one for step in packed(vision(), "xtuner", [album], collate) for one in step]
    assert len(items) == 60
    for item in items:
        pixels = item.get("pixel_values")
        assert (0 if pixels is None else len(pixels)) == 4 * int((item["input_ids"] == PAD).sum())
    rows = [one for step in packed(vision(), "padded", [album]) for one in step]
    for row in rows:
        pads = (row["input_ids"] == PAD).sum(1).tolist()
        assert [len(extra.get("pixel_values", ())) // 4 for extra in row["extra"]] == pads[: len(row["extra"])]


def test_a_warm_job_reads_no_picture_and_a_changed_one_is_a_miss(vision: Callable[..., Job], album: Path) -> None:
    first = vision()
    warm = vision(name="again")
    assert (warm.progress.hits, warm.progress.bytes_read, warm.dataset) == (1, 0, first.dataset)
    assert vision(tokenize_options={"processor": SETTINGS | {"max_pixels": 784 * 2}}).progress.misses == {"tokenize": 1}
    kept = (album / "b.png").read_bytes()
    try:
        Image.new("RGB", SIZES["b.png"]).save(album / "b.png")
        changed = vision()
        assert changed.progress.misses == {"files": 1}
        assert changed.dataset != first.dataset
        (album / "b.png").unlink()
        gone = vision(max_bad_share=1.0)
        assert gone.progress.misses == {"files": 1}
        assert gone.progress.rejected == {"missing_file": sum("b.png" in shown(number) for number in range(60))}
    finally:
        (album / "b.png").write_bytes(kept)
    assert (vision().dataset, vision(name="x").progress.hits) == (first.dataset, 1)


def test_a_picture_that_is_not_what_was_cached_stops_the_batch(
    vision: Callable[..., Job], packed: Callable[..., Any], album: Path, tmp_path: Path
) -> None:
    job = vision()

    def told(error: type[PackhouseError], match: str, folder: Path, **plan: Any) -> None:
        with pytest.raises(error, match=match):
            list(packed(job, runtime=[folder], **plan))

    told(NotFound, rf"step 0 of plan \w+: the picture '\w+\.\w+' of sample \d+ is not there \('{tmp_path}", tmp_path)
    other = write_pictures(tmp_path / "other")
    Image.new("RGB", SIZES["a.png"]).save(other / "a.png")
    told(Mismatch, rf"the picture 'a.png' of sample \d+ is another than when it was cached: '{other}", other)
    told(Mismatch, r"cuts sample \d+ within the picture", album, strategy="hard", pack_length=13)
    list(packed(job, runtime=[other, album]))
    with pytest.raises(Mismatch, match="patches, and its tokens are for"):
        list(packed(job, runtime=Pictures(make_processor({**SETTINGS, "max_pixels": 784}), [album])))
    (album / "cut.jpg").write_bytes((album / "wide.jpg").read_bytes()[:700])
    (album / "cut.jsonl").write_text(json.dumps(asked("cut.jpg")))
    with pytest.raises(Damaged, match=r"'cut.jpg' of sample 0 cannot be used"):
        list(packed(vision(source="cut.jsonl"), runtime=[album]))


def test_all_real_records_go_from_the_command_line_to_batches(
    seeing: Path,
    running: Any,
    packed: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = Path(__file__).resolve().parents[3] / "shared/data"
    if not folder.is_dir():
        pytest.skip("there is no ../shared/data")
    monkeypatch.setenv("PACKHOUSE_URL", running.url)
    # By the tiny tokenizer, because a real one takes seconds to load in each process; its ids are checked elsewhere.
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(QWEN))
    album = folder / "multimodal"
    options = ["--tokenizer", str(seeing), "--tokenize", "vision", "--file-root", f"data/={album}"]
    options += ["--tokenize-option", f"processor=@{tmp_path}/preprocessor_config.json", "--file-root", str(album)]
    sources = [str(album / name) for name in ("mllm_demo.json", "v1_multimodal_demo.jsonl")]
    assert main(["submit", *sources, *options, "--json"]) == 0
    job = Job.model_validate_json(capsys.readouterr().out)
    assert (job.progress.rows, job.progress.rejected) == (30, {})
    seen = 0
    for data, _ in packed(job, pack_length=512, runtime=[album, f"data/={album}"]):
        for row, segments in enumerate(data["extra"]):
            for (begin, end), extra in zip(pairwise(data["cu_seqlens"][row].tolist()), segments, strict=False):
                assert 4 * int((data["input_ids"][row, begin:end] == PAD).sum()) == len(extra["pixel_values"])
                assert extra["pixel_values"].shape[1] == 3 * 2 * 14 * 14
                seen += 1
    assert seen == 30
    assert main(["preview", sources[1], *options, "--records", "2"]) == 0
    printed = capsys.readouterr().out
    assert "⟦They're Kane and Gretzka from Bayern Munich.<|im_end|>⟧" in printed


def test_the_operator_lists_modules_by_name() -> None:
    listed = Settings.load({"PACKHOUSE_TOKENIZE_MODULES": " my.functions, other ,"})
    assert listed.tokenize_modules == ("my.functions", "other")
    assert Settings.load({}).tokenize_modules == ()
    with pytest.raises(InvalidRequest, match=r"holds 'a\*', which names no module"):
        Settings.load({"PACKHOUSE_TOKENIZE_MODULES": "a*"})


def test_texts_and_pictures_are_packed_together(
    run: Callable[..., Job], vision: Callable[..., Job], packed: Callable[..., Any], album: Path, seeing: Path
) -> None:
    (album / "texts.jsonl").write_text("".join(json.dumps({"text": f"text {number}"}) + "\n" for number in range(40)))
    texts, pictures = run(album / "texts.jsonl", tokenizer=str(seeing)), vision()
    both = packed(pictures, runtime=[album], datasets=[texts.dataset, pictures.dataset])
    pixels = tokens = texts_seen = 0
    for data, _ in both:
        for segments in data["extra"]:
            texts_seen += sum(extra == {} for extra in segments)
            pixels += sum(len(extra.get("pixel_values", ())) for extra in segments)
        tokens += int((data["input_ids"] == PAD).sum())
    assert pixels == 4 * tokens > 0
    assert texts_seen == 40

"""The vision chat recipe on a worker: tokens by size, masks, forms of records, and what is kept out."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tests.pictures import END, PAD, SETTINGS, START, TOKENS, album, asked, see, seeing

from packhouse.client.errors import InvalidRequest
from packhouse.client.picture_files import picture_size
from packhouse.client.processor import make_processor, tokens
from packhouse.client.wire import JobSpec
from packhouse.worker.files import AttachedBlock, Places, at_once
from packhouse.worker.hf_tokenizer import hugging_face
from packhouse.worker.recipe import Recipe, load_tokenizer, resolve
from packhouse.worker.sources import Block
from packhouse.worker.tokenize import Samples
from packhouse.worker.unpacked import first_lines
from packhouse.worker.vision import VisionChat

__all__ = ["album", "see", "seeing"]

See = Callable[..., Samples]


def ids_of(samples: Samples, row: int) -> list[int]:
    return [int(token) for token in samples.ids[samples.offsets[row] : samples.offsets[row + 1]]]


def runs(ids: list[int]) -> list[int]:
    """Return the length of each run of image tokens, which must stand between start and end."""
    found = []
    for place, token in enumerate(ids):
        if token == START:
            end = ids.index(END, place)
            assert ids[place + 1 : end] == [PAD] * (end - place - 1)
            found.append(end - place - 1)
    assert sum(found) == ids.count(PAD)
    return found


def test_a_picture_takes_as_many_tokens_as_its_size_asks_for(see: See, album: Path) -> None:
    samples = see([asked("a.png"), asked("b.png", "wide.jpg", "b.png"), asked(text="none")], album)
    assert samples.rejects == []
    wanted = [["a.png"], ["b.png", "wide.jpg", "b.png"], []]
    assert [runs(ids_of(samples, row)) for row in range(3)] == [[TOKENS[name] for name in names] for names in wanted]
    assert samples.extra is not None
    extras = samples.extra.to_pylist()
    assert [extra["pictures"] for extra in extras] == wanted
    for row, extra in enumerate(extras):
        grids = [tuple(grid) for grid in extra["picture_grids"]]
        assert [tokens(make_processor(SETTINGS), grid) for grid in grids] == runs(ids_of(samples, row))
        for place in extra["picture_places"]:
            assert ids_of(samples, row)[place - 1 : place + 1] == [START, PAD]


def test_no_token_of_a_picture_is_trained(see: See, album: Path) -> None:
    record = asked("a.png", answer="ab<image>cd")
    record["images"].append("wide.jpg")
    for loss in ("assistant", "all"):
        samples = see([record], album, loss=loss)
        assert samples.mask is not None
        trained = samples.ids[samples.mask].tolist()
        assert not {PAD, START, END} & set(trained)
        assert 261 in trained
        assert len(trained) == (4 if loss == "assistant" else len(samples.ids) - 5 - 4)


FORMS: list[dict[str, Any]] = [
    asked("a.png", text="ab"),
    {"images": [{"path": "a.png"}], "messages": asked("a.png", text="ab")["messages"]},
    {
        "id": "7",
        "image": "a.png",
        "conversations": [{"from": "human", "value": "<image>ab"}, {"from": "gpt", "value": "yes"}],
    },
    {
        "messages": [
            {"role": "user", "content": [{"type": "image_url", "value": "a.png"}, {"type": "text", "value": "ab"}]},
            {"role": "assistant", "content": [{"type": "text", "value": "yes"}]},
        ]
    },
    {
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "image_url", "image_url": {"url": "a.png", "image_wh": [60, 40]}},
                    {"type": "text", "text": "<IMG_CONTEXT>ab"},
                ],
            },
            {"role": "assistant", "content": "yes"},
        ]
    },
    {
        "messages": [
            {"role": "user", "content": [{"type": "image", "image": "file://a.png"}, {"type": "text", "text": "ab"}]},
            {"role": "assistant", "content": "yes"},
        ]
    },
]


def test_each_way_to_write_a_picture_gives_the_same(see: See, album: Path) -> None:
    samples = see(FORMS, album)
    assert samples.rejects == []
    assert len({tuple(ids_of(samples, row)) for row in range(len(FORMS))}) == 1
    assert samples.mask is not None
    assert len(np.unique(samples.mask.reshape(len(FORMS), -1), axis=0)) == 1


def test_a_picture_stands_where_its_part_or_placeholder_does(see: See, album: Path) -> None:
    parts = [{"type": "text", "text": "ab"}, {"type": "image", "image": "a.png"}, {"type": "text", "text": "abab"}]
    records = [
        {"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": "yes"}]},
        asked("a.png", text="x") | {"messages": [{"role": "user", "content": "ab<image>abab"}, asked()["messages"][1]]},
    ]
    samples = see(records, album)
    assert ids_of(samples, 0) == ids_of(samples, 1)
    begin = ids_of(samples, 0).index(START)
    assert ids_of(samples, 0)[begin - 1 : begin + 6] == [261, START, PAD, PAD, END, 263, 4]


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (asked("gone.png"), "missing_file"),
        (asked("broken.png"), "broken_picture"),
        (asked("text.png"), "broken_picture"),
        (asked("thin.png"), "broken_picture"),
        (asked("../outside.png"), "file_outside"),
        (asked("link.png"), "file_outside"),
        (asked("/etc/passwd"), "file_outside"),
        (asked("folder"), "missing_file"),
        (asked("https://host/a.png"), "unsupported"),
        (asked("data:image/png;base64,AAAA"), "unsupported"),
        (asked("a.png") | {"images": ["a.png", "b.png"]}, "picture_count"),
        (asked("a.png") | {"images": []}, "picture_count"),
        (asked("a.png") | {"images": [7]}, "wrong_type"),
        (asked("a.png") | {"images": [""]}, "wrong_type"),
        (FORMS[3] | {"images": ["a.png"]}, "picture_count"),
        ({"messages": [{"role": "user", "content": [{"type": "video", "video": "a.mp4"}]}]}, "unsupported"),
        ({"messages": "x", "images": ["a.png"]}, "wrong_type"),
        ({"text": "x"}, "missing_field"),
        (asked("a.png", answer=""), "nothing_to_train"),
    ],
)
def test_a_record_whose_pictures_cannot_be_used_is_kept_out_and_no_other(
    see: See, album: Path, record: dict[str, Any], reason: str
) -> None:
    shutil.copy(album / "a.png", album.parent / "outside.png")
    (album / "link.png").symlink_to(album.parent / "outside.png")
    (album / "folder").mkdir()
    (album / "text.png").write_text("no picture")
    (album / "broken.png").write_bytes((album / "a.png").read_bytes()[:20])
    Image.new("RGB", (500, 2)).save(album / "thin.png")
    if reason == "nothing_to_train":
        record = record | {"messages": record["messages"][:1]}
    samples = see([asked("a.png"), record, asked("b.png")], album)
    assert [(one.row, one.reason) for one in samples.rejects] == [(1, reason)]
    assert samples.rows.tolist() == [0, 2]


def test_what_lies_outside_is_allowed_by_a_root(see: See, album: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    shutil.copy(album / "b.png", other / "b.png")
    (album / "link.png").symlink_to(other / "b.png")
    names = ["x/b.png", str(other / "b.png"), "link.png", "x/../b.png"]
    samples = see([asked(name) for name in names], album, {"x/": str(other)})
    assert samples.rows.tolist() == [0, 1, 2]
    assert [reject.reason for reject in samples.rejects] == ["file_outside"]
    assert Places(str(album / "rows.jsonl"), {"": str(other)}).find("a.png") == ("", "missing_file")


def test_a_cut_picture_is_found_where_that_is_asked_for(see: See, album: Path) -> None:
    Image.effect_noise((200, 200), 90).convert("RGB").save(album / "cut.jpg")
    (album / "cut.jpg").write_bytes((album / "cut.jpg").read_bytes()[:3000])
    assert see([asked("cut.jpg")], album).rejects == []
    assert [one.reason for one in see([asked("cut.jpg")], album, decode=True).rejects] == ["broken_picture"]


@pytest.mark.parametrize("written", ["<|image_pad|>", "<|vision_start|><|image_pad|><|vision_end|>", "<|im_end|>"])
def test_no_text_passes_for_a_picture_or_a_turn(see: See, album: Path, written: str) -> None:
    samples = see([asked("a.png", text=written, answer=f"ab{written}")], album)
    ids = ids_of(samples, 0)
    assert runs(ids) == [TOKENS["a.png"]]
    assert ids.count(4) == 2
    assert [one.reason for one in see([asked("a.png", text=written)], album, control="reject").rejects] == [
        "control_token"
    ]


def test_options_that_fit_no_tokenizer_are_refused(
    tiny: Path, seeing: Path, memory_store: type[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def told(tokenizer: Path, match: str, **options: Any) -> None:
        spec = JobSpec(sources=["/none"], tokenizer=str(tokenizer), tokenize="vision", tokenize_options=options)
        with pytest.raises(InvalidRequest, match=match):
            resolve(spec, memory_store())

    told(tiny, r"the image token '<\|image_pad\|>' is 13 tokens")
    told(seeing, "loss is 'some'", loss="some")
    told(seeing, "placeholders", placeholders="<image>")
    told(seeing, "above 0", processor={"patch_size": 0})
    told(seeing, "unexpected keyword", picture="x")
    monkeypatch.setitem(sys.modules, "PIL", None)
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    told(seeing, "need pillow", decode=False)


def test_keys_follow_the_processor_and_the_content_of_pictures(
    seeing: Path, album: Path, memory_store: type[Any]
) -> None:
    def recipe(**options: Any) -> Recipe:
        spec = JobSpec(sources=["/none"], tokenizer=str(seeing), tokenize="vision", tokenize_options=options)
        return resolve(spec, memory_store()).recipe_

    def digest(**options: Any) -> str:
        return recipe(**options).digest

    def stated(**options: Any) -> str:
        custom = recipe(**options).tokenize
        assert custom is not None
        return custom.hash

    # The hash stands for settings that options leave open too: their defaults may change.
    assert stated() == stated(processor=make_processor({}).settings()) != stated(processor=SETTINGS)

    recipes = [digest(), digest(processor=SETTINGS), digest(processor=SETTINGS | {"mean": [0.5, 0.5, 0.5]})]
    recipes += [digest(loss="all"), digest(placeholders=["<i>"])]
    assert len(set(recipes)) == 5
    assert digest(processor=SETTINGS) == recipes[1]

    block = Block(str(album / "rows.jsonl"), 0, 9, 0, 1, "d" * 32)

    def key(*names: str) -> str:
        return AttachedBlock.of(block, list(at_once(names, block.source, {}).values())).digest

    before = key("a.png", "gone.png")
    assert key("a.png", "gone.png") == before != key("a.png")
    data = (album / "a.png").read_bytes()
    (album / "a.png").write_bytes(data + b"\0")
    assert key("a.png", "gone.png") != before
    (album / "a.png").write_bytes(data)
    assert key("a.png", "gone.png") == before
    (album / "gone.png").write_bytes(b"")
    assert key("a.png", "gone.png") != before


@pytest.mark.parametrize("name", ["mllm_demo.json", "v1_multimodal_demo.jsonl"])
def test_real_records_give_the_ids_of_transformers_and_train_what_is_said(
    shared: Path, name: str, qwen3: VisionChat, memory_store: type[Any]
) -> None:
    source = shared / "data/multimodal" / name
    roots = {"data/": str(source.parent)}
    tokenizer = qwen3.tokenizer  # type: ignore[attr-defined]
    lines = [line for line in first_lines(str(source), "file", 100) if line.strip()]
    assert len(lines) == (6 if name.endswith(".json") else 24)
    for line in lines:
        record = json.loads(line)
        files = at_once(qwen3.files(record), str(source), roots)
        made = qwen3(record, files)
        messages, said = _plain(record, files, qwen3)
        expected = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True)["input_ids"]
        assert made["input_ids"].tolist() == expected
        trained = tokenizer.decode(made["labels"][made["labels"] != -100])
        assert trained.replace("<think>\n\n</think>\n\n", "") == "".join(f"{text}<|im_end|>" for text in said)


@pytest.fixture(scope="module")
def qwen3(shared: Path) -> VisionChat:
    content, template = load_tokenizer(str(shared / "data/tokenizers/qwen3"))
    tokenizer = hugging_face(content, template, None)
    function = VisionChat(tokenizer)
    function.tokenizer = tokenizer  # type: ignore[attr-defined]
    return function


def _plain(
    record: dict[str, Any], files: dict[str, Any], function: VisionChat
) -> tuple[list[dict[str, str]], list[str]]:
    """Return the messages with each picture written out, and what the assistant says."""
    names = iter(record.get("images", []))

    def written(name: str) -> str:
        count = tokens(function.processor, function.processor.grid(*picture_size(files[name].path)))
        return f"<|vision_start|>{'<|image_pad|>' * count}<|vision_end|>"

    messages = []
    for message in record["messages"]:
        content = message["content"]
        if isinstance(content, list):
            parts = (written(part["value"]) if part["type"] == "image_url" else part["value"] for part in content)
            text = "".join(parts)
        else:
            pieces = content.split("<image>")
            text = pieces[0] + "".join(written(next(names)) + piece for piece in pieces[1:])
        messages.append({"role": message["role"], "content": text})
    return messages, [message["content"] for message in messages if message["role"] == "assistant"]

"""Allowed source roots: what is outside is not read, by whatever name it is called, nor told of."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from packhouse.client.errors import InvalidRequest
from packhouse.worker import places, roots
from packhouse.worker.files import Places, check_roots, digest_files
from packhouse.worker.sources import Block, expand, read, scan
from packhouse.worker.tokenizer_content import load_tokenizer
from packhouse.worker.work import scan_sources

LINE = '{"text": "SECRET"}\n'


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The one allowed folder: with a file, a folder, and links to a file and a folder outside of it."""
    for name in ("root/sub", "outside"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("root/in.jsonl", "root/sub/deep.jsonl", "outside/out.jsonl"):
        (tmp_path / name).write_text(LINE)
    folder = tmp_path / "root"
    monkeypatch.setenv("PACKHOUSE_SOURCE_ROOTS", f"{folder}, s3://bucket/mine/")
    return folder


def link(root: Path, name: str, to: str) -> None:
    (root / name).symlink_to(root.parent / to)


OUTSIDE = [
    "{root}/../outside/out.jsonl",
    "{root}/../outside/none.jsonl",
    "{root}/../outside",
    "{root}/../outside/*.jsonl",
    "{root}/../none/*.jsonl",
    "{root}/../r*/in.jsonl",
    "{root}/../rooted.jsonl",
    "{root}/*/../../outside/*.jsonl",
    "/etc/passwd",
    "//proc/self/environ",
    "/proc/self/cwd",
    "/dev/stdin",
    "/*/passwd",
    "s3://bucket/other/a.jsonl",
    "s3://bucket/mine-not/a.jsonl",
    "s3://bucket/*/a.jsonl",
    "s3://other/mine/a.jsonl",
]


@pytest.mark.parametrize("source", OUTSIDE)
def test_a_source_outside_is_refused_by_its_name_alone(root: Path, source: str) -> None:
    """Case B089: also where nothing is there, and in the same words."""
    path = source.format(root=root)
    with pytest.raises(roots.OutsideRoots) as error:
        expand([path])
    assert error.value.status == 422
    words = ("lies outside of what this service may read", "goes up behind a part that is matched")
    assert any(one in error.value.detail for one in words)
    assert "SECRET" not in str(error.value)


@pytest.mark.parametrize("source", ["../outside/out.jsonl", "file:///etc/passwd", "root/../in.jsonl"])
def test_a_relative_path_or_a_url_is_no_source(root: Path, source: str) -> None:
    with pytest.raises(InvalidRequest, match=r"relative path|begins with 'file'"):
        expand([source])


@pytest.mark.parametrize("target", ["outside/out.jsonl", "outside/none.jsonl"])
@pytest.mark.parametrize("source", ["{root}/link.jsonl", "{root}/*.jsonl", "{root}", "{root}/li[n]k.jsonl"])
def test_a_link_to_the_outside_is_no_way_out(root: Path, target: str, source: str) -> None:
    """Whether there is anything at its end is not told."""
    link(root, "link.jsonl", target)
    with pytest.raises(roots.OutsideRoots, match=r"link\.jsonl"):
        expand([source.format(root=root)])


@pytest.mark.parametrize(
    "source", ["{root}/away/out.jsonl", "{root}/away/*.jsonl", "{root}/away", "{root}/a*/out.jsonl"]
)
def test_a_linked_folder_is_no_way_out(root: Path, source: str) -> None:
    link(root, "away", "outside")
    with pytest.raises(roots.OutsideRoots):
        expand([source.format(root=root)])


def test_what_is_inside_is_read_also_through_links(root: Path) -> None:
    (root / "again").symlink_to(root / "sub")
    assert expand([f"{root}/in.jsonl", f"{root}/sub/../in.jsonl", f"{root}/again/*.jsonl"]) == [
        f"{root}/in.jsonl",
        f"{root}/sub/../in.jsonl",
        f"{root}/again/deep.jsonl",
    ]
    assert expand([str(root)]) == [f"{root}/in.jsonl", f"{root}/sub/deep.jsonl"]


def test_a_file_that_becomes_a_link_after_the_submit_is_not_opened(root: Path) -> None:
    [block] = scan(f"{root}/in.jsonl")
    (root / "in.jsonl").unlink()
    link(root, "in.jsonl", "outside/out.jsonl")
    reads: list[Callable[[], object]] = [
        lambda: read(block),
        lambda: scan(block.source),
        lambda: scan_sources([block.source]),
        lambda: places.opened(block.source),
        lambda: places.mapped(block.source),
        lambda: digest_files([block.source]),
    ]
    for one in reads:
        with pytest.raises(roots.OutsideRoots):
            one()


def test_a_tokenizer_lies_inside_with_all_its_files(root: Path, tokenizer_dir: Path) -> None:
    with pytest.raises(roots.OutsideRoots):
        load_tokenizer(str(tokenizer_dir))
    inside = root / "tokenizer"
    shutil.copytree(tokenizer_dir, inside)
    assert load_tokenizer(str(inside))[0].vocab_size == 600
    (inside / "extra.json").symlink_to("/etc/hostname")
    with pytest.raises(roots.OutsideRoots, match=r"extra\.json"):
        load_tokenizer(str(inside))


def test_the_named_templates_of_a_tokenizer_lie_inside_and_are_read_anew(root: Path, tokenizer_dir: Path) -> None:
    inside = root / "tokenizer"
    shutil.copytree(tokenizer_dir, inside)
    named = inside / "additional_chat_templates"
    named.mkdir()
    for text in ("{{ 'one' }}", "{{ 'two' }}"):
        (named / "tool_use.jinja").write_text(text)
        assert text[3:8] in (load_tokenizer(str(inside))[1] or "")
    (named / "tool_use.jinja").unlink()
    link(root, "tokenizer/additional_chat_templates/tool_use.jinja", "outside/out.jsonl")
    with pytest.raises(roots.OutsideRoots, match=r"tool_use\.jinja"):
        load_tokenizer(str(inside))


def test_files_that_records_name_lie_inside(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(roots.OutsideRoots):
        check_roots({"": str(root.parent / "outside")})
    check_roots({"": str(root / "sub")})
    source = str(root / "in.jsonl")
    assert Places(source, {}).find("sub/deep.jsonl")[1] == ""
    monkeypatch.setenv("PACKHOUSE_SOURCE_ROOTS", source)  # the source alone, and not what lies beside it
    assert Places(source, {}).find("sub/deep.jsonl") == ("", "file_outside")


def test_objects_have_roots_too(root: Path) -> None:
    assert roots.allowed("s3://bucket/mine/a/b.jsonl")
    assert roots.allowed("s3://bucket/mine")
    with pytest.raises(roots.OutsideRoots):
        places.read_range("s3://bucket/mine2/a.jsonl", 0, 1)
    with pytest.raises(roots.OutsideRoots):
        read(Block("s3://bucket/x.jsonl", 0, 1, 0, 1, "d" * 32))


def test_without_roots_everything_is_allowed_and_with_empty_ones_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(LINE)
    monkeypatch.delenv("PACKHOUSE_SOURCE_ROOTS", raising=False)
    assert expand([str(file)]) == [str(file)]
    monkeypatch.setenv("PACKHOUSE_SOURCE_ROOTS", "")
    with pytest.raises(roots.OutsideRoots, match=r"\(nothing\)"):
        expand([str(file)])


@pytest.mark.parametrize("text", ["data", "/data,./x", "s3://", "s3://B/x", "gs://bucket"])
def test_a_root_that_cannot_be_one_is_named(text: str) -> None:
    with pytest.raises(InvalidRequest, match="source root"):
        roots.parse(text)


def test_the_root_of_the_file_system_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACKHOUSE_SOURCE_ROOTS", "/")
    assert roots.allowed(os.path.realpath(__file__))

"""Files that records name: where they are looked for, what tells that they have changed, and their digests.

A name is looked up in the folder that ``file_roots`` has for its beginning, the longest first, else beside the source.
Links and ``..`` are followed first; what then lies neither in a root nor in the source's folder is not opened.
"""

import os
import stat
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Self

import xxhash

from packhouse.client.digest import digest_json
from packhouse.client.errors import InvalidRequest
from packhouse.worker import roots as allowed_roots
from packhouse.worker.sources import Block, Fingerprint, SourceChanged
from packhouse.worker.tokenize_fn import File

_READ_AT_ONCE = 4 << 20


class Places:
    """Where the files of one source are looked for."""

    def __init__(self, source: str, roots: Mapping[str, str]) -> None:
        beside = {} if "" in roots or "://" in source else {"": os.path.dirname(source)}
        named = {**roots, **beside}
        self._folders = sorted(named.items(), key=lambda item: -len(item[0]))
        self._allowed = [os.path.realpath(folder) for folder in named.values()]

    def find(self, name: str) -> tuple[str, str]:
        """Return the real path of a file and nothing, or nothing and the reason why it cannot be used."""
        found = next(
            ((folder, name[len(prefix) :]) for prefix, folder in self._folders if name.startswith(prefix)), None
        )
        if found is None:
            return "", "missing_file"
        try:
            path = os.path.realpath(os.path.join(*found))
            if not any(os.path.commonpath([path, folder]) == folder for folder in self._allowed):
                return "", "file_outside"
            if not allowed_roots.allowed(path):
                return "", "file_outside"
            regular = stat.S_ISREG(os.stat(path).st_mode)
        except (OSError, ValueError):  # ValueError: a zero byte, or a lone surrogate
            return "", "missing_file"
        return (path, "") if regular else ("", "missing_file")


def check_roots(roots: Mapping[str, str]) -> None:
    """Raise ``InvalidRequest`` for a root that is not a folder of this machine."""
    for prefix, folder in roots.items():
        allowed_roots.check(folder)
        if not os.path.isabs(folder) or not os.path.isdir(folder):
            raise InvalidRequest(
                f"the file root {folder!r} for {prefix!r} is not a folder on the service's machine",
                "give the absolute path of one",
            )


@dataclass(frozen=True, slots=True)
class Digested:
    """A file's digest."""

    fingerprint: Fingerprint
    digest: str
    settled: bool
    """Whether the file was the same before and after, and old enough, to remember the digest."""


def digest_files(paths: list[str]) -> list[Digested | None]:
    """Read each file once; None stands for one that has gone."""
    return [_digest(path) for path in paths]


def _digest(path: str) -> Digested | None:
    allowed_roots.check(path)
    try:
        before = Fingerprint.of(path)
        with open(path, "rb", buffering=0) as file:
            state = xxhash.xxh3_128()
            while piece := file.read(_READ_AT_ONCE):
                state.update(piece)
        after = Fingerprint.of(path)
    except (OSError, SourceChanged):
        return None
    if after != before:
        raise SourceChanged(f"the file {path!r} changed while the job ran", "submit the job again")
    return Digested(before, state.hexdigest(), before.settled())


def check_unchanged(files: Iterable[File]) -> None:
    """Raise ``SourceChanged`` unless every file is the one that was digested. Takes a stat for each."""
    for file in files:
        if file.fingerprint is not None and Fingerprint.of(file.path) != file.fingerprint:
            raise SourceChanged(f"the file {file.path!r} changed while the job ran", "submit the job again")


@dataclass(frozen=True, slots=True)
class AttachedBlock(Block):
    """A block and the files that its records name; its digest is that of its bytes and of theirs."""

    bytes_digest: str = ""
    files: tuple[File, ...] = ()

    @property
    def content(self) -> str:
        """xxh3-128 of its bytes alone."""
        return self.bytes_digest

    @classmethod
    def of(cls, block: Block, files: Sequence[File]) -> Self:
        """Attach files to a block."""
        values = {field.name: getattr(block, field.name) for field in fields(block)}
        content = [[file.name, file.digest or file.problem] for file in files]
        values["digest"] = digest_json([block.digest, content])
        return cls(**values, bytes_digest=block.digest, files=tuple(files))


def files_of(block: Block) -> dict[str, File]:
    """Return the files that a block's records name, by their names."""
    return {file.name: file for file in block.files} if isinstance(block, AttachedBlock) else {}


def file_at(name: str, path: str, why: str, digested: dict[str, Digested]) -> File:
    """Return the file at ``path``, or the one that cannot be used because of ``why``."""
    if path and path not in digested:
        path, why = "", "missing_file"
    return (
        File(name, path, digested[path].digest, digested[path].fingerprint) if path else File(name, "", "", None, why)
    )


def at_once(names: Iterable[str], source: str, roots: dict[str, str]) -> dict[str, File]:
    """Return the files of some names, found and digested in this process: for the few of a preview."""
    places = Places(source, roots)
    found = {name: places.find(name) for name in names}
    digested = {one.fingerprint.path: one for one in digest_files([path for path, _ in found.values() if path]) if one}
    return {name: file_at(name, path, why, digested) for name, (path, why) in found.items()}

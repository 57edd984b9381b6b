"""A corpus for benchmarks: the sources of the standard library and of the installed packages, as JSON lines."""

import itertools
import os
import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import orjson

SUFFIXES = (".py", ".pyi", ".pyx", ".h", ".hpp", ".c", ".js", ".rst", ".md", ".txt", ".json", ".yaml")
LONGEST = 1 << 20


def documents(seed: int = 0) -> Iterator[str]:
    """Yield texts without end: all files in a seeded order, then again without the first lines of each, and so on."""
    paths = sysconfig.get_paths()
    roots = sorted({paths["stdlib"], paths["purelib"], paths["platlib"]})
    found = {
        os.path.join(folder, name)
        for root in roots
        for folder, _, names in os.walk(root)
        for name in names
        if name.endswith(SUFFIXES)
    }
    files = sorted(found)
    generator = random.Random(seed)
    for lap in itertools.count():
        generator.shuffle(files)
        for file in files:
            try:
                if os.path.getsize(file) > LONGEST:
                    continue
                text = Path(file).read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError):
                continue
            lines = text.splitlines(keepends=True)
            yield "".join(lines[lap * 3 :])


def write_corpus(path: Path, size: int, seed: int = 0) -> int:
    """Write at least ``size`` bytes of ``{"text": …}`` lines; return how many bytes there are."""
    written = 0
    with open(path, "wb") as file:
        for text in documents(seed):
            if not text:
                continue
            written += file.write(orjson.dumps({"text": text}) + b"\n")
            if written >= size:
                return written
    return written

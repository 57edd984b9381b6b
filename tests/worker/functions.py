"""Tokenize functions as users write them: a good one, and the ways in which others are wrong."""

import os
import random
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import Any

import torch

from packhouse.worker import BadRecord, File


class Words:
    """Tokenizes a text; the first ``untrained`` tokens are not trained. Keeps two extra columns."""

    state = "cache"
    extra: Mapping[str, str] = {"length": "int64", "marks": "list<float32>"}

    def __init__(self, tokenizer: Any, untrained: int = 1) -> None:
        self.tokenizer, self.untrained = tokenizer, untrained

    def hash(self) -> str:
        return f"words-{self.untrained}"

    def __call__(self, record: dict[str, Any]) -> dict[str, Any]:
        if record["text"] == "bad":
            raise BadRecord("not_wanted", "this one is not wanted")
        ids = self.tokenizer(record["text"], add_special_tokens=False)["input_ids"]
        labels = [-100] * self.untrained + ids[self.untrained :]
        made = {"input_ids": ids, "labels": labels, "length": len(record["text"]), "marks": record.get("marks")}
        return {**made, **record.get("also", {})}


class Mute(Exception):
    def __str__(self) -> str:
        raise ValueError("it says nothing")


class Lazy(Mapping[str, Any]):
    """Raises when it is read."""

    def __getitem__(self, name: str) -> Any:
        raise ValueError("not yet")

    def __iter__(self) -> Iterator[str]:
        return iter(GIVEN)

    def __len__(self) -> int:
        return len(GIVEN)


GIVEN = ("input_ids", "labels")


class Given:
    """Returns what the record says it should."""

    state = "cache"

    def hash(self) -> str:
        return "given"

    def __call__(self, record: dict[str, Any]) -> Any:
        if record.get("raise") == "mute":
            raise Mute
        if "lazy" in record:
            return Lazy()
        if "raise" in record:
            raise {"value": ValueError, "exit": SystemExit, "deep": RecursionError}[record["raise"]](
                "of the user's\nmore"
            )
        if "tensor" in record:
            ids = torch.tensor(record["tensor"])
            return {"input_ids": ids, "labels": ids.float().requires_grad_() if record.get("grad") else ids}
        return record["return"]


class Beside:
    """Tokens of the bytes of a file that the record names."""

    state = "cache"

    def hash(self) -> str:
        return "beside"

    def files(self, record: dict[str, Any]) -> list[str]:
        return [record["file"]]

    def __call__(self, record: dict[str, Any], files: Mapping[str, File]) -> dict[str, Any]:
        with open(files[record["file"]].path, "rb") as file:
            ids = [byte + 5 for byte in file.read()]
        return {"input_ids": ids, "labels": ids}


class Wavering(Given):
    """Gives another hash each time."""

    count = 0

    def hash(self) -> str:
        self.count += 1
        return str(self.count)


class Empty(Given):
    def hash(self) -> str:
        return ""


class Raising(Given):
    def hash(self) -> str:
        raise KeyError("what")


class OfProcess(Given):
    """Its hash is another in each process."""

    def hash(self) -> str:
        return f"{os.environ.get('TOLD', 'here')}"


class Dice(Given):
    """Gives another result each time."""

    def __call__(self, record: dict[str, Any]) -> Any:
        ids = [random.randrange(5, 200) for _ in range(20)]
        return {"input_ids": ids, "labels": ids}


class Demanding(Given):
    def __init__(self, must: int) -> None:
        if must != 7:
            raise ValueError("must be seven")


class WrongExtra(Given):
    extra: Mapping[str, str] = {"x": "complex"}


class TakenName(Given):
    extra: Mapping[str, str] = {"labels": "int64"}


class NoState:
    def hash(self) -> str:
        return "x"

    def __call__(self, record: dict[str, Any]) -> Any:
        return record


class NoCall:
    state = "cache"

    def hash(self) -> str:
        return "x"


not_a_class = Given()
Imported = PurePath

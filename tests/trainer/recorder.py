"""Records the collectives that a process calls, by wrapping torch.distributed."""

from collections import Counter
from typing import Any, Self

import torch.distributed as dist

from packhouse.trainer.parallel.collectives import GATHER, SCATTER

KINDS = {
    "all_reduce": "all-reduce",
    GATHER: "all-gather",
    SCATTER: "reduce-scatter",
    "all_to_all_single": "all-to-all",
    "broadcast": "broadcast",
}


class Recorder:
    """While entered, `calls` gets (kind, size of the group, shape of the second argument, or the first) of each."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, tuple[int, ...]]] = []
        self._original: dict[str, Any] = {}

    def __enter__(self) -> Self:
        for name in KINDS:
            self._original[name] = getattr(dist, name)
            setattr(dist, name, self._wrapped(name))
        return self

    def __exit__(self, *_: object) -> None:
        for name, function in self._original.items():
            setattr(dist, name, function)

    def count(self) -> Counter[str]:
        """Number of calls by kind; the calls are forgotten."""
        counted = Counter(kind for kind, _, _ in self.calls)
        self.calls.clear()
        return counted

    def _wrapped(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            sent = args[1] if len(args) > 1 and not isinstance(args[1], int) else args[0]
            self.calls.append((KINDS[name], kwargs["group"].size(), tuple(sent.shape)))
            return self._original[name](*args, **kwargs)

        return call

"""Retries: their patience is for a source that is away, not for one that is slow."""

from types import SimpleNamespace

import pytest

from packhouse.client.errors import Unavailable
from packhouse.client.retry import retried


def test_patience_begins_anew_where_something_came(monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[int] = []

    def transfer() -> None:
        tries.append(len(tries))
        raise Unavailable("the connection broke")

    clock = SimpleNamespace(monotonic=lambda: 0.9 * len(tries), sleep=lambda seconds: None)
    monkeypatch.setattr("packhouse.client.retry.time", clock)
    with pytest.raises(Unavailable, match="what did not come in 1 s"):
        retried(transfer, "what", patience=1)
    assert len(tries) == 1
    with pytest.raises(Unavailable, match="what did not come in 1 s"):
        retried(transfer, "what", patience=1, progress=lambda: min(len(tries), 9))
    assert len(tries) == 10

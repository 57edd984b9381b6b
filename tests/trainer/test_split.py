"""The sequence split of a micro-batch, packed and unpacked: the worked examples of InternEvo's documentation."""

from typing import Any

import pytest
import torch

from packhouse.client.errors import InvalidRequest
from packhouse.client.layouts import split_data_sequence_parallel

PACKED = {
    "input_ids": torch.tensor([[2323, 442, 252, 341, 233, 3442, 322, 31, 2514, 49731, 51, 4326, 427, 465, 22, 314]]),
    "cu_seqlens": torch.tensor([0, 4, 11, 16], dtype=torch.int32),
    "indexes": torch.tensor([0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 0, 1, 2, 3, 4]),
    "max_seqlen": 7,
}
PACKED_LABELS = torch.tensor([[442, 252, 341, -100, 3442, 322, 31, 2514, 49731, 51, -100, 427, 465, 22, 314, 9725]])
UNPACKED = {"input_ids": torch.tensor([[2323, 442, 252, 341, 0, 0, 0, 0], [233, 3442, 322, 31, 2514, 49731, 51, 0]])}
UNPACKED_LABELS = torch.tensor(
    [[442, 252, 341, -100, -100, -100, -100, -100], [3442, 322, 31, 2514, 49731, 51, -100, -100]]
)


def listed(data: dict[str, Any]) -> dict[str, Any]:
    return {name: x.tolist() if isinstance(x, torch.Tensor) else x for name, x in data.items()}


FIRST = [[2323, 442, 252, 341, 233, 3442, 322, 31], [0, 1, 2, 3, 0, 1, 2, 3]]
SECOND = [[2514, 49731, 51, 4326, 427, 465, 22, 314], [4, 5, 6, 0, 1, 2, 3, 4]]


@pytest.mark.parametrize(
    ("rank", "expected", "labels"),
    [
        (0, FIRST, [442, 252, 341, -100, 3442, 322, 31, 2514]),
        (1, SECOND, [49731, 51, -100, 427, 465, 22, 314, 9725]),
    ],
)
def test_a_packed_micro_batch(rank: int, expected: list[Any], labels: list[int]) -> None:
    data, own_labels = split_data_sequence_parallel(PACKED, PACKED_LABELS, rank, 2)
    ids, indexes = expected
    assert listed(data) == {"input_ids": [ids], "indexes": indexes, "cu_seqlens": [0, 4, 11, 16], "max_seqlen": 7}
    assert own_labels.tolist() == [labels]
    assert listed(PACKED)["input_ids"] == [[*FIRST[0], *SECOND[0]]]


@pytest.mark.parametrize(
    ("rank", "ids", "labels"),
    [
        (0, [[2323, 442, 252, 341], [233, 3442, 322, 31]], [[442, 252, 341, -100], [3442, 322, 31, 2514]]),
        (1, [[0, 0, 0, 0], [2514, 49731, 51, 0]], [[-100, -100, -100, -100], [49731, 51, -100, -100]]),
    ],
)
def test_an_unpacked_micro_batch_knows_where_it_starts(rank: int, ids: list[Any], labels: list[Any]) -> None:
    data, own_labels = split_data_sequence_parallel(UNPACKED, UNPACKED_LABELS, rank, 2)
    assert listed(data) == {"input_ids": ids, "indexes": list(range(4 * rank, 4 * rank + 4))}
    assert own_labels.tolist() == labels


def test_a_length_that_cannot_be_cut_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="a sequence of 16 tokens cannot be cut equally over 3 ranks: use a pack"):
        split_data_sequence_parallel(PACKED, PACKED_LABELS, 0, 3)

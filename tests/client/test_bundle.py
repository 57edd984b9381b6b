"""Bundles: what goes in comes out, whatever it is a nest of; tensors share one block."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from packhouse.client.bundle import bundle, unbundle


@dataclass
class Thing:
    ids: torch.Tensor
    name: str


@pytest.mark.parametrize(
    "dtype", [torch.int64, torch.int32, torch.bool, torch.bfloat16, torch.float64, torch.uint8], ids=str
)
def test_a_nest_comes_out_as_it_went_in(dtype: torch.dtype) -> None:
    made = torch.arange(105).reshape(3, 5, 7).to(dtype)
    given: dict[str, Any] = {
        "rows": [made, made[1], made.transpose(0, 2), (made[0, 0, 0], "text")],
        "empty": torch.zeros(0, 4, dtype=dtype),
        "thing": Thing(made[:, 2], "name"),
        "number": 7,
    }
    whole = bundle(given)
    found = unbundle(whole)
    pairs = zip(found["rows"][:3], given["rows"][:3], strict=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in pairs)
    assert torch.equal(found["rows"][3][0], made[0, 0, 0])
    assert found["empty"].shape == (0, 4)
    assert torch.equal(found["thing"].ids, made[:, 2])
    assert (found["thing"].name, found["number"], found["rows"][3][1]) == ("name", 7, "text")
    assert found["rows"][0].untyped_storage().data_ptr() == whole.block.untyped_storage().data_ptr()


@pytest.mark.parametrize("value", [None, [], {"a": 1}, torch.zeros(0), torch.ones(2, 2).to_sparse()])
def test_what_has_no_dense_tensor_is_kept_too(value: Any) -> None:
    found = unbundle(bundle(value))
    if isinstance(value, torch.Tensor):
        assert torch.equal(found.to_dense(), value.to_dense())
    else:
        assert found == value

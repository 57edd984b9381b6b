"""Public checkpoints: bit-exact round trips in every mode, and what the public model does with them."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.trainer.pool import Pool

from packhouse.client.errors import InvalidRequest, Mismatch
from packhouse.trainer.hf import dump_config, half_rotary, load_config, load_hf, save_hf
from packhouse.trainer.model import InternLM2, ModelConfig, split_qkv
from packhouse.trainer.parallel import ModeName, build, make_groups, plain
from packhouse.trainer.rotary import rotary_tables, rotate

SHAPE = ModelConfig(32, 2, num_heads=8, num_kv_heads=4, ffn_size=48, vocab_size=64)


def files_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: x for file in sorted(folder.glob("*.safetensors")) for name, x in load_file(file).items()}


def write_public(folder: Path, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """A checkpoint as the public ones are: random bits of every kind, in files with an index."""
    generator = torch.Generator().manual_seed(1)
    state = {
        name: torch.randn(x.shape, generator=generator).to(dtype).contiguous()
        for name, x in InternLM2(SHAPE).state_dict().items()
    }
    state["model.norm.weight"][:4] = torch.tensor([0.0, -0.0, 6e-39, 65504.0]).to(dtype)
    folder.mkdir()
    halves = [dict(list(state.items())[::2]), dict(list(state.items())[1::2])]
    files = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    for file, half in zip(files, halves, strict=True):
        save_file(half, str(folder / file))
    table = {name: file for file, half in zip(files, halves, strict=True) for name in half}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": table}))
    (folder / "config.json").write_text(json.dumps(dump_config(SHAPE, dtype)))
    return state


def reload(source: Path, target: Path, name: ModeName, tp: int, wp: int | None, dtype: torch.dtype) -> None:
    model = build(load_config(source), make_groups(tp, wp), name)
    load_hf(source, model)
    save_hf(target, model, dtype=dtype, file_bytes=20_000)


@pytest.mark.parametrize(("name", "tp", "wp"), [("mtp", 4, None), ("fsp", 2, None), ("isp", 2, 4), ("isp", 1, 2)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_loading_and_saving_is_bit_exact(
    pool: Pool, tmp_path: Path, name: ModeName, tp: int, wp: int | None, dtype: torch.dtype
) -> None:
    expected = write_public(tmp_path / "in", dtype)
    pool.run(4, reload, tmp_path / "in", tmp_path / "out", name, tp, wp, dtype)
    found = files_of(tmp_path / "out")
    assert found.keys() == expected.keys()
    kind = torch.int16 if dtype == torch.bfloat16 else torch.int32
    assert all(torch.equal(found[key].view(kind), expected[key].view(kind)) for key in expected)
    assert found["model.norm.weight"].dtype == dtype
    assert load_config(tmp_path / "out") == SHAPE
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(expected)
    assert len(list((tmp_path / "out").iterdir())) == len(set(index["weight_map"].values())) + 2


def test_a_small_model_is_one_file(tmp_path: Path) -> None:
    save_hf(tmp_path, plain(InternLM2(SHAPE)))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bias": True}, "has bias True"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "only type dynamic"),
        ({"rms_norm_eps": None}, "lacks rms_norm_eps"),
        ({"tie_word_embeddings": True}, "has tie_word_embeddings True"),
    ],
)
def test_what_the_model_cannot_be_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    values = {**dump_config(SHAPE, torch.float32), **change}
    text = json.dumps({key: value for key, value in values.items() if value is not None or key == "rope_scaling"})
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(InvalidRequest, match=message):
        load_config(tmp_path)


def test_scaling_is_kept_in_the_configuration(tmp_path: Path) -> None:
    shape = replace(SHAPE, rope_factor=2.0, max_position=64)
    (tmp_path / "config.json").write_text(json.dumps(dump_config(shape, torch.float32)))
    assert load_config(tmp_path) == shape


def test_tensors_of_another_shape_are_refused_by_name(tmp_path: Path) -> None:
    save_hf(tmp_path, plain(InternLM2(SHAPE)))
    with pytest.raises(Mismatch, match=r"is \[48, 32\] and not \[56, 32\]"):
        load_hf(tmp_path, plain(InternLM2(replace(SHAPE, ffn_size=56))))
    with pytest.raises(Mismatch, match="differ in 7 tensors"):
        load_hf(tmp_path, plain(InternLM2(replace(SHAPE, num_layers=3))))


def test_interleaved_rows_are_reordered_to_halves_and_scores_stay() -> None:
    shape, positions = replace(SHAPE, rope_interleaved=True), torch.tensor([0, 3, 17, 40])
    weight, x = torch.randn(64, 32, dtype=torch.float64), torch.randn(1, 4, 32, dtype=torch.float64)
    tables = rotary_tables(positions, shape.head_dim, shape.rope_base)
    scores = []
    for rows, interleaved in ((weight, True), (half_rotary("wqkv.weight", weight, shape), False)):
        q, k, v = split_qkv(x @ rows.T, shape.q_per_kv, shape.head_dim)
        q, k = (rotate(part, *tables, interleaved=interleaved) for part in (q, k))
        scores.append((torch.einsum("btnh,bsnh->nts", q, k.repeat_interleave(2, dim=2)), v))
    torch.testing.assert_close(scores[1], scores[0], rtol=0, atol=1e-12)
    wrong = split_qkv(x @ weight.T, shape.q_per_kv, shape.head_dim)
    assert not torch.allclose(rotate(wrong[0], *tables), rotate(wrong[0], *tables, interleaved=True))


def test_an_interleaved_model_gives_the_same_logits_once_exported(tmp_path: Path) -> None:
    model = InternLM2(replace(SHAPE, rope_interleaved=True), seed=3)
    save_hf(tmp_path, plain(model))
    exported = plain(InternLM2(load_config(tmp_path)))
    load_hf(tmp_path, exported)
    assert not exported.model.config.rope_interleaved
    arguments = torch.arange(20)[None], torch.tensor([0, 20], dtype=torch.int32), torch.arange(20), 20
    torch.testing.assert_close(exported.model(*arguments), model(*arguments), rtol=0, atol=1e-6)
    halves = InternLM2(SHAPE, seed=3)
    assert not torch.allclose(halves(*arguments), model(*arguments), rtol=0, atol=1e-5)

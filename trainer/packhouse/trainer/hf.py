"""Checkpoints in the layout of the public InternLM2 models: safetensors files, an index, and config.json.

Names, shapes and the fused `wqkv` are the model's own, so weights pass through bit by bit. Only a model with
interleaved rotary pairs has its query and key rows reordered on export, since the public layout pairs halves.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from packhouse.client.errors import InvalidRequest, Mismatch
from packhouse.trainer.model import InternLM2, ModelConfig
from packhouse.trainer.parallel.shard import whole_parameter
from packhouse.trainer.parallel.sharded import ShardedModel

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
FILE_BYTES = 5 * 10**9
_SIZES = {
    "hidden_size": "hidden_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "intermediate_size": "ffn_size",
    "vocab_size": "vocab_size",
    "rope_theta": "rope_base",
    "rms_norm_eps": "norm_eps",
    "max_position_embeddings": "max_position",
}
"""Keys of config.json and the fields they fill. All must be there: the defaults of the public class differ."""


def load_config(folder: Path) -> ModelConfig:
    """The shape in `folder`/config.json; raises InvalidRequest for one that this model cannot have."""
    values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    missing = sorted(_SIZES.keys() - values.keys())
    if missing:
        raise InvalidRequest(f"{folder}/config.json lacks {', '.join(missing)}", "take the model's whole config.json")
    for key, expected in (("bias", False), ("tie_word_embeddings", False), ("hidden_act", "silu")):
        if values.get(key, expected) != expected:
            raise InvalidRequest(f"{folder}/config.json has {key} {values[key]!r}", f"only {expected!r} is supported")
    return ModelConfig(
        **{field: values[key] for key, field in _SIZES.items()}, rope_factor=_rope_factor(values, folder)
    )


def _rope_factor(values: dict[str, Any], folder: Path) -> float | None:
    scaling = values.get("rope_scaling")
    if scaling is None:
        return None
    if scaling.get("type", scaling.get("rope_type")) != "dynamic":
        raise InvalidRequest(f"{folder}/config.json has rope_scaling {scaling}", "only type dynamic, or none")
    return float(scaling["factor"])


def dump_config(config: ModelConfig, dtype: torch.dtype) -> dict[str, Any]:
    """The config.json of a model, with every value stated."""
    scaling = None if config.rope_factor is None else {"type": "dynamic", "factor": config.rope_factor}
    return {
        "architectures": ["InternLM2ForCausalLM"],
        "model_type": "internlm2",
        **{key: getattr(config, field) for key, field in _SIZES.items()},
        "rope_scaling": scaling,
        "bias": False,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }


@torch.no_grad()
def load_hf(folder: Path, model: ShardedModel) -> None:
    """Fill this rank's parts from the files of `folder`, reading no more than them.

    Raises Mismatch for tensors that are missing, that the model does not have, or of another shape.
    """
    files = _files(folder)
    parameters = dict(model.model.named_parameters())
    with torch.device("meta"):
        whole = {name: x.shape for name, x in InternLM2(model.model.config).named_parameters()}
    if files.keys() != whole.keys():
        odd = sorted(files.keys() ^ whole.keys())
        raise Mismatch(f"{folder} and the model differ in {len(odd)} tensors, such as {odd[0]}", "load its own shape")
    for file in sorted(set(files.values())):
        with safe_open(str(folder / file), framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                source, placement = tensors.get_slice(name), model.placements[name]
                if source.get_shape() != list(whole[name]):
                    raise Mismatch(f"{name} in {folder} is {source.get_shape()} and not {list(whole[name])}")
                window = [slice(None)] * parameters[name].ndim
                if placement.cut is not None:
                    size = parameters[name].shape[placement.cut]
                    window[placement.cut] = slice(placement.shard.rank * size, (placement.shard.rank + 1) * size)
                parameters[name].copy_(source[tuple(window)])


def _files(folder: Path) -> dict[str, str]:
    """The file of each tensor."""
    if (folder / INDEX).exists():
        files: dict[str, str] = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
        return files
    with safe_open(str(folder / SINGLE), framework="pt") as tensors:
        return dict.fromkeys(tensors.keys(), SINGLE)


@torch.no_grad()
def save_hf(
    folder: Path, model: ShardedModel, *, dtype: torch.dtype | None = None, file_bytes: int = FILE_BYTES
) -> None:
    """Write the whole model to `folder`, in `dtype` or the weights' own. Collective; rank 0 writes."""
    config = model.model.config
    wanted = dtype or next(model.model.parameters()).dtype
    writing = model.groups.world.rank == 0
    files = _FileWriter(folder, file_bytes) if writing else None
    for name, weight in _whole_weights(model):
        if files is not None:
            files.add(name, half_rotary(name, weight, config).to(wanted).cpu().contiguous())
    if files is not None:
        files.close()
        text = json.dumps(dump_config(config, wanted), indent=2)
        (folder / "config.json").write_text(text + "\n", encoding="utf-8")


def _whole_weights(model: ShardedModel) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in model.model.named_parameters():
        yield name, whole_parameter(parameter, model.placements[name])


def half_rotary(name: str, weight: Tensor, config: ModelConfig) -> Tensor:
    """The weight for rotary pairs (i, i + H/2): of interleaved queries and keys, the even rows, then the odd ones."""
    if not config.rope_interleaved or not name.endswith("wqkv.weight"):
        return weight
    heads = weight.unflatten(0, (config.num_kv_heads, config.q_per_kv + 2, config.head_dim))  # type: ignore[no-untyped-call]
    turned = torch.cat((heads[:, :-1, ::2], heads[:, :-1, 1::2]), dim=2)
    out: Tensor = torch.cat((turned, heads[:, -1:]), dim=1).flatten(0, 2)
    return out


class _FileWriter:
    """Writes tensors to files of at most a size; names tell the number of files, so they are given at the end."""

    def __init__(self, folder: Path, file_bytes: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._limit = folder, file_bytes
        self._open: dict[str, Tensor] = {}
        self._written: list[list[str]] = []
        self._bytes = 0

    def add(self, name: str, tensor: Tensor) -> None:
        if self._open and sum(x.nbytes for x in self._open.values()) + tensor.nbytes > self._limit:
            self._flush()
        self._open[name] = tensor
        self._bytes += tensor.nbytes

    def close(self) -> None:
        self._flush()
        count = len(self._written)
        names = [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)] if count > 1 else [SINGLE]
        for i, name in enumerate(names):
            self._part(i).replace(self._folder / name)
        if count > 1:
            table = {tensor: name for name, tensors in zip(names, self._written, strict=True) for tensor in tensors}
            index = {"metadata": {"total_size": self._bytes}, "weight_map": table}
            (self._folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

    def _flush(self) -> None:
        save_file(self._open, str(self._part(len(self._written))), metadata={"format": "pt"})
        self._written.append(list(self._open))
        self._open = {}

    def _part(self, number: int) -> Path:
        return self._folder / f"part-{number}.tmp"

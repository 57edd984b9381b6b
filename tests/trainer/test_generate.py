"""Generation: a cache changes no token, in any mode, and a trained toy model speaks."""

import pytest
import torch
from tests.trainer.pool import Pool
from tests.trainer.steps import make_step

from packhouse.trainer.generate import generate
from packhouse.trainer.log import quiet
from packhouse.trainer.model import InternLM2, ModelConfig
from packhouse.trainer.optim import TrainConfig
from packhouse.trainer.parallel import ModeName, ShardedModel, build, make_groups, plain
from packhouse.trainer.step import micro_loss
from packhouse.trainer.train import train

SHAPE = ModelConfig(32, 2, num_heads=8, num_kv_heads=2, ffn_size=48, vocab_size=64)
PROMPT = [5, 9, 33]
POEM = list(b"the fruit comes in, is washed, and packed.")


def sharpen(sharded: ShardedModel) -> None:
    """Make the likeliest token clear: initial weights give nearly equal logits."""
    with torch.no_grad():
        for name, parameter in sharded.model.named_parameters():
            if parameter.ndim > 1:
                parameter.mul_(12 if "output" in name else 6)


def without_cache(model: InternLM2, new_tokens: int) -> list[int]:
    ids = list(PROMPT)
    for _ in range(new_tokens):
        borders = torch.tensor([0, len(ids)], dtype=torch.int32)
        logits = model(torch.tensor([ids]), borders, torch.arange(len(ids)), len(ids))
        ids.append(int(logits[0, -1].argmax()))
    return ids[len(PROMPT) :]


def speak(name: ModeName, tp: int, wp: int | None, temperature: float) -> tuple[list[int], list[int], bool]:
    """Ids of the mode, those of the plain model, and whether the mode's own loss still works afterwards."""
    model = build(SHAPE, make_groups(tp, wp), name, seed=2)
    reference = plain(InternLM2(SHAPE, seed=2))
    for one in (model, reference):
        sharpen(one)
    ids = [generate(one, PROMPT, 12, temperature=temperature, seed=7) for one in (model, reference)]
    targets = torch.arange(16)[None]
    loss = micro_loss(model, {"input_ids": targets}, targets, 16)
    return ids[0], ids[1], bool(torch.isfinite(loss))


@pytest.mark.parametrize(
    ("name", "tp", "wp"), [("mtp", 2, None), ("msp", 2, None), ("fsp", 2, None), ("isp", 4, 4), ("isp", 2, 4)]
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_mode_gives_the_plain_model_s_tokens(
    pool: Pool, name: ModeName, tp: int, wp: int | None, temperature: float
) -> None:
    for ids, expected, works in pool.run(4, speak, name, tp, wp, temperature):
        assert ids == expected
        assert len(set(ids)) > 3
        assert works


def test_a_cache_changes_no_token() -> None:
    model = plain(InternLM2(SHAPE, seed=2))
    sharpen(model)
    expected = without_cache(model.model, 12)
    assert generate(model, PROMPT, 12) == expected
    assert len(set(expected)) > 3
    assert generate(model, PROMPT, 12, stop=[expected[4]]) == expected[: expected.index(expected[4]) + 1]


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="the prompt is empty"):
        generate(plain(InternLM2(SHAPE)), [], 3)


def test_a_trained_toy_model_speaks() -> None:
    model = InternLM2(ModelConfig(48, 2, num_heads=4, num_kv_heads=2, ffn_size=96, vocab_size=128))
    step = make_step([[[*POEM, 0]]], len(POEM) + 1)
    train(model, [step] * 60, TrainConfig(steps=60, peak_lr=1e-2, warmup_steps=5), log=quiet)
    assert bytes(generate(plain(model), list(b"the f"), 80, stop=[0])).startswith(bytes(POEM[5:]))

"""Text from a model: one token after another, with the keys and values of those before kept in a cache."""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from packhouse.trainer.attention import LayerCache
from packhouse.trainer.parallel.sharded import ShardedModel


@torch.no_grad()
def generate(
    sharded: ShardedModel,
    prompt: Sequence[int],
    new_tokens: int,
    *,
    stop: Collection[int] = (),
    temperature: float = 0.0,
    seed: int = 0,
) -> list[int]:
    """The ids that follow `prompt`: at most `new_tokens`, ended by the first id in `stop`, which is included.

    With `temperature` 0 the likeliest id is taken, else one is drawn, from `seed`. Collective in every mode: all ranks
    pass the same arguments and get the same ids. Sequences are whole on every rank, since one token cannot be cut;
    weights, and in `isp` the heads of the cache, stay cut. Raises ValueError for an empty prompt.
    """
    if not prompt:
        raise ValueError("the prompt is empty: start with at least one token, such as the beginning of a text")
    device = next(sharded.model.parameters()).device
    caches = [LayerCache() for _ in sharded.model.model.layers]
    generator = torch.Generator().manual_seed(seed)
    total, known, fresh = len(prompt) + new_tokens, 0, list(prompt)
    made: list[int] = []
    training = sharded.model.training
    sharded.model.eval()
    with sharded.whole_sequences():
        while len(made) < new_tokens and (not made or made[-1] not in stop):
            ids = torch.tensor([fresh], device=device)
            positions = torch.arange(known, known + len(fresh), device=device)
            borders = torch.tensor([0, total], dtype=torch.int32, device=device)
            logits = sharded.model(ids, borders, positions, total, caches)[0, -1].float().cpu()
            known += len(fresh)
            fresh = [_choose(logits, temperature, generator)]
            made += fresh
    sharded.model.train(training)
    return made


def _choose(logits: Tensor, temperature: float, generator: torch.Generator) -> int:
    if temperature <= 0:
        return int(logits.argmax())
    return int(torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator))

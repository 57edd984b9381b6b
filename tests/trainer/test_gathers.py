"""Weights sent ahead: in the order in which they are used, at most two layers' at a time, and freed."""

import weakref
from typing import Any
from unittest import mock

import pytest
import torch
from tests.trainer.pool import Pool
from tests.trainer.steps import make_step, random_samples

from packhouse.trainer.model import ModelConfig
from packhouse.trainer.parallel import Options, build, isp, make_groups
from packhouse.trainer.parallel import gathers as gathers_module
from packhouse.trainer.parallel.gathers import Gathers, Pass
from packhouse.trainer.step import micro_batches, micro_loss

LAYERS = 4
NAMES = ["wqkv", "wo", "w1", "w3", "w2"]
Event = tuple[str, str]


class Watched(Gathers):
    """Remembers what is sent and taken, and how many gathered weights are alive at once."""

    events: list[Event]
    alive: set[object]
    peak: int

    def _start(self, name: str) -> Any:
        self.events.append(("send", short(name)))
        wait, number = super()._start(name), object()
        self.alive.add(number)
        self.peak = max(self.peak, len(self.alive))

        def watched() -> Any:
            whole = wait()
            weakref.finalize(whole, self.alive.discard, number)
            return whole

        return watched

    def take(self, name: str, *, backward: bool = False) -> Any:
        self.events.append(("take", short(name)))
        return super().take(name, backward=backward)


def short(name: str) -> str:
    parts = name.split(".")
    return f"{parts[2]}.{parts[-1]}" if "layers" in parts else parts[-1]


def watch(options: Options) -> tuple[list[Event], list[Event], int, int, float]:
    """Events forward and backward, the peak of weights alive, what is left over, and the loss."""
    config = ModelConfig(32, LAYERS, num_heads=4, num_kv_heads=2, ffn_size=48, vocab_size=64)
    made: list[Watched] = []

    def create(*args: Any, **kwargs: Any) -> Watched:
        made.append(Watched(*args, **kwargs))
        made[-1].events, made[-1].alive, made[-1].peak = [], set(), 0
        return made[-1]

    with mock.patch.object(isp, "Gathers", create):
        sharded = build(config, make_groups(2, 2), "isp", options, seed=5)
    (watched,) = made
    step = make_step([random_samples([9, 7], 64)], 16)
    ((pack, targets),) = micro_batches(*step, torch.device("cpu"))
    loss = micro_loss(sharded, pack, targets, 14)
    forward = list(watched.events)
    watched.events = []
    torch.autograd.backward(loss)
    return forward, watched.events, watched.peak, len(watched.alive) + len(watched.pending), loss.item()


def order(events: list[Event], kind: str) -> list[str]:
    return [name for what, name in events if what == kind]


def test_weights_are_sent_in_the_order_in_which_they_are_used(pool: Pool) -> None:
    forward, backward, *_ = pool.run(2, watch, Options())[0]
    layers = [f"{layer}.{name}" for layer in range(LAYERS) for name in NAMES]
    assert order(forward, "take") == ["tok_embeddings", *layers, "output"]
    assert order(forward, "send") == order(forward, "take")
    assert order(backward, "take") == ["output", *layers[::-1]]
    assert order(backward, "send") == order(backward, "take")


@pytest.mark.parametrize("layer", range(1, LAYERS))
def test_a_layer_is_sent_while_the_one_before_it_computes(pool: Pool, layer: int) -> None:
    forward, backward, *_ = pool.run(2, watch, Options())[0]
    sent = forward.index(("send", f"{layer}.wqkv"))
    assert forward.index(("take", f"{layer - 1}.wo")) < sent < forward.index(("take", f"{layer - 1}.w1"))
    returned = backward.index(("send", f"{layer - 1}.w2"))
    assert backward.index(("take", f"{layer}.w2")) < returned < backward.index(("take", f"{layer}.w3"))


@pytest.mark.parametrize(("options", "peak"), [(Options(), 10), (Options(overlap=False), 1)])
@pytest.mark.parametrize("recompute_layers", [0, LAYERS])
def test_gathered_weights_are_freed_after_use(pool: Pool, options: Options, peak: int, recompute_layers: int) -> None:
    options = Options(True, options.overlap, recompute_layers)
    for _, _, most, left, _ in pool.run(2, watch, options):
        assert most == peak
        assert left == 0


def test_sending_ahead_changes_no_number(pool: Pool) -> None:
    losses = {pool.run(2, watch, Options(True, overlap, n))[0][-1] for overlap in (True, False) for n in (0, 2)}
    assert len(losses) == 1


def test_a_recomputed_layer_is_sent_for_each_of_its_passes() -> None:
    table = gathers_module._following([["e"], ["a", "b"], ["c", "d"], ["o"]], frozenset({1}))
    assert table["o", Pass.BACKWARD] == [("d", Pass.BACKWARD), ("c", Pass.BACKWARD)]
    assert table["d", Pass.BACKWARD] == [("a", Pass.RECOMPUTE), ("b", Pass.RECOMPUTE)]
    assert table["b", Pass.RECOMPUTE] == [("b", Pass.BACKWARD), ("a", Pass.BACKWARD)]
    assert {key[1] for key in table if key[0] in "cd"} == {Pass.FORWARD, Pass.BACKWARD}
    assert ("o", Pass.FORWARD) not in table

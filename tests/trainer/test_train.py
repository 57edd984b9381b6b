"""The loop: cuts into micro-batches change nothing, bad steps are named, and it learns."""

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from packhouse.client.errors import Mismatch
from packhouse.trainer.log import StepLog, print_step
from packhouse.trainer.model import CONFIGS, InternLM2
from packhouse.trainer.optim import TrainConfig, make_optimizer
from packhouse.trainer.train import train

Make = Callable[..., Any]
TINY = replace(CONFIGS["tiny"], hidden_size=32, ffn_size=48, vocab_size=64)


def quiet(entry: StepLog) -> None:
    """A log that goes nowhere."""


@pytest.fixture
def steps(make_step: Make, random_samples: Make) -> list[Any]:
    """Four steps of two packs of 24 tokens."""
    packs = [random_samples([9, 5, 7], 64, seed) for seed in range(8)]
    return [make_step(packs[2 * step : 2 * step + 2], 24) for step in range(4)]


@pytest.mark.parametrize("cut", [[6], [1, 5], [2, 2, 2], [1, 1, 1, 1, 1, 1]])
def test_cuts_into_micro_batches_change_neither_loss_nor_weights(
    make_step: Make, random_samples: Make, cut: list[int]
) -> None:
    samples = iter(random_samples([16, 3, 9, 1, 12, 16], 64))
    batch = make_step([list(itertools.islice(samples, size)) for size in cut], 16 * max(cut))
    whole = make_step([random_samples([16, 3, 9, 1, 12, 16], 64)], 57)
    results = []
    for step in (whole, batch):
        model = InternLM2(TINY).double()
        results.append((train(model, [step], TrainConfig(steps=1), log=quiet)[0], model.state_dict()))
    (expected, expected_weights), (entry, weights) = results
    assert entry.loss == pytest.approx(expected.loss, abs=1e-10)
    assert entry.grad_norm == pytest.approx(expected.grad_norm, abs=1e-10)
    torch.testing.assert_close(weights, expected_weights, rtol=0, atol=1e-10)


@pytest.mark.parametrize("bf16", [False, True])
def test_loss_falls_on_a_repeated_corpus(steps: list[Any], bf16: bool) -> None:
    config = TrainConfig(steps=60, peak_lr=1e-2, warmup_steps=5, schedule="cosine", bf16=bf16)
    model, dtypes = InternLM2(TINY), set()
    model.output.register_forward_hook(lambda module, args, logits: dtypes.add(logits.dtype))
    logs = train(model, itertools.cycle(steps[:1]), config, log=quiet)
    assert dtypes == {torch.bfloat16 if bf16 else torch.float32}
    assert len(logs) == 60
    assert logs[0].loss == pytest.approx(math.log(64), abs=0.2)
    assert logs[-1].loss < 0.2


def test_the_update_is_clipped_to_the_global_norm(steps: list[Any]) -> None:
    model = InternLM2(TINY).double()
    before = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    config = TrainConfig(steps=1, peak_lr=0.5, clip_norm=0.01)
    model.output.weight.grad = torch.ones_like(model.output.weight)  # left over from before: it must not count
    entry = train(model, steps, config, optimizer=torch.optim.SGD(model.parameters(), lr=9.0), log=quiet)[0]
    moved = torch.nn.utils.parameters_to_vector(model.parameters()).detach() - before
    assert 0.1 < entry.grad_norm < 5
    assert moved.norm().item() == pytest.approx(0.5 * 0.01, rel=1e-4)


@pytest.mark.parametrize(("where", "value"), [("input_ids", 64), ("input_ids", -1), ("labels", 70), ("labels", -5)])
def test_ids_outside_the_vocabulary_are_refused(steps: list[Any], where: str, value: int) -> None:
    data, labels = steps[0]
    (data["input_ids"] if where == "input_ids" else labels)[1, 3] = value
    name = where.replace("_", " ").rstrip("s")
    with pytest.raises(Mismatch, match=rf"{name} {value} in step 0 is outside the model's vocabulary of 64: train"):
        train(InternLM2(TINY), steps, TrainConfig(steps=4), log=quiet)


def poison(model: InternLM2, steps: list[Any], step: int, pack: int) -> None:
    """Make one pack of one step overflow, by a token that occurs nowhere else."""
    for data, _ in steps:
        data["input_ids"][data["input_ids"] == 7] = 8
    steps[step][0]["input_ids"][pack, 0] = 7
    with torch.no_grad():
        model.model.tok_embeddings.weight[7] = math.inf


def test_a_gradient_that_is_not_finite_is_skipped_and_named(steps: list[Any]) -> None:
    model, weights = InternLM2(TINY), []
    poison(model, steps, step=1, pack=1)
    logs = train(
        model, steps, TrainConfig(steps=4), log=lambda entry: weights.append(model.output.weight.detach().clone())
    )
    assert [bool(entry.skipped) for entry in logs] == [False, True, False, False]
    assert logs[1].step == 1
    assert logs[1].skipped == "gradient norm is nan, loss is not finite in packs [1]"
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[1], weights[2])
    assert all(entry.loss < 5 for entry in logs[2:])


def test_skipping_for_ever_is_an_error(steps: list[Any]) -> None:
    model = InternLM2(TINY)
    poison(model, steps, step=0, pack=0)
    with pytest.raises(FloatingPointError, match="steps up to 2 gave 3 gradients in a row that are not finite"):
        train(model, itertools.cycle(steps[:1]), TrainConfig(steps=9, max_skips=2), log=quiet)


def test_a_step_without_trained_tokens_changes_nothing(make_step: Make, random_samples: Make) -> None:
    model = InternLM2(TINY)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    step = make_step([random_samples([5, 6], 64)], 12, untrained=[0])
    entry = train(model, [step], TrainConfig(steps=1), log=quiet)[0]
    assert (entry.loss, entry.grad_norm, entry.skipped) == (0, 0, "no trained token")
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


def test_a_pack_without_trained_tokens_adds_nothing(make_step: Make, random_samples: Make) -> None:
    packs = [random_samples([9, 3], 64, seed) for seed in range(2)]
    losses = [
        train(InternLM2(TINY), [make_step(some, 16, untrained=[1])], TrainConfig(steps=1), log=quiet)[0]
        for some in (packs, packs[:1])
    ]
    assert losses[0].loss == losses[1].loss
    assert losses[0].grad_norm == losses[1].grad_norm


def test_the_mean_of_micro_batch_means_leaves_out_packs_that_train_nothing(
    make_step: Make, random_samples: Make
) -> None:
    packs = [random_samples(lengths, 64) for lengths in ([9, 3], [16], [2])]
    means = TrainConfig(steps=1, loss_reduction="micro_batch")
    alone = [train(InternLM2(TINY), [make_step([pack], 16)], means, log=quiet)[0].loss for pack in packs]
    (entry,) = train(InternLM2(TINY), [make_step([*packs, packs[0]], 16, untrained=[3])], means, log=quiet)
    assert entry.loss == pytest.approx(sum(alone) / 3, abs=1e-6)
    (by_token,) = train(InternLM2(TINY), [make_step(packs, 16)], TrainConfig(steps=1), log=quiet)
    weights = [10, 15, 1]
    expected = sum(weight * loss for weight, loss in zip(weights, alone, strict=True)) / 26
    assert by_token.loss == pytest.approx(expected, abs=1e-6)


def test_a_resumed_run_is_the_unbroken_one(steps: list[Any]) -> None:
    config, whole, broken = TrainConfig(steps=4, warmup_steps=3, schedule="cosine"), InternLM2(TINY), InternLM2(TINY)
    for number, (data, _) in enumerate(steps):
        data["step"] = number
    expected = train(whole, steps, config, log=quiet)
    optimizer = make_optimizer(broken, config)
    logs = [entry for part in (steps[:2], steps[2:]) for entry in train(broken, part, config, optimizer=optimizer)]
    assert [(x.step, x.loss, x.lr) for x in logs] == [(x.step, x.loss, x.lr) for x in expected]
    torch.testing.assert_close(broken.state_dict(), whole.state_dict(), rtol=0, atol=0)


def test_training_stops_at_its_last_step_without_asking_for_another_batch(steps: list[Any]) -> None:
    batches = iter(steps)
    assert [entry.step for entry in train(InternLM2(TINY), batches, TrainConfig(steps=3), log=quiet)] == [0, 1, 2]
    assert len(list(batches)) == 1
    steps[0][0]["step"] = 3
    assert train(InternLM2(TINY), steps[:1], TrainConfig(steps=3), log=quiet) == []


def test_rates_count_all_tokens_and_the_trained_ones(steps: list[Any]) -> None:
    clock = itertools.count(step=2).__next__
    for entry in train(InternLM2(TINY), steps, TrainConfig(steps=4), log=quiet, clock=clock):
        assert (entry.tokens_per_s, entry.trained_tokens_per_s) == (2 * 24 / 2, 2 * (8 + 4 + 6) / 2)


def test_a_line_names_the_step_and_why_it_was_skipped(capsys: pytest.CaptureFixture[str]) -> None:
    entry = StepLog(12, 3.25, 0.5, 3e-4, 1234.0, 1000.0)
    print_step(entry)
    print_step(replace(entry, grad_norm=math.nan, skipped="gradient norm is nan"))
    plain, skipped = capsys.readouterr().out.splitlines()
    line = "step 12 loss 3.2500 grad norm 0.500 lr 3.00e-04 1,234 tokens/s (1,000 trained)"
    assert " ".join(plain.split()) == line
    assert skipped.endswith("skipped: gradient norm is nan")

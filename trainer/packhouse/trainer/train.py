"""The training loop: one optimizer step for every step of a plan, with every trained token weighing the same."""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from packhouse.client.errors import Mismatch
from packhouse.client.layouts import load_micro_batch, packed_data_normalizer
from packhouse.client.pack import IGNORE
from packhouse.trainer.loss import count_trained_tokens, cross_entropy
from packhouse.trainer.model import InternLM2
from packhouse.trainer.optim import TrainConfig, learning_rate, make_optimizer


@dataclass(frozen=True, slots=True)
class StepLog:
    """What one step did.

    `loss` is the mean over the step's trained tokens and `grad_norm` the norm before clipping. The rates count the time
    since the previous step ended, waiting for data included; `tokens_per_s` counts padding, `trained_tokens_per_s` what
    is trained. `skipped` says why the weights were left alone, and is empty where they were updated.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens_per_s: float
    trained_tokens_per_s: float
    skipped: str = ""


def print_step(entry: StepLog) -> None:
    """Print a step as one line: the default logger of `train`."""
    line = (
        f"step {entry.step:>6}  loss {entry.loss:8.4f}  grad norm {entry.grad_norm:8.3f}  lr {entry.lr:.2e}  "
        f"{entry.tokens_per_s:,.0f} tokens/s ({entry.trained_tokens_per_s:,.0f} trained)"
    )
    print(f"{line}  skipped: {entry.skipped}" if entry.skipped else line, flush=True)


def train(
    model: InternLM2,
    batches: Iterable[Sequence[Any]],
    config: TrainConfig,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    log: Callable[[StepLog], None] = print_step,
    clock: Callable[[], float] = time.perf_counter,
) -> list[StepLog]:
    """Train until the batches or `config.steps` are used up; returns the log of every step.

    A batch is one step in the `internevo` layout, `[data, labels]`: `data["input_ids"]` (micro_num, P) int64,
    `data["cu_seqlens"]` a list of micro_num (n+1,) int32, `data["indexes"]` (micro_num, P) int64, `labels`
    (micro_num, P) int64; `data["step"]`, if present, is the plan step, else steps count from 0.
    Pass the `optimizer` whose state a resumed run goes on with. A step with a gradient that is not finite, or with no
    trained token, leaves weights and optimizer as they were and says so in its log.
    Raises Mismatch for ids outside the model's vocabulary and FloatingPointError after more than `config.max_skips`
    steps in a row without a finite gradient.
    """
    optimizer = optimizer or make_optimizer(model, config)
    model.train()
    logs: list[StepLog] = []
    skips, started = 0, clock()
    for count, (data, labels) in enumerate(batches):
        step = int(data.get("step", count))
        if step >= config.steps:
            break
        check_vocabulary(data["input_ids"], labels, model.config.vocab_size, step)
        optimizer.zero_grad()
        losses = accumulate_gradients(model, data, labels, bf16=config.bf16)
        trained, lr = count_trained_tokens(labels), learning_rate(config, step)
        norm, skipped = update(model, optimizer, lr, config.clip_norm, losses, trained)
        now = clock()
        rates = labels.numel() / (now - started), trained / (now - started)
        started = now
        entry = StepLog(step, math.fsum(losses), norm, lr, *rates, skipped)
        log(entry)
        logs.append(entry)
        skips = 0 if math.isfinite(norm) else skips + 1
        if skips > config.max_skips:
            raise FloatingPointError(
                f"steps up to {step} gave {skips} gradients in a row that are not finite: "
                "go back to a checkpoint before them, or lower peak_lr"
            )
        if step + 1 >= config.steps:
            break
    return logs


def accumulate_gradients(model: InternLM2, data: dict[str, Any], labels: Tensor, *, bf16: bool = False) -> list[float]:
    """Run every micro-batch forward and backward; gradients add up in the parameters.

    Returns each micro-batch's part of the step's loss: their sum is the mean over the step's trained tokens.
    """
    device = next(model.parameters()).device
    trained = count_trained_tokens(labels)
    losses = []
    for pack, targets in micro_batches(data, labels, device):
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=bf16):
            logits = model(pack["input_ids"], pack["cu_seqlens"], pack["indexes"], pack["max_seqlen"])
            loss = cross_entropy(logits, targets, trained)
        torch.autograd.backward(loss)
        losses.append(loss.detach())
    # One transfer at the end: reading each loss at once would make a GPU wait after every micro-batch.
    values: list[float] = torch.stack(losses).tolist()
    return values


def micro_batches(
    data: dict[str, Any], labels: Tensor, device: torch.device
) -> Iterator[tuple[dict[str, Any], Tensor]]:
    """The packs of a step one by one, as the model takes them, on `device`."""
    batch = [{"step": 0, **data}, labels]
    for offset in range(len(labels)):
        pack, targets = packed_data_normalizer(*load_micro_batch(batch, offset))
        moved = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in pack.items()}
        yield moved, targets.to(device)


def update(
    model: InternLM2,
    optimizer: torch.optim.Optimizer,
    lr: float,
    clip_norm: float,
    losses: Sequence[float],
    trained: int,
) -> tuple[float, str]:
    """Clip the gradients by their global norm and step; returns that norm and, if the step was skipped, why."""
    parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
    total_norm = get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
    norm, skipped = float(total_norm), ""
    if not math.isfinite(norm):
        packs = [index for index, loss in enumerate(losses) if not math.isfinite(loss)]
        skipped = f"gradient norm is {norm}" + (f", loss is not finite in packs {packs}" if packs else "")
    elif trained == 0:
        skipped = "no trained token"
    else:
        clip_grads_with_norm_(parameters, clip_norm, total_norm)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
    return norm, skipped


def check_vocabulary(input_ids: Tensor, labels: Tensor, vocab_size: int, step: int) -> None:
    """Raise Mismatch for an input id or trained label outside [0, vocab_size).

    Labels are looked at too: a pack's last may be a token of the next pack.
    """
    for name, ids in (("input id", input_ids), ("label", labels.masked_fill(labels == IGNORE, 0))):
        low, high = (int(bound) for bound in ids.aminmax())
        if low < 0 or high >= vocab_size:
            raise Mismatch(
                f"{name} {low if low < 0 else high} in step {step} is outside the model's vocabulary of {vocab_size}",
                "train a model with the vocabulary of the dataset's tokenizer, or plan over another dataset",
            )

"""What a step did, and where it is told: the console, a file of JSON lines, TensorBoard."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class StepLog:
    """What one step did, over all ranks.

    `loss` is the step's, by its reduction, and `grad_norm` the norm before clipping. The rates count the time since the
    previous step ended, waiting for data included; `tokens_per_s` counts padding, `trained_tokens_per_s` what is
    trained. `skipped` says why the weights were left alone, and is empty where they were updated. `mfu` is the share of
    the devices' peak, 0 where that is not known.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens_per_s: float
    trained_tokens_per_s: float
    skipped: str = ""
    mfu: float = 0.0


Sink = Callable[[StepLog], None]


def print_step(entry: StepLog) -> None:
    """Print a step as one line: the default logger of `train`."""
    line = (
        f"step {entry.step:>6}  loss {entry.loss:8.4f}  grad norm {entry.grad_norm:8.3f}  lr {entry.lr:.2e}  "
        f"{entry.tokens_per_s:,.0f} tokens/s ({entry.trained_tokens_per_s:,.0f} trained)"
    )
    line += f"  MFU {entry.mfu:.1%}" if entry.mfu else ""
    print(f"{line}  skipped: {entry.skipped}" if entry.skipped else line, flush=True)


def quiet(entry: StepLog) -> None:
    """A log that goes nowhere: what all ranks but one use."""


class JsonLines:
    """Appends one JSON object per line to a file, flushed at once; numbers that are not finite become null."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115

    def __call__(self, entry: StepLog) -> None:
        self.write(asdict(entry))

    def write(self, values: dict[str, Any]) -> None:
        """Append any object, such as an evaluation."""
        finite = {name: None if value != value or value in (1e999, -1e999) else value for name, value in values.items()}
        self._file.write(json.dumps(finite, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class TensorBoard:
    """Writes TensorBoard's event files; raises ModuleNotFoundError where the package `tensorboard` is not installed."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder))

    def __call__(self, entry: StepLog) -> None:
        for name, value in asdict(entry).items():
            if name not in ("step", "skipped"):
                self._writer.add_scalar(f"train/{name}", value, entry.step)

    def write(self, values: dict[str, Any]) -> None:
        """Add an evaluation's loss."""
        self._writer.add_scalar("evaluation/loss", values["evaluation_loss"], values["step"])

    def close(self) -> None:
        self._writer.close()

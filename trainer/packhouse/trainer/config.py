"""The settings of a run, read from a TOML file: typed, and with every unknown key refused."""

import json
import tomllib
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from packhouse.client.errors import InvalidRequest
from packhouse.trainer.hf import load_config
from packhouse.trainer.model import CONFIGS, ModelConfig
from packhouse.trainer.optim import TrainConfig
from packhouse.trainer.parallel import ModeName

_CLOSED = ConfigDict(extra="forbid")
Positive = Annotated[int, Field(ge=1)]
NotNegative = Annotated[int, Field(ge=0)]


@dataclass(frozen=True, slots=True)
class ModelSection:
    """`[model]`: a known shape by `name`, with other values for some of its fields; or a public checkpoint in `hf`."""

    __pydantic_config__: ClassVar[ConfigDict] = _CLOSED
    name: Literal["tiny", "1.8b", "7b", "20b"] = "tiny"
    seed: int = 0
    hf: Path | None = None
    vocab_size: Positive | None = None
    num_layers: Positive | None = None
    rope_interleaved: bool | None = None
    rope_factor: float | None = None
    max_position: Positive | None = None

    def shape(self) -> ModelConfig:
        """The model's shape; that of a public checkpoint is the one it comes with."""
        base = CONFIGS[self.name] if self.hf is None else load_config(self.hf)
        names = {one.name for one in fields(ModelConfig)} & {one.name for one in fields(self)}
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return replace(base, **given)


@dataclass(frozen=True, slots=True)
class DataSection:
    """`[data]`: a plan, the store it lies in, or the service that has it, and how many processes build batches.

    `at_end` is what happens when `train.steps` is more than the plan has: "error" refuses to start, "stop" trains what
    there is, with the schedule ending there, and "repeat" goes over the plan again, its steps in a new order.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _CLOSED
    plan: str
    store: Path | None = None
    service: str | None = None
    workers: NotNegative = 0
    at_end: Literal["error", "stop", "repeat"] = "error"

    def __post_init__(self) -> None:
        if self.store is None and self.service is None:
            raise ValueError("data has neither store nor service: name the folder of the store, or the service's URL")


@dataclass(frozen=True, slots=True)
class ParallelSection:
    """`[parallel]`: the mode, its sizes (`tp` is also the sequence size), and how its activations are kept.

    `timeout` is how many seconds a rank waits for another one before it ends with an error.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _CLOSED
    mode: ModeName = "mtp"
    tp: Positive = 1
    wp: Positive | None = None
    parallel_output: bool = True
    overlap: bool = True
    recompute_layers: NotNegative = 0
    timeout: Positive = 600


@dataclass(frozen=True, slots=True)
class CheckpointSection:
    """`[checkpoint]`: every how many steps one is kept in `folder`, and how many of them stay; the last step always."""

    __pydantic_config__: ClassVar[ConfigDict] = _CLOSED
    folder: Path
    every: Positive = 1000
    keep: Positive = 3
    export: Path | None = None
    """Where the trained model goes in the public layout, when the run ends."""


@dataclass(frozen=True, slots=True)
class EvaluationSection:
    """`[evaluation]`: the plan's last `steps` are held out, or the first ones of another `plan` are taken."""

    __pydantic_config__: ClassVar[ConfigDict] = _CLOSED
    steps: Positive
    every: Positive = 100
    plan: str | None = None


@dataclass(frozen=True, slots=True)
class LogSection:
    """`[log]`: where metrics go besides the console."""

    __pydantic_config__: ClassVar[ConfigDict] = _CLOSED
    jsonl: Path | None = None
    tensorboard: Path | None = None
    every: Positive = 1
    """Every how many steps the console has a line; the files get every step."""


@dataclass(frozen=True, slots=True)
class RunConfig:
    """A whole run."""

    __pydantic_config__: ClassVar[ConfigDict] = _CLOSED
    data: DataSection
    train: TrainConfig
    model: ModelSection = field(default_factory=ModelSection)
    parallel: ParallelSection = field(default_factory=ParallelSection)
    checkpoint: CheckpointSection | None = None
    evaluation: EvaluationSection | None = None
    log: LogSection = field(default_factory=LogSection)


def read_config(path: Path) -> RunConfig:
    """Read a TOML file; raises InvalidRequest that names every key that is unknown, missing or of the wrong type."""
    try:
        values: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InvalidRequest(f"the configuration {path} cannot be read ({error})", "give a TOML file") from error
    try:
        # As JSON, so that types are strict where they matter and lists may still become tuples. A date becomes text,
        # which no setting takes for a date.
        return TypeAdapter(RunConfig).validate_json(json.dumps(values, default=str), strict=True)
    except ValidationError as error:
        faults = [f"{'.'.join(map(str, fault['loc'])) or 'it'}: {fault['msg']}" for fault in error.errors()]
        raise InvalidRequest(f"the configuration {path} is not usable ({'; '.join(faults)})", "correct it") from error

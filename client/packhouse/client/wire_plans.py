"""REST models of plans: what one is asked for, what it is, and the report of how good it is."""

from typing import Annotated, Literal, Self

from pydantic import Field

from packhouse.client.wire import Wire


class CostModel(Wire):
    """Cost of a segment of n tokens: ``token`` · n + ``square`` · n². The default is a 7B dense model's shape."""

    token: Annotated[int, Field(ge=0)] = 24576
    square: Annotated[int, Field(ge=0)] = 1

    @classmethod
    def of_model(cls, hidden: int, ffn: int, heads: int, kv_heads: int, layers: int = 1, vocab: int = 0) -> Self:
        """Return the cost model of a dense decoder with SwiGLU and causal attention, in multiply-adds over ``hidden``.

        A layer's matrices take hidden · (2 hidden + 2 hidden · kv_heads / heads + 3 ffn) a token, its attention
        hidden · n² for n tokens (two products of a triangle); the head is spread over the layers.
        """
        return cls(token=2 * hidden + 2 * hidden * kv_heads // heads + 3 * ffn + vocab // layers, square=1)


Strategy = Literal["none", "soft", "hard", "internevo", "internevo_unpacked", "best_fit", "balanced", "preset"]


class PlanSpec(Wire):
    """What a plan is asked for; with the datasets' content it decides the plan's id."""

    datasets: Annotated[list[str], Field(min_length=1, max_length=10_000)]
    weights: list[Annotated[float, Field(ge=0)]] | None = None
    """Share of each dataset in the tokens of the plan; None takes each dataset whole. With weights or dataset_epochs
    a pack holds samples of one dataset, and any run of packs holds each dataset's share to within two packs."""
    dataset_epochs: list[Annotated[float, Field(ge=0, le=10_000)]] | None = None
    """Passes over each dataset; 1.5 takes each sample once or twice. Not together with weights."""
    strategy: Strategy = "best_fit"
    pack_length: Annotated[int, Field(ge=1, le=2**31 - 1)]
    """Tokens of a pack."""
    seq_len: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    """For internevo the longest segment, for internevo_unpacked the longest sentence, of which a pack holds
    pack_length / seq_len; None means pack_length."""
    max_segments: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    """Most segments of a pack."""
    chunk_size: Annotated[int, Field(ge=1, le=2**31 - 1)] = 10_000
    """For soft: samples that are packed on their own (XTuner's pack_chunk_size)."""
    extra_buffer: Annotated[int, Field(ge=0, le=100_000)] = 100
    """For soft: samples that are searched to fill a pack (XTuner's pack_extra_buffer_size)."""
    preset: str | None = None
    """For preset: the id of the packs that were stored."""
    order: Literal["shuffled", "length_grouped"] = "shuffled"
    """Order of the packs: as the strategy leaves them, or packs of like cost side by side over the ranks."""
    ranks: Annotated[int, Field(ge=1, le=2**20)] = 1
    micro_batches: Annotated[int, Field(ge=1, le=2**20)] = 1
    """A step holds ranks · micro_batches packs."""
    overlong: Literal["truncate", "split", "drop", "error"] = "split"
    """What happens to a sample longer than a pack (internevo_unpacked: than seq_len); under split, hard and internevo
    cut samples of any length at pack ends."""
    tail: Literal["pad", "drop"] = "pad"
    """What happens to a last step that is not full: filled with empty packs, or left out and counted."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = 0
    """Order of the samples; None keeps the datasets' own."""
    epochs: Annotated[int, Field(ge=1, le=10_000)] = 1
    """Passes over the samples, each in an order of its own."""
    cost: CostModel = CostModel()

    @property
    def sample_limit(self) -> int:
        """Tokens that a sample may have before ``overlong`` applies; under truncate, what lies behind is cut off."""
        return (self.seq_len or self.pack_length) if self.strategy == "internevo_unpacked" else self.pack_length


class Preset(Wire):
    """Packs brought along, as they were stored."""

    id: str


class Histogram(Wire):
    """How many lie at or below each bound and above the one before."""

    bounds: list[float]
    counts: list[int]


class CostCurve(Wire):
    """Cost of the ranks over the steps, as shares of a step's mean over the plan; each point is a run of steps."""

    steps: list[int]
    """First step of each point."""
    low: list[float]
    """The least loaded rank."""
    mean: list[float]
    high: list[float]
    """The most loaded rank."""


class Balance(Wire):
    """Greatest cost of a rank over the mean of the ranks, over the steps: 1 is even."""

    step_mean: float
    step_p99: float
    micro_mean: float
    """Ranks that wait for each other at every micro-batch: sum of the greatest over sum of the means."""
    micro_p99: float


class DatasetShare(Wire):
    """What a plan takes of one dataset."""

    id: str
    samples: int
    """Draws; a sample that is taken twice counts twice."""
    tokens: int
    share: float
    """Of the plan's tokens."""
    epochs: float


class PlanReport(Wire):
    """How good a plan is, before a GPU is taken."""

    samples: int
    """Samples asked for, over all epochs."""
    tokens: int
    """Tokens in packs."""
    trained_tokens: int
    """Labels in packs; where not exact, an upper bound."""
    trained_exact: bool
    """Whether the datasets' numbers tell each step's labels exactly: they do but where a sample that is trained in part
    is cut."""
    packs: int
    """Packs with at least one segment."""
    empty_packs: int
    """Packs added so that the last step is whole."""
    steps: int
    segments: int
    padding_tokens: int
    padding: float
    """Share of all slots, empty packs included, that hold padding."""
    fill: float
    """Share of the slots that hold tokens in steps without an empty pack; a padded last step is left out."""
    zero_length: int
    """Samples without a token, left out."""
    truncated_samples: int
    truncated_tokens: int
    split_samples: int
    dropped_samples: int
    dropped_tokens: int
    """Tokens left out with dropped samples and with a dropped last step."""
    segments_per_pack_mean: float
    segments_per_pack_max: int
    imbalance_mean: float
    """Mean over steps of (greatest cost of a rank / mean cost of the ranks)."""
    imbalance_p99: float
    micro_imbalance_mean: float
    """The same where ranks wait for each other at every micro-batch."""
    micro_imbalance_p99: float
    excess: float
    """Cost of the most loaded ranks at each micro-batch over the mean cost, whole plan, less 1: what waiting adds."""
    compared: dict[str, Balance]
    """Other orders and strategies on the same samples."""
    randomness: float | None
    """Variance over steps of the share of tokens in samples longer than an eighth of a pack, over what random steps
    would have: 1 is random, more means that like samples meet; null where there are too few steps to tell."""
    shards_per_step_mean: float
    datasets: list[DatasetShare]
    lengths: Histogram
    """Tokens of the samples."""
    fills: Histogram
    """Share of each pack that holds tokens."""
    cost: CostCurve


class Plan(Wire):
    """A plan as the service tells it."""

    id: str
    spec: PlanSpec
    report: PlanReport
    stored: bool
    """False for a dry run."""

"""REST models: what goes over the wire. Unknown fields are refused; numbers are finite."""

from datetime import date, datetime
from enum import StrEnum
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field

DEFAULT_URL = "http://127.0.0.1:7077"


class Wire(BaseModel):
    """Base of the models: frozen, no unknown field, no NaN."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


Form = Literal["text", "messages", "conversations", "instruction", "completion", "tokens"]


class JobSpec(Wire):
    """A caching job: these sources, this tokenizer, this way from record to tokens."""

    model_config = ConfigDict(strict=True)  # neither true nor "9" is a number

    sources: Annotated[list[str], Field(min_length=1)]
    """Files, folders or globs, as absolute paths on the service's machine. Order counts; folders sort by bytes."""
    tokenizer: str
    """Folder with a tokenizer.json, as an absolute path on the service's machine."""
    format: Form | None = None
    """Form of the records; None goes by kind, and without that recognises it from the first records."""
    kind: Literal["text", "chat", "tokens"] | None = None
    """What a record becomes; None follows its form: tokens and text stay what they are, all others are chats."""
    text_field: str = "text"
    messages_field: str = "messages"
    fields: dict[str, str] = {}
    """Where the records have other field names than their form: prompt, completion, instruction, input, output, …"""
    documents: Literal["file", "paragraph"] = "file"
    """What a document of a .txt file is: the whole file, or what stands between blank lines."""
    template: str | None = None
    """Chat template as Jinja text, or the name of a built-in one; None uses the tokenizer's own."""
    template_date: Annotated[date, Field(strict=False)] | None = None
    """The day that a template is told when it asks for today's; None means 2025-01-01."""
    control_tokens: Literal["text", "allow", "reject"] | None = None
    """What a control token written inside a record does: it is encoded as plain text, it is the token, or the record is
    kept out. None means text for chats and allow for text."""
    loss: Literal["all", "assistant", "last_turn", "completion"] | None = None
    """Which tokens are trained; None means all for text, assistant for chat, and for tokens what the record says."""
    untrained: Literal["quarantine", "drop"] = "quarantine"
    """What happens to a record that has no token to be trained; dropped ones are counted, and are not bad records."""
    add_bos: bool = False
    add_eos: bool | None = None
    """Whether each sample ends with the end-of-sequence id; None means yes for text and no for chats and tokens."""
    max_length: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    overflow: Literal["truncate", "truncate_left", "drop", "split", "error"] = "truncate"
    """What happens to a sample longer than max_length; truncate keeps its start, truncate_left its end, and split makes
    samples of its pieces."""
    on_bad_record: Literal["quarantine", "fail"] = "quarantine"
    max_bad_share: Annotated[float, Field(ge=0, le=1)] = 0.01
    """Share of bad records above which the job fails."""
    name: str | None = None
    """A label for people; it changes nothing."""


class JobState(StrEnum):
    """Life of a job: queued → running → succeeded, failed or cancelled."""

    QUEUED = "queued"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def final(self) -> bool:
        """Whether the job has ended."""
        return self in (JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED)


class Progress(Wire):
    """Where a job stands: sums over the blocks done so far."""

    phase: Literal["waiting", "scanning", "encoding", "done"] = "waiting"
    sources: int = 0
    blocks: int = 0
    blocks_done: int = 0
    hits: int = 0
    misses: dict[str, int] = {}
    """Blocks that had to be encoded, by reason."""
    rows: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    records: int = 0
    rejected: dict[str, int] = {}
    """Records kept out, by reason."""
    dropped: int = 0
    truncated: int = 0
    truncated_tokens: int = 0
    split: int = 0
    """Records longer than max_length that became several samples."""
    fragments: int = 0
    """Samples that those became."""
    bytes: int = 0
    """Length of all sources."""
    bytes_done: int = 0
    """Of those, what is in the dataset so far, by a hit or by work."""
    bytes_read: int = 0
    """Source bytes that this job read."""
    seconds: float = 0
    mb_per_s: float = 0
    """Millions of source bytes encoded per second since encoding began; 0 when every block was a hit."""
    eta_seconds: float | None = None
    engines: dict[str, int] = {}
    """Blocks encoded, by engine."""
    audited: int = 0
    """Rows that were encoded by both engines and compared."""
    fallbacks: dict[str, int] = {}
    """Slower paths taken, by reason."""


class Problem(BaseModel):
    """An RFC 9457 problem document."""

    model_config = ConfigDict(extra="allow", frozen=True)

    type: str = "about:blank"
    title: str
    status: int
    detail: str
    remedy: str = ""


class Job(Wire):
    """A job as the service tells it."""

    id: str
    state: JobState
    spec: JobSpec
    recipe: str
    """Recipe digest."""
    version: int
    """Grows with every change of the job; the id of its events."""
    progress: Progress
    warnings: list[str] = []
    """What the job does that its submitter may not expect."""
    dataset: str | None = None
    error: Problem | None = None
    created_at: datetime
    started_at: datetime | None = None
    finished_at: datetime | None = None


class Rejected(Wire):
    """A record kept out of a dataset."""

    source: str
    line: int
    """From 1, blank lines included."""
    offset: int
    """Bytes from the start of the source."""
    length: int
    """Bytes of the line."""
    reason: str
    detail: str


class PreviewSpec(Wire):
    """A request to see what the first records of a job would become."""

    job: JobSpec
    records: Annotated[int, Field(ge=1, le=100)] = 5


class PreviewPiece(Wire):
    """Tokens that follow each other, and are trained or not alike."""

    text: str
    """What they decode to; bytes of a character that the next piece ends are shown as U+FFFD."""
    tokens: int
    trained: bool


class PreviewSample(Wire):
    """A sample as a job would make it."""

    line: int
    """Of its record in the source, from 1."""
    ids: list[int]
    trained: list[bool]
    pieces: list[PreviewPiece]


class Preview(Wire):
    """What the first records of a job's first source become, and what is kept out and why."""

    source: str
    form: Form
    kind: str
    loss: str
    warnings: list[str]
    samples: list[PreviewSample]
    rejected: list[Rejected]
    dropped: int
    truncated: int
    split: int
    seconds: float


class Dataset(Wire):
    """A dataset as the service tells it."""

    id: str
    recipe_digest: str
    recipe: dict[str, Any]
    vocab_size: int
    shards: int
    rows: int
    tokens: int
    trained_tokens: int
    attention_cost: int
    bytes: int


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

    datasets: Annotated[list[str], Field(min_length=1)]
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

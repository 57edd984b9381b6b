"""REST models: what goes over the wire. Unknown fields are refused; numbers are finite."""

from datetime import date, datetime
from enum import StrEnum
from typing import Annotated, Any, Literal

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
    """Files, folders or globs, as absolute paths on the service's machine, or ``s3://bucket/key``, a prefix or a glob
    in a bucket. Order counts; folders sort by bytes."""
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
    tokenize: str | None = None
    """A function that turns records into tokens in place of the built-in forms: ``module:Class`` of a module that the
    service allows, or ``vision``, chats with pictures."""
    tokenize_options: dict[str, Any] = {}
    """Keyword arguments of its class."""
    file_roots: dict[str, str] = {}
    """Where the files lie that records name, as absolute paths on the service's machine: a folder for names that begin
    with a text, which it stands for; "" is for all others. Without one, names are looked up beside the source."""
    on_bad_record: Literal["quarantine", "fail"] = "quarantine"
    max_bad_share: Annotated[float, Field(ge=0, le=1)] = 0.01
    """Share of bad records above which the job fails."""
    name: str | None = None
    """A label for people; it changes nothing."""
    priority: Annotated[int, Field(ge=-3, le=3)] = 0
    """Each step up doubles the share of the workers that the job is given; above 0 it takes the role admin."""


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


class Change(Wire):
    """A field of a recipe that is not what it was."""

    field: str
    old: Any = None
    new: Any = None


class Miss(Wire):
    """Blocks that are not in the cache, and why."""

    reason: str
    """``new_block``: never seen; ``evicted``, ``damaged``, ``audit``: made before by this very recipe, and gone, cut or
    no longer trusted; ``files``: seen with other content of the files that its records name; else the first field of
    the recipe that changed."""
    blocks: int
    bytes: int
    recipe: str | None = None
    """Digest of the recipe compared with: of the latest ones that these blocks were made by, the nearest."""
    changes: list[Change] = []
    """All fields that differ from it."""


class Progress(Wire):
    """Where a job stands: sums over the blocks done so far."""

    phase: Literal["waiting", "scanning", "encoding", "done"] = "waiting"
    sources: int = 0
    blocks: int = 0
    blocks_done: int = 0
    hits: int = 0
    shared: int = 0
    """Of those, blocks that were made while this job ran, by another job or by a worker that died."""
    misses: dict[str, int] = {}
    """Blocks that had to be encoded, by reason."""
    why: list[Miss] = []
    """The same with what changed, old and new value; of a job that has ended."""
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
    submitter: str = "anyone"
    """Name of the token that it was submitted with."""
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

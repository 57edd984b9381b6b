"""The recipe: everything that decides how a record becomes tokens, and its digest.

What cannot change a token stands elsewhere: engine, worker count, paths, names, limits on bad records.
"""

import json
import os
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Literal, Self

from packhouse.client.digest import canonical_json, digest_bytes, digest_json
from packhouse.client.errors import Damaged, InvalidRequest, NotFound, Unavailable
from packhouse.client.format import FORMAT_VERSION
from packhouse.client.store import ReadStore, Store
from packhouse.client.wire import JobSpec
from packhouse.worker.render import ChatTemplate


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a record becomes tokens. Fields that do not matter for a kind are None, so that they change no key."""

    format: int
    kind: Literal["text", "chat"]
    field: str
    """Field of a record that holds its text or its messages."""
    tokenizer: str
    """Digest of the tokenizer's content."""
    template: str | None
    loss: Literal["all", "assistant"]
    bos_id: int | None
    """Id that starts each sample; None adds none."""
    eos_id: int | None
    """Id that ends each sample; None adds none."""
    max_length: int | None
    overflow: Literal["truncate", "drop", "error"] | None

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        """Build from the JSON form."""
        return cls(**value)

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form."""
        return asdict(self)

    @property
    def digest(self) -> str:
        """xxh3-128 of the canonical JSON."""
        return digest_json(self.to_json())

    @property
    def masked(self) -> bool:
        """Whether shards carry a loss mask: not when every token is trained."""
        return self.loss != "all"

    def shard_key(self, block_digest: str) -> str:
        """Return the key of the shard that holds a block under this recipe."""
        return digest_json([self.digest, block_digest])


@dataclass(frozen=True)
class TokenizerContent:
    """A tokenizer by content: what its folder held when it was loaded, stripped of state left over from use."""

    backend: dict[str, Any]
    """tokenizer.json without truncation and padding."""
    special_tokens: dict[str, str]
    """Named special tokens: bos_token, eos_token, …"""

    @cached_property
    def digest(self) -> str:
        """xxh3-128 of the content. The chat template is not in: it stands in the recipes that render by it."""
        return digest_bytes(self._dump())

    @cached_property
    def vocab_size(self) -> int:
        """One more than the greatest id, added tokens included."""
        vocab = self.backend["model"]["vocab"]
        ids = list(vocab.values()) if isinstance(vocab, dict) else [len(vocab) - 1]
        return 1 + max([*ids, *(int(token["id"]) for token in self.backend["added_tokens"])])

    def _dump(self) -> bytes:
        return canonical_json({"backend": self.backend, "special_tokens": self.special_tokens})

    def save(self, store: Store) -> None:
        """Put the content into the store, where workers find it by digest."""
        path = tokenizer_path(self.digest)
        try:
            if digest_bytes(store.open(path)) == self.digest:
                return
        except NotFound:
            pass
        try:
            store.write(path, self._dump())
        except OSError as error:
            remedy = "free or repair it and submit the job again"
            raise Unavailable(f"the store cannot be written ({error.strerror})", remedy) from None

    @classmethod
    def load(cls, store: ReadStore, digest: str) -> Self:
        """Read what ``save`` wrote; raise ``Damaged`` unless it is the content with that digest."""
        data = store.open(tokenizer_path(digest))
        if digest_bytes(data) != digest:
            raise Damaged(f"the stored tokenizer {digest} is not what was stored", "submit the job again")
        return cls(**json.loads(bytes(data)))


def tokenizer_path(digest: str) -> str:
    """Return the store key of a tokenizer's content."""
    return f"tokenizers/{digest}.json"


@dataclass(frozen=True, slots=True)
class ResolvedRecipe:
    """A recipe made from a job's spec, checked as far as can be without reading data."""

    recipe_: Recipe
    vocab_size: int
    warnings: tuple[str, ...] = ()

    @property
    def recipe(self) -> dict[str, Any]:
        """The recipe's JSON form."""
        return self.recipe_.to_json()

    @property
    def digest(self) -> str:
        """The recipe's digest."""
        return self.recipe_.digest


def resolve(spec: JobSpec, store: Store) -> ResolvedRecipe:
    """Turn a spec into a recipe and keep its tokenizer in the store.

    Raises ``InvalidRequest`` for a tokenizer that cannot be loaded and for options that do not fit it. Never goes to
    a model hub, and never runs code that comes with a tokenizer.
    """
    content, template = load_tokenizer(spec.tokenizer)
    chat = spec.kind == "chat"
    source = _chat_template(spec, template) if chat else None
    loss = spec.loss or ("assistant" if chat else "all")
    if loss == "assistant" and not chat:
        raise InvalidRequest("loss 'assistant' needs kind 'chat', and the job's is 'text'", "set loss to 'all'")
    recipe = Recipe(
        format=FORMAT_VERSION,
        kind=spec.kind,
        field=spec.messages_field if chat else spec.text_field,
        tokenizer=content.digest,
        template=source,
        loss=loss,
        bos_id=_special_id(content, "bos") if spec.add_bos else None,
        eos_id=_special_id(content, "eos") if (not chat if spec.add_eos is None else spec.add_eos) else None,
        max_length=spec.max_length,
        overflow=None if spec.max_length is None else spec.overflow,
    )
    warnings = _check_template(source, content, loss) if source is not None else ()
    content.save(store)
    return ResolvedRecipe(recipe, content.vocab_size, warnings)


def _chat_template(spec: JobSpec, own: str | None) -> str:
    source = own if spec.template is None else spec.template
    if source is None:
        detail = f"the tokenizer {spec.tokenizer!r} has no chat template"
        raise InvalidRequest(detail, "give one as 'template', or set kind to 'text'")
    if "strftime_now" in source:
        detail = "the chat template asks for today's date, which would make tokens differ from day to day"
        raise InvalidRequest(detail, "give one as 'template' that does not call strftime_now")
    return source


def _check_template(source: str, content: TokenizerContent, loss: str) -> tuple[str, ...]:
    """Find out early that a template cannot be used; return warnings. Rendering here is bounded in time."""
    template = ChatTemplate(source, content.special_tokens)
    template.check()
    warnings = []
    if template.fast is None:
        warnings.append(f"the chat template is rendered by the slower renderer: {template.reason}")
    if loss == "assistant" and not template.generation:
        end = template.markers.end
        if not any(token["content"] in end for token in content.backend["added_tokens"]):
            warnings.append(f"the chat template ends an assistant's turn by {end!r}, which is not a token of its own")
    return tuple(warnings)


def _special_id(content: TokenizerContent, name: str) -> int:
    token = content.special_tokens.get(f"{name}_token")
    added = {item["content"]: int(item["id"]) for item in content.backend["added_tokens"]}
    vocab = content.backend["model"]["vocab"]
    found = added.get(token or "", vocab.get(token) if isinstance(vocab, dict) else None)
    if found is None:
        raise InvalidRequest(f"the tokenizer has no {name} token", f"set add_{name} to false")
    return int(found)


def load_tokenizer(folder: str) -> tuple[TokenizerContent, str | None]:
    """Load the tokenizer in ``folder``; return its content and its chat template, if it has one.

    Raises ``InvalidRequest`` at once for a name that is not a folder: a model hub is never asked.
    """
    if not os.path.isabs(folder) or not os.path.isdir(folder):
        detail = f"the tokenizer {folder!r} is not a folder on the service's machine"
        raise InvalidRequest(detail, "give the absolute path of one with a tokenizer.json; hub names are not fetched")
    signature = []
    try:
        for path in sorted(Path(folder).iterdir()):
            info = path.stat()
            signature.append((path.name, info.st_size, info.st_mtime_ns, info.st_ctime_ns, info.st_ino))
    except OSError as error:
        detail = f"the tokenizer in {folder!r} cannot be read ({error.strerror}: {error.filename!r})"
        raise InvalidRequest(detail, "check the folder") from None
    return _load_tokenizer(folder, tuple(signature))


@lru_cache(maxsize=16)
def _load_tokenizer(folder: str, signature: tuple[Any, ...]) -> tuple[TokenizerContent, str | None]:
    names = {entry[0] for entry in signature}
    if not names & {"tokenizer.json", "tokenizer.model", "vocab.json"}:
        raise InvalidRequest(f"the folder {folder!r} has no tokenizer.json", "save the tokenizer there first")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        backend = json.loads(tokenizer.backend_tokenizer.to_str())
    except Exception as error:  # the loaders raise anything, bare Exception included
        reason = (str(error).splitlines() or [type(error).__name__])[0][:300]
        detail = f"the tokenizer in {folder!r} cannot be loaded ({reason})"
        raise InvalidRequest(detail, "check that AutoTokenizer loads it without remote code") from None
    backend["truncation"] = backend["padding"] = None
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items() if isinstance(token, str)}
    template = tokenizer.chat_template
    return TokenizerContent(backend, dict(sorted(special.items()))), template if isinstance(template, str) else None

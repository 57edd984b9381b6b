"""The recipe: everything that decides how a record becomes tokens, and its digest.

What cannot change a token stands elsewhere: engine, worker count, paths, names, limits on bad records.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Literal, Self

from packhouse.client.digest import canonical_json, digest_bytes, digest_json
from packhouse.client.errors import Damaged, InvalidRequest, NotFound, Unavailable
from packhouse.client.format import FORMAT_VERSION
from packhouse.client.store import ReadStore, Store
from packhouse.client.wire import Form, JobSpec
from packhouse.worker.builtin_templates import BUILT_IN
from packhouse.worker.choices import KINDS, LossRule, check_kind, form_of, loss_of
from packhouse.worker.forms import NEEDED, field_names
from packhouse.worker.libraries import auto_tokenizer
from packhouse.worker.render import ChatTemplate


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a record becomes tokens. Fields that do not matter for a kind are None, so that they change no key."""

    format: int
    kind: Literal["text", "chat", "tokens"]
    field: str
    """Field of a record that holds its text, its messages or its ids."""
    tokenizer: str
    """Digest of the tokenizer's content."""
    template: str | None
    loss: LossRule
    bos_id: int | None
    """Id that starts each sample; None adds none."""
    eos_id: int | None
    """Id that ends each sample; None adds none."""
    max_length: int | None
    overflow: Literal["truncate", "truncate_left", "drop", "split", "error"] | None
    record: Form = "text"
    """Form of a record."""
    fields: tuple[tuple[str, str], ...] = ()
    """Names of the form's other fields where they are not the usual ones."""
    now: str | None = None
    """The day that the template is told when it asks, YYYY-MM-DD."""
    control_tokens: Literal["text", "allow", "reject"] = "allow"
    untrained: Literal["quarantine", "drop"] | None = None

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        """Build from the JSON form."""
        return cls(**{**value, "fields": tuple(map(tuple, value.get("fields", ())))})

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form."""
        return asdict(self) | {"fields": [list(pair) for pair in self.fields]}

    @property
    def digest(self) -> str:
        """xxh3-128 of the canonical JSON."""
        return digest_json(self.to_json())

    @property
    def names(self) -> dict[str, str]:
        """The names of all fields of the form in a record."""
        return field_names(self.record, {next(iter(NEEDED[self.record])): self.field} | dict(self.fields))

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


def resolve(spec: JobSpec, store: Store, first: Sequence[Mapping[str, Any]] = ()) -> ResolvedRecipe:
    """Turn a spec into a recipe and keep its tokenizer in the store.

    ``first`` are the sources' first records, by which their form is recognised where the spec does not state it.
    Raises ``InvalidRequest`` for a tokenizer that cannot be loaded and for options that do not fit it. Never goes to
    a model hub, and never runs code that comes with a tokenizer.
    """
    content, template = load_tokenizer(spec.tokenizer)
    form, fields, seen = form_of(spec, first)
    kind = spec.kind or KINDS.get(form, "chat")
    check_kind(kind, form)
    source = _chat_template(spec, template) if kind == "chat" else None
    loss = loss_of(spec.loss, kind, form)
    names = field_names(form, fields)
    main = next(iter(NEEDED[form]))
    usual = field_names(form, {})
    recipe = Recipe(
        format=FORMAT_VERSION,
        kind=kind,
        field=names.pop(main),
        tokenizer=content.digest,
        template=source,
        loss=loss,
        bos_id=_special_id(content, "bos") if spec.add_bos else None,
        eos_id=_special_id(content, "eos") if (kind == "text" if spec.add_eos is None else spec.add_eos) else None,
        max_length=spec.max_length,
        overflow=None if spec.max_length is None else spec.overflow,
        record=form,
        fields=tuple(sorted((name, value) for name, value in names.items() if value != usual[name])),
        now=(spec.template_date or PINNED_DAY).isoformat() if source and "strftime_now" in source else None,
        control_tokens="allow" if kind == "tokens" else spec.control_tokens or ("text" if kind == "chat" else "allow"),
        untrained=None if loss == "all" else spec.untrained,
    )
    warnings = _check_template(source, content, recipe) if source is not None else ()
    if source is None and spec.template is not None:
        warnings = (f"the template is not used: the records become {kind}",)
    content.save(store)
    return ResolvedRecipe(recipe, content.vocab_size, (*seen, *warnings))


PINNED_DAY = date(2025, 1, 1)
"""The day that a template is told which asks for today's, unless the job says another."""


def _chat_template(spec: JobSpec, own: str | None) -> str:
    source = own if spec.template is None else BUILT_IN.get(spec.template, spec.template)
    if source is None:
        names = ", ".join(repr(name) for name in BUILT_IN)
        detail = f"the tokenizer {spec.tokenizer!r} has no chat template"
        raise InvalidRequest(detail, f"give one as 'template' (built in: {names}), or set kind to 'text'")
    if "{" not in source:
        names = ", ".join(repr(name) for name in BUILT_IN)
        raise InvalidRequest(
            f"there is no built-in template {source[:80]!r}", f"take one of {names}, or a text in Jinja"
        )
    return source


def _check_template(source: str, content: TokenizerContent, recipe: Recipe) -> tuple[str, ...]:
    """Find out early that a template cannot be used; return warnings. Rendering here is bounded in time."""
    template = ChatTemplate(source, content.special_tokens, now=recipe.now)
    template.check()
    warnings = []
    if template.fast is None:
        warnings.append(f"the chat template is rendered by the slower renderer: {template.reason}")
    if recipe.masked and not template.generation:
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
    loader = auto_tokenizer()
    try:
        tokenizer = loader.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        backend = json.loads(tokenizer.backend_tokenizer.to_str())
    except Exception as error:  # the loaders raise anything, bare Exception included
        reason = (str(error).splitlines() or [type(error).__name__])[0][:300]
        detail = f"the tokenizer in {folder!r} cannot be loaded ({reason})"
        raise InvalidRequest(detail, "check that AutoTokenizer loads it without remote code") from None
    backend["truncation"] = backend["padding"] = None
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items() if isinstance(token, str)}
    template = tokenizer.chat_template
    return TokenizerContent(backend, dict(sorted(special.items()))), template if isinstance(template, str) else None

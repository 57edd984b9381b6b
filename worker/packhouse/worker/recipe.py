"""The recipe: everything that decides how a record becomes tokens, and its digest.

What cannot change a token stands elsewhere: engine, worker count, paths, names, limits on bad records.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from typing import Any, Literal, Self

from packhouse.client.digest import digest_json
from packhouse.client.errors import InvalidRequest
from packhouse.client.format import FORMAT_VERSION
from packhouse.client.store import Store
from packhouse.client.wire import Form, JobSpec
from packhouse.worker.builtin_templates import BUILT_IN
from packhouse.worker.choices import KINDS, LossRule, check_cut, check_kind, check_options, form_of, loss_of
from packhouse.worker.forms import NEEDED, field_names
from packhouse.worker.hf_tokenizer import hugging_face
from packhouse.worker.render import ChatTemplate
from packhouse.worker.tokenize_fn import Custom, check_module, describe, make, options_json, takes_tokenizer
from packhouse.worker.tokenizer_content import TokenizerContent, load_tokenizer, special_id

__all__ = ["PINNED_DAY", "Recipe", "ResolvedRecipe", "TokenizerContent", "load_tokenizer", "resolve"]


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
    tokenize: Custom | None = None
    """The function that makes tokens of records, which then have the form of its results."""

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        """Build from the JSON form."""
        custom = Custom.from_json(value["tokenize"]) if "tokenize" in value else None
        return cls(**{**value, "fields": tuple(map(tuple, value.get("fields", ()))), "tokenize": custom})

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form. Without a function it has no such field, as it had none before there were any."""
        value = asdict(self) | {"fields": [list(pair) for pair in self.fields]}
        del value["tokenize"]
        return value if self.tokenize is None else value | {"tokenize": self.tokenize.to_json()}

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
        return self.shard_keys([block_digest])[block_digest]

    def shard_keys(self, block_digests: Iterable[str]) -> dict[str, str]:
        """Return the keys of the shards that hold blocks under this recipe, by the blocks' digests."""
        own = self.digest
        return {block: digest_json([own, block]) for block in block_digests}


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


def resolve(
    spec: JobSpec, store: Store, first: Sequence[Mapping[str, Any]] = (), modules: Collection[str] = ()
) -> ResolvedRecipe:
    """Turn a spec into a recipe and keep its tokenizer in the store.

    ``first`` are the sources' first records, by which their form is recognised where the spec does not state it;
    ``modules`` those that tokenize functions may be imported from.
    Raises ``InvalidRequest`` for a tokenizer that cannot be loaded and for options that do not fit it. Never goes to
    a model hub, and never runs code that comes with a tokenizer.
    """
    content, template = load_tokenizer(spec.tokenizer)
    if spec.tokenize is not None:
        recipe = _custom(spec, content, template, check_module(spec.tokenize, modules))
        content.save(store)
        return ResolvedRecipe(recipe, content.vocab_size)
    if spec.tokenize_options or spec.file_roots:
        given = "tokenize_options" if spec.tokenize_options else "file_roots"
        raise InvalidRequest(f"{given} are given, and no tokenize function", "give it as tokenize, or leave them out")
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
        bos_id=special_id(content, "bos") if spec.add_bos else None,
        eos_id=special_id(content, "eos") if (kind == "text" if spec.add_eos is None else spec.add_eos) else None,
        max_length=spec.max_length,
        overflow=None if spec.max_length is None else spec.overflow,
        record=form,
        fields=tuple(sorted((name, value) for name, value in names.items() if value != usual[name])),
        now=_pinned_day(spec, source),
        control_tokens="allow" if kind == "tokens" else spec.control_tokens or ("text" if kind == "chat" else "allow"),
        untrained=None if loss == "all" else spec.untrained,
    )
    warnings = _check_template(source, content, recipe) if source is not None else ()
    if source is None and spec.template is not None:
        warnings = (f"the template is not used: the records become {kind}",)
    content.save(store)
    return ResolvedRecipe(recipe, content.vocab_size, (*seen, *warnings))


def _custom(spec: JobSpec, content: TokenizerContent, own: str | None, name: str) -> Recipe:
    """Return the recipe of a tokenize function, checked by making it here."""
    check_options(spec)
    source = now = None
    if takes_tokenizer(name):
        source = _chat_template(spec, own) if spec.template or own else None
        now = _pinned_day(spec, source)
    elif spec.template is not None:
        raise InvalidRequest(f"{name} takes no tokenizer, so no template either", "leave out template")
    custom = _described(name, spec.tokenize_options, content, source, now)
    check_cut(spec, custom)
    return Recipe(
        format=FORMAT_VERSION,
        kind="tokens",
        field="input_ids",
        tokenizer=content.digest,
        template=source,
        loss="given",
        bos_id=None,
        eos_id=None,
        max_length=spec.max_length,
        overflow=None if spec.max_length is None else spec.overflow,
        record="tokens",
        now=now,
        untrained=spec.untrained,
        tokenize=custom,
    )


_DESCRIBED: dict[str, Custom] = {}
_MAX_DESCRIBED = 64


def _described(
    name: str, options: Mapping[str, Any], content: TokenizerContent, source: str | None, now: str | None
) -> Custom:
    """Return how a recipe knows a function; it is made to be asked, once for the same arguments."""
    key = digest_json([name, options_json(options), content.digest, source, now])
    found = _DESCRIBED.pop(key, None)
    if found is None:
        found = describe(name, options, make(name, options, lambda: hugging_face(content, source, now)))
    _DESCRIBED[key] = found
    for old in list(_DESCRIBED)[:-_MAX_DESCRIBED]:
        _DESCRIBED.pop(old, None)
    return found


def _pinned_day(spec: JobSpec, source: str | None) -> str | None:
    return (spec.template_date or PINNED_DAY).isoformat() if source and "strftime_now" in source else None


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
    """Find out early that a template cannot be used; return warnings.

    Only the slow renderer renders here, which is bounded in time and memory: this may be the service's own process.
    """
    template = ChatTemplate(source, content.special_tokens, fast=False, now=recipe.now)
    template.check()
    warnings = []
    parsed = ChatTemplate(source, content.special_tokens, now=recipe.now)
    if parsed.fast is None:
        warnings.append(f"the chat template is rendered by the slower renderer: {parsed.reason}")
    if recipe.masked:
        template.check_mask()
    if recipe.masked and not template.generation:
        end = template.markers.end
        if not any(token["content"] in end for token in content.backend["added_tokens"]):
            warnings.append(f"the chat template ends an assistant's turn by {end!r}, which is not a token of its own")
    return tuple(warnings)

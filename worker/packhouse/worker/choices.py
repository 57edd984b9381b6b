"""What a job's spec leaves open: the form of its records, what they become, and what is trained of them."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from packhouse.client.errors import InvalidRequest
from packhouse.client.wire import Form, JobSpec
from packhouse.worker.forms import NEEDED, field_names, recognise_all
from packhouse.worker.tokenize_fn import Custom

LossRule = Literal["all", "assistant", "last_turn", "completion", "given"]

KINDS: dict[Form, Literal["text", "chat", "tokens"]] = {"text": "text", "tokens": "tokens"}
_FITTING: dict[str, tuple[Form, ...]] = {
    "text": ("text", "completion", "instruction"),
    "chat": ("messages", "conversations", "instruction", "completion"),
    "tokens": ("tokens",),
}


def form_of(spec: JobSpec, first: Sequence[Mapping[str, Any]]) -> tuple[Form, dict[str, str], tuple[str, ...]]:
    """Return the form of the records and its field names, and what to tell of how it was recognised."""
    given = dict(spec.fields)
    if spec.text_field != "text":
        given.setdefault("text", spec.text_field)
    if spec.messages_field != "messages":
        given.setdefault("messages", spec.messages_field)
    if spec.format is not None:
        return spec.format, _of(spec.format, given), ()
    form: Form = {"chat": "messages", "tokens": "tokens"}.get(spec.kind or "", "text")  # type: ignore[assignment]
    if given and (spec.kind is not None or not spec.fields):
        return form, _of(form, given), ()
    found = recognise_all(first) or _of_names(spec.fields)
    if found is None or (spec.kind is not None and found[0] not in _FITTING[spec.kind]):
        return form, _of(form, given), ()
    form, names = found
    usual = field_names(form, {})
    shown = ", ".join(repr(name) for name in names.values())
    told = (
        f"recognised from the first records: their form is {form!r}, with the field{'s' * (len(names) > 1)} {shown}",
    )
    return form, {name: value for name, value in names.items() if value != usual[name]} | given, told


def _of_names(given: Mapping[str, str]) -> tuple[Form, dict[str, str]] | None:
    """Return the form whose fields are all mapped, if there is one."""
    forms = (form for form, needed in NEEDED.items() if set(needed) <= set(given))
    return next(((form, dict(given)) for form in forms), None)


def _of(form: Form, given: dict[str, str]) -> dict[str, str]:
    """Leave out the names that belong to another form, which text_field and messages_field may do."""
    return {name: value for name, value in given.items() if name not in ("text", "messages") or name == form}


def check_kind(kind: str, form: Form) -> None:
    """Raise ``InvalidRequest`` where records of a form do not become what the job asks for."""
    if form not in _FITTING[kind]:
        fitting = " or ".join(repr(name) for name in _FITTING[kind])
        detail = f"records of the form {form!r} do not become {kind!r}"
        raise InvalidRequest(detail, f"leave out kind, or set format to {fitting}")


def loss_of(asked: str | None, kind: str, form: Form) -> LossRule:
    """Return the loss rule of a recipe; raise ``InvalidRequest`` for one that does not fit."""
    if kind == "tokens":
        if asked not in (None, "all"):
            raise InvalidRequest(f"loss {asked!r} does not fit kind 'tokens'", "leave it out: the records say it")
        return "all" if asked else "given"
    if kind == "chat":
        return asked or "assistant"  # type: ignore[return-value]
    if form == "text" and asked not in (None, "all"):
        raise InvalidRequest(f"loss {asked!r} needs kind 'chat', and the job's is 'text'", "set loss to 'all'")
    if form == "text" or asked == "all":
        return "all"
    return "completion"


_OF_FORMS = (
    *("format", "kind", "text_field", "messages_field", "fields"),
    *("control_tokens", "loss", "add_bos", "add_eos"),
)


def check_options(spec: JobSpec) -> None:
    """Raise ``InvalidRequest`` for what a job says of records that a tokenize function reads."""
    for name in _OF_FORMS:
        if getattr(spec, name) != JobSpec.model_fields[name].default:
            detail = f"{name} is {getattr(spec, name)!r}, and a tokenize function decides that by itself"
            raise InvalidRequest(detail, "leave it out; the function may take it among tokenize_options")


def check_cut(spec: JobSpec, custom: Custom) -> None:
    """Raise ``InvalidRequest`` where samples would be cut whose extra columns cannot be cut with them."""
    if custom.extra and spec.max_length is not None and spec.overflow not in ("drop", "error"):
        names = ", ".join(name for name, _ in custom.extra)
        raise InvalidRequest(
            f"overflow {spec.overflow!r} would cut samples, but not what their extra columns ({names}) hold",
            "set overflow to 'drop' or 'error', or cut in the function",
        )

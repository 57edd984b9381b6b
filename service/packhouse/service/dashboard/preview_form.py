"""The preview's form: from what was typed to a request, or to what is wrong with it."""

from collections.abc import Mapping
from typing import Any, get_args

from pydantic import ValidationError

from packhouse.client.errors import InvalidRequest
from packhouse.client.wire import Form, JobSpec, PreviewSpec
from packhouse.service.dashboard.form import fields

_CHOICES = ("kind", "documents", "control_tokens", "loss", "overflow")

CHOICES: Mapping[str, tuple[str, ...]] = {
    "format": get_args(Form),
    **{
        name: tuple(one for part in (field, *get_args(field)) for one in get_args(part) if isinstance(one, str))
        for name in _CHOICES
        for field in (JobSpec.model_fields[name].annotation,)
    },
}
"""What each field with choices may be."""
EMPTY: Mapping[str, str] = {
    "source": "",
    "tokenizer": "",
    "template": "",
    "max_length": "",
    "records": "5",
    "fields": "",
    "overflow": "truncate",
    "documents": "file",
    **dict.fromkeys(("format", "kind", "control_tokens", "loss"), ""),
}


def typed(body: bytes) -> dict[str, str]:
    """Return the fields of a form as they were typed, with the empty ones; raise ``InvalidRequest``."""
    given = fields(body)
    return {name: given.get(name, "") for name in EMPTY}


def filled(spec: JobSpec) -> dict[str, str]:
    """Return the form as it would be typed for a job."""
    known = {name: getattr(spec, name) for name in (*CHOICES, "tokenizer", "template", "max_length")}
    named = ", ".join(f"{name}={value}" for name, value in spec.fields.items())
    values = {**known, "source": spec.sources[0], "fields": named, "records": 5}
    return {name: "" if values[name] is None else str(values[name]) for name in EMPTY}


def request(form: Mapping[str, str]) -> PreviewSpec:
    """Return the request that a form makes; raise ``InvalidRequest``."""
    text = {name: value.strip() for name, value in form.items()}
    for name, what in (("source", "a source"), ("tokenizer", "a tokenizer")):
        if not text[name]:
            raise InvalidRequest(f"{what} is missing", "give its absolute path on the service's machine")
    job: dict[str, Any] = {name: text[name] for name in (*CHOICES, "tokenizer") if text[name]}
    job |= {"sources": [text["source"]], "fields": _fields(text["fields"])}
    if text["template"]:
        job["template"] = form["template"] if "{" in form["template"] else text["template"]
    if text["max_length"]:
        job["max_length"] = _whole(text["max_length"], "the longest sample")
    try:
        return PreviewSpec(job=JobSpec.model_validate(job), records=_whole(text["records"] or "5", "the records"))
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"]))
        raise InvalidRequest(f"{name}: {first['msg']} (got {str(first['input'])[:80]!r})", "correct it") from None


def _whole(text: str, what: str) -> int:
    if not text.isdecimal() or len(text) > 10:
        raise InvalidRequest(f"{what}: {text[:80]!r} is not a whole number", "write digits")
    return int(text)


def _fields(text: str) -> dict[str, str]:
    found = {}
    for pair in filter(None, (part.strip() for part in text.split(","))):
        name, is_pair, value = pair.partition("=")
        if not (name and is_pair and value):
            raise InvalidRequest(f"the field {pair[:80]!r} is not a pair", "write it as prompt=question")
        found[name.strip()] = value.strip()
    return found

"""The handshake: is this plan made for the trainer's tokenizer and vocabulary, and is a state of this plan?"""

import json
from operator import index
from typing import Any

from packhouse.client.digest import canonical_json, digest_bytes
from packhouse.client.errors import InvalidRequest, Mismatch, PackhouseError
from packhouse.client.format import read_manifest
from packhouse.client.plan import PlanFile, PlanHeader, PlanSource
from packhouse.client.remote import HttpPlan
from packhouse.client.store import ReadStore


def tokenizer_digest(tokenizer: Any) -> str:
    """Return the digest that recipes give to the content of a tokenizer, for one that is loaded.

    ``tokenizer`` is a fast Hugging Face tokenizer; a string is taken for the digest itself. Truncation and padding left
    over from use do not count. The tokenizer is only asked, so that no library for it is needed here. Raises
    ``InvalidRequest`` for anything else.
    """
    if isinstance(tokenizer, str):
        return tokenizer
    try:
        backend = json.loads(tokenizer.backend_tokenizer.to_str())
        special = {name: str(token) for name, token in tokenizer.special_tokens_map.items() if isinstance(token, str)}
    except AttributeError:
        raise InvalidRequest(
            f"{type(tokenizer).__name__} is not a fast tokenizer", "pass what AutoTokenizer loads, or its digest"
        ) from None
    backend["truncation"] = backend["padding"] = None
    return digest_bytes(canonical_json({"backend": backend, "special_tokens": dict(sorted(special.items()))}))


def check_tokenizer(header: PlanHeader, store: ReadStore, tokenizer: Any) -> None:
    """Raise ``Mismatch`` unless every dataset of the plan was made with ``tokenizer``, by content."""
    ours = tokenizer_digest(tokenizer)
    for dataset in header.datasets:
        theirs = read_manifest(store, dataset.id).recipe["tokenizer"]
        if ours != theirs:
            raise Mismatch(
                f"dataset {dataset.id} of plan {header.id} was made with tokenizer {theirs}, the trainer's is {ours}",
                "train with the tokenizer of the data, or cache the data with the trainer's",
            )


def check_vocabulary(header: PlanHeader, vocab_size: int) -> None:
    """Raise ``Mismatch`` where a dataset may hold an id that a model of ``vocab_size`` ids does not know."""
    for dataset in header.datasets:
        if dataset.vocab_size > vocab_size:
            raise Mismatch(
                f"dataset {dataset.id} has ids up to {dataset.vocab_size - 1}, and the model knows {vocab_size}",
                f"make the model's vocabulary {dataset.vocab_size} or larger",
            )


def check_state(plan: PlanSource, store: ReadStore, state: dict[str, Any]) -> int:
    """Return the step of a state of ``plan``; raise ``Mismatch`` for another plan's, saying in what they differ."""
    ours = plan.header
    try:
        theirs, step = state["plan"], index(state["step"])
    except (KeyError, TypeError):
        raise Mismatch(f"{state!r} is not a state of a data set", 'pass one like {"plan": id, "step": k}') from None
    if theirs != ours.id:
        raise Mismatch(
            f"the state belongs to plan {theirs} and this data set reads plan {ours.id}"
            + _difference(ours, _header(plan, theirs), store),
            "open the plan that the checkpoint names",
        )
    return step


def _header(plan: PlanSource, plan_id: str) -> PlanHeader | None:
    try:
        if isinstance(plan, PlanFile):
            return PlanFile.open(plan.store, plan_id).header
        return plan.other(plan_id).header if isinstance(plan, HttpPlan) else None
    except PackhouseError:
        return None


def _difference(ours: PlanHeader, theirs: PlanHeader | None, store: ReadStore) -> str:
    """Return what to add to a refusal: the tokenizer, else the datasets, else the fields of the spec that differ."""
    if theirs is None:
        return ", and the other is not at hand to say in what they differ"
    tokenizers = [_tokenizers(header, store) for header in (theirs, ours)]
    if tokenizers[0] != tokenizers[1]:
        return f"; its tokenizer is {', '.join(tokenizers[0])}, and this one's is {', '.join(tokenizers[1])}"
    datasets = [[dataset.id for dataset in header.datasets] for header in (theirs, ours)]
    if datasets[0] != datasets[1]:
        return f"; its datasets are {', '.join(datasets[0])}, and this one's are {', '.join(datasets[1])}"
    there, here = (header.spec.model_dump() for header in (theirs, ours))
    return "; they differ in " + ", ".join(
        f"{name} ({there[name]!r} there, {here[name]!r} here)" for name in here if here[name] != there[name]
    )


def _tokenizers(header: PlanHeader, store: ReadStore) -> list[str]:
    found = set()
    for dataset in header.datasets:
        try:
            found.add(str(read_manifest(store, dataset.id).recipe.get("tokenizer")))
        except PackhouseError:
            found.add("unknown")
    return sorted(found)

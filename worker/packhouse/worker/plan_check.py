"""What no data can satisfy in a request for a plan, each with its remedy."""

from packhouse.client.errors import InvalidRequest
from packhouse.client.wire_plans import PlanSpec

MAX_STEP_PACKS = 1 << 20
"""Packs of the largest step: a million accelerators with one pack each."""
MOST_LENGTH = 1 << 24
"""Longest pack of the strategies that count samples by length, some numbers for each length up to it."""
MOST_DRAWS = 1 << 32
"""Draws of the largest plan, which takes about 100 GB to build."""


class TooManyDraws(InvalidRequest):
    """A plan that draws more samples than whoever builds it has memory for."""


def check_draws(count: int, most: int) -> None:
    """Raise ``TooManyDraws`` for a plan of ``count`` draws where there is memory for ``most``."""
    if count > most:
        raise TooManyDraws(
            f"the plan would draw samples {count:,} times, over {most:,}",
            "ask for fewer epochs or less weight on small datasets, or plan in parts",
        )


def check_spec(spec: PlanSpec) -> None:
    """Raise ``InvalidRequest`` for fields that contradict each other, whatever the datasets hold."""
    _check_lengths(spec)
    _check_mixture(spec)
    if spec.ranks * spec.micro_batches > MAX_STEP_PACKS:
        raise InvalidRequest(
            f"a step of {spec.ranks} ranks × {spec.micro_batches} micro-batches would hold more than "
            f"{MAX_STEP_PACKS:,} packs",
            "lower one of them",
        )
    if (spec.strategy == "preset") != (spec.preset is not None):
        raise InvalidRequest(
            f"strategy {spec.strategy} and preset {spec.preset} do not go together",
            'name a stored preset under strategy "preset", and only there',
        )
    if spec.preset is not None and spec.max_segments is not None:
        raise InvalidRequest("a preset says itself how many segments a pack has", "leave max_segments out")
    if spec.strategy == "balanced" and spec.order != "shuffled":
        raise InvalidRequest(f"balanced packs have an order of their own, not {spec.order}", "leave the order out")
    if spec.seed is None and (spec.strategy == "balanced" or spec.order == "length_grouped"):
        name = "strategy balanced" if spec.strategy == "balanced" else "order length_grouped"
        raise InvalidRequest(f"{name} without a seed would run from long samples to short ones", "give a seed")
    step = (spec.cost.token + spec.cost.square * spec.pack_length) * spec.pack_length * spec.micro_batches * spec.ranks
    if step >= 2**63:
        raise InvalidRequest(
            f"a step may cost {step:,}, which is over 2**63", "make cost.token and cost.square smaller"
        )


def _check_lengths(spec: PlanSpec) -> None:
    if spec.strategy in ("best_fit", "balanced") and spec.pack_length > MOST_LENGTH:
        raise InvalidRequest(
            f"pack_length {spec.pack_length} is over the {MOST_LENGTH} of strategy {spec.strategy}",
            "lower it, or use hard, which takes any",
        )
    if spec.seq_len is None:
        return
    if spec.strategy not in ("internevo", "internevo_unpacked"):
        raise InvalidRequest(
            f"seq_len {spec.seq_len} has no meaning for strategy {spec.strategy}", "leave it out, or use internevo"
        )
    if spec.seq_len > spec.pack_length:
        raise InvalidRequest(
            f"seq_len {spec.seq_len} is longer than pack_length {spec.pack_length}",
            "lower it, or raise pack_length",
        )
    if spec.strategy == "internevo_unpacked" and spec.pack_length % spec.seq_len:
        raise InvalidRequest(
            f"pack_length {spec.pack_length} is not a multiple of seq_len {spec.seq_len}",
            "make it micro_bsz times seq_len",
        )


def _check_mixture(spec: PlanSpec) -> None:
    if spec.weights is None and spec.dataset_epochs is None:
        return
    if spec.weights is not None and spec.dataset_epochs is not None:
        raise InvalidRequest("weights and dataset_epochs each say how often samples are drawn", "give one of them")
    if spec.strategy == "preset":
        raise InvalidRequest("a preset says itself how often samples are drawn", "leave weights and epochs out")
    name, given = ("weights", spec.weights) if spec.weights is not None else ("dataset_epochs", spec.dataset_epochs)
    if given is None or len(given) != len(spec.datasets):
        raise InvalidRequest(
            f"there are {len(given or [])} {name} for {len(spec.datasets)} datasets", f"give {name} one for each"
        )

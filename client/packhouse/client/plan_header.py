"""What a plan says of itself: its request, its datasets, its parts and its report; its id, and where it is stored."""

from dataclasses import asdict, dataclass
from typing import Any, Self

from packhouse.client.digest import digest_json
from packhouse.client.errors import Damaged
from packhouse.client.format import FileInfo, Receipt
from packhouse.client.wire_plans import PlanReport, PlanSpec

PLAN_FORMAT = 2
ALGORITHM = 3
"""Version of what makes packs from lengths: any change of a plan's content must raise it."""


def plan_path(plan_id: str) -> str:
    """Return the store key of a plan's header and table of steps; it is written last."""
    return f"plans/{plan_id}.arrow"


def part_path(plan_id: str, number: int) -> str:
    """Return the store key of a part of a plan's packs."""
    return f"packs/{plan_id}/{number:06d}.arrow"


def plan_id(spec: PlanSpec) -> str:
    """Return the id of the plan that ``spec`` asks for; dataset ids stand for their content."""
    return content_id(ALGORITHM, spec.model_dump(mode="json"))


def content_id(algorithm: int, spec: dict[str, Any]) -> str:
    """Return the id of a plan that another version may have built, by its request as it is written."""
    return digest_json({"format": PLAN_FORMAT, "algorithm": algorithm, "spec": spec})


@dataclass(frozen=True, slots=True)
class PlanDataset:
    """A dataset as a plan knows it: enough to find and check its shards."""

    id: str
    recipe_digest: str
    vocab_size: int
    shards: tuple[Receipt, ...]


@dataclass(frozen=True, slots=True)
class PlanHeader:
    """All of a plan but its packs."""

    id: str
    spec: PlanSpec
    packs_per_step: int
    steps: int
    datasets: tuple[PlanDataset, ...]
    report: PlanReport
    algorithm: int = ALGORITHM
    steps_per_part: int = 1
    parts: tuple[FileInfo, ...] = ()
    """The files of the packs, in order: each holds ``steps_per_part`` steps, the last one the rest."""

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "format": PLAN_FORMAT,
            "algorithm": self.algorithm,
            "id": self.id,
            "spec": self.spec.model_dump(mode="json"),
            "packs_per_step": self.packs_per_step,
            "steps": self.steps,
            "datasets": [asdict(dataset) for dataset in self.datasets],
            "report": self.report.model_dump(mode="json"),
            "steps_per_part": self.steps_per_part,
            "parts": [asdict(part) for part in self.parts],
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        """Build from the JSON form; raise ``Damaged`` where it is not one, or not of this format."""
        try:
            if value["format"] != PLAN_FORMAT:
                raise ValueError(f"its format is {value['format']} and this client reads {PLAN_FORMAT}")
            datasets = tuple(
                PlanDataset(**{**dataset, "shards": tuple(Receipt.from_json(shard) for shard in dataset["shards"])})
                for dataset in value["datasets"]
            )
            return cls(
                id=value["id"],
                spec=PlanSpec.model_validate(value["spec"]),
                packs_per_step=value["packs_per_step"],
                steps=value["steps"],
                datasets=datasets,
                report=PlanReport.model_validate(value["report"]),
                algorithm=value["algorithm"],
                steps_per_part=value["steps_per_part"],
                parts=tuple(FileInfo(**part) for part in value["parts"]),
            )
        except (ValueError, KeyError, TypeError) as error:
            raise Damaged(f"the header of a plan cannot be used ({error})", "build the plan again") from error

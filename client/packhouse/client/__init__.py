"""packhouse.client: submit jobs, pull plans, stream packed batches."""

from typing import TYPE_CHECKING, Any

from packhouse.client.api import Client, JobFailed
from packhouse.client.errors import (
    Damaged,
    InvalidRequest,
    Mismatch,
    NotFound,
    PackhouseError,
    Unavailable,
)
from packhouse.client.store import LocalStore
from packhouse.client.wire import CostModel, Job, JobSpec, Plan, PlanSpec

if TYPE_CHECKING:
    from packhouse.client.dataset import PackedDataset

__all__ = [
    "Client",
    "CostModel",
    "Damaged",
    "InvalidRequest",
    "Job",
    "JobFailed",
    "JobSpec",
    "LocalStore",
    "Mismatch",
    "NotFound",
    "PackedDataset",
    "PackhouseError",
    "Plan",
    "PlanSpec",
    "Unavailable",
]


def __getattr__(name: str) -> Any:
    # The data set needs torch, which the bare client does without.
    if name == "PackedDataset":
        from packhouse.client.dataset import PackedDataset

        return PackedDataset
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""packhouse.client: submit jobs, pull plans, stream packed batches."""

from importlib import import_module
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
from packhouse.client.wire import Job, JobSpec
from packhouse.client.wire_plans import CostModel, Plan, PlanSpec

if TYPE_CHECKING:
    from packhouse.client.batches import Loader, loader
    from packhouse.client.dataset import Options, PackedDataset
    from packhouse.client.picture_runtime import Pictures

__all__ = [
    "Client",
    "CostModel",
    "Damaged",
    "InvalidRequest",
    "Job",
    "JobFailed",
    "JobSpec",
    "Loader",
    "LocalStore",
    "Mismatch",
    "NotFound",
    "Options",
    "PackedDataset",
    "PackhouseError",
    "Pictures",
    "Plan",
    "PlanSpec",
    "Unavailable",
    "loader",
]


# These need torch, which the bare client does without.
_TORCH = {
    "Loader": "packhouse.client.batches",
    "Options": "packhouse.client.dataset",
    "PackedDataset": "packhouse.client.dataset",
    "Pictures": "packhouse.client.picture_runtime",
    "loader": "packhouse.client.batches",
}


def __getattr__(name: str) -> Any:
    if name not in _TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_TORCH[name]), name)

"""Why a world ended: the first rank that fails leaves its reason where the others, which only lost a peer, find it."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from packhouse.client.errors import PackhouseError

KEY = "packhouse/first-failure"


class PeerFailed(PackhouseError):
    """This rank ends because another one did."""


@contextmanager
def first_failure_told() -> Iterator[None]:
    """Raise PeerFailed, with the first rank's reason, in place of what this rank fails with after another one did.

    The reason is left before this rank's groups are destroyed, so it is there when the others lose the connection.
    """
    try:
        yield
    except Exception as error:
        if not dist.is_initialized():
            raise
        reason = f"rank {dist.get_rank()}: {type(error).__name__}: {error}"
        first = _leave(reason)
        if first == reason:
            raise
        raise PeerFailed(f"this rank ended because another one did ({first})", "see to that one") from error


def _leave(reason: str) -> str:
    """The reason of the first rank that left one: `reason` itself where this is the first."""
    try:
        return dist.distributed_c10d._get_default_store().compare_set(KEY, "", reason).decode()
    except RuntimeError:  # the store went with the rank that served it
        return reason

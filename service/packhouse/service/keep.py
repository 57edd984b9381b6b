"""What stays in the store because it is young."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Keep:
    """What stays because it is young."""

    recent: float = 3600.0
    """Seconds since their last use that shards and datasets stay, whatever the budget."""
    plans: float = 7 * 24 * 3600.0
    """Seconds since its last use that a plan stays, and its datasets with it."""

"""Routes of health: whether the process lives, and whether it can take work."""

from fastapi import APIRouter

from packhouse.client.errors import Unavailable
from packhouse.service.parts import Given

router = APIRouter(tags=["health"])


@router.get("/livez")
async def live() -> dict[str, str]:
    """Answer as long as the process does."""
    return {"status": "alive"}


@router.get("/readyz")
def ready(parts: Given) -> dict[str, str]:
    """Answer with 503 and the reason until Ray and the database do their work."""
    parts.catalog.ping()
    if not parts.executor.healthy():
        raise Unavailable(
            "Ray does not answer",
            "it starts with the service in some seconds, and a cluster is joined again when its head is back; "
            "else see the service's log",
        )
    return {"status": "ready"}

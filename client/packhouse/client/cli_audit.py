"""``packhouse plan audit``: prove from the ranks' logs that each planned token was delivered exactly once."""

from pathlib import Path

import typer

from packhouse.client import console
from packhouse.client.api import Client
from packhouse.client.command import show
from packhouse.client.errors import InvalidRequest
from packhouse.client.ledger import audit
from packhouse.client.plan import PlanFile
from packhouse.client.store import LocalStore


def audit_plan(
    plans: list[str], logs: list[Path], store: Path | None, until: int | None, url: str | None, *, as_json: bool
) -> None:
    """Print what the logs prove, and end with 1 where that is not every token once.

    Plan and shards are read from the folder ``store``, else through the service.
    """
    if len(plans) != 1 or not logs:
        raise InvalidRequest(
            f"'plan audit' takes one plan and its logs, not {len(plans)} and {len(logs)}",
            "name the plan's id, and the log of every rank with --log",
        )
    if store is not None:
        local = LocalStore(store)
        found = audit(PlanFile.open(local, plans[0]), local, logs, until)
    else:
        with Client(url) as client:
            found = audit(client.open_plan(plans[0]), client.open_store(), logs, until)
    show(found, console.audit_summary(found), as_json=as_json)
    if not found.exact:
        raise typer.Exit(1)

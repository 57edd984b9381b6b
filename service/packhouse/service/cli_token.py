"""The commands ``packhouse token``: they work on the service's database itself, so the first token can be made by them.

They may run while the service does, which hears of it within a second.
"""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from packhouse.client import console
from packhouse.client.command import AsJson, show
from packhouse.client.wire_access import AuditEntry, NewToken, RoleName, Token, parse_lifetime
from packhouse.service.audit import Audit
from packhouse.service.catalog import Catalog
from packhouse.service.settings import Settings
from packhouse.service.tokens import Role, Tokens

token_app = typer.Typer(
    help="Make, list and revoke access tokens, and see who did what: on the service's machine, by its settings.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode=None,
)

Home = Annotated[Path | None, typer.Option(help="Folder of the service's database; default PACKHOUSE_HOME.")]

ACTOR = "the command line"
DAY = 86_400.0


@token_app.command()
def create(
    name: Annotated[str, typer.Argument(help="Of whoever will have it: a person, a team, a trainer.")],
    role: Annotated[
        RoleName, typer.Option(help="read: look and stream; submit: jobs and plans too; admin: everything.")
    ] = "read",
    expires: Annotated[str | None, typer.Option(help="How long it lives, as in 12h, 90d or 4w; else for ever.")] = None,
    home: Home = None,
    as_json: AsJson = False,
) -> None:
    """Make a token and print it: it is not shown again. From the first one on, every request needs one."""
    lifetime = None if expires is None else DAY * parse_lifetime(expires)
    with _database(home) as (tokens, audit):
        token, secret = tokens.create(name, Role[role.upper()], lifetime)
        audit.note(ACTOR, "token-create", token.name)
    if as_json:
        typer.echo(NewToken(token=token, secret=secret).model_dump_json())
        return
    typer.echo(secret)
    console.err().print(f"{token.name} may {token.role} with it: set PACKHOUSE_TOKEN. It is not shown again.")


@token_app.command("ls")
def list_tokens(home: Home = None, as_json: AsJson = False) -> None:
    """List all tokens that were ever made."""
    with _database(home) as (tokens, _):
        found = tokens.all()
    show(found, _tokens(found), as_json=as_json)


@token_app.command()
def revoke(
    name: Annotated[str, typer.Argument(help="Name or id of the token.")], home: Home = None, as_json: AsJson = False
) -> None:
    """End a token, within a second."""
    with _database(home) as (tokens, audit):
        token = tokens.revoke(name)
        audit.note(ACTOR, "token-revoke", token.name)
    show(token, _tokens([token]), as_json=as_json)


@token_app.command("audit")
def show_audit(
    limit: Annotated[int, typer.Option(min=1, max=1000, help="Most entries to list.")] = 50,
    home: Home = None,
    as_json: AsJson = False,
) -> None:
    """List who did what, newest first."""
    with _database(home) as (_, audit):
        found = audit.entries(before=None, limit=limit)
    show(found, _entries(found), as_json=as_json)


@contextmanager
def _database(home: Path | None) -> Iterator[tuple[Tokens, Audit]]:
    settings = Settings.load(home=home)
    settings.home.mkdir(parents=True, exist_ok=True)
    with closing(Catalog(settings.database_url)) as catalog:
        yield Tokens(catalog.engine), Audit(catalog.engine, settings.audit_days)


def _tokens(tokens: list[Token]) -> Table:
    table = console.listing("id", "name", "role", "made", "lives until", folded=("name",))
    for one in tokens:
        end = one.revoked_at or one.expires_at
        until = "" if end is None else f"{end.astimezone():%Y-%m-%d %H:%M}" + " revoked" * bool(one.revoked_at)
        table.add_row(one.id, one.name, one.role, f"{one.created_at.astimezone():%Y-%m-%d}", until)
    return table


def _entries(entries: list[AuditEntry]) -> Table:
    table = console.listing("when", "who", "what", "to", "request", folded=("to",))
    for one in entries:
        table.add_row(f"{one.at.astimezone():%Y-%m-%d %H:%M:%S}", one.actor, one.action, one.subject, one.request)
    return table

"""The command ``packhouse``. Results go to stdout, everything else to stderr.

Exit codes: 0 done, 1 the job failed or was cancelled, 2 the request was wrong, 3 the service cannot be reached.
"""

import json
import logging
import sys
from collections.abc import Callable
from importlib.metadata import entry_points
from itertools import islice
from typing import Annotated, Any, Literal

import typer

from packhouse.client import cli_explain, cli_plan, cli_preview, console, settings
from packhouse.client.api import Client, JobFailed
from packhouse.client.cli_cache import cache_app
from packhouse.client.command import AsJson, Url, show
from packhouse.client.errors import InvalidRequest, PackhouseError, Unavailable
from packhouse.client.job_options import JobOptions, job_spec, with_job_options
from packhouse.client.wire import Job, JobState

FAILED, WRONG, UNREACHABLE, INTERRUPTED = 1, 2, 3, 130

app = typer.Typer(
    help="Turn raw training text into tokenized shards once, and stream balanced packs to trainers.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode=None,
)
jobs_app = typer.Typer(
    help="List jobs; look at one, cancel it, see what it kept out.", invoke_without_command=True, rich_markup_mode=None
)
app.add_typer(jobs_app, name="jobs")
app.add_typer(cache_app, name="cache")

JobId = Annotated[str, typer.Argument(metavar="JOB", help="Id of the job.")]


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit code; a user never sees a stack trace."""
    words = sys.argv[1:] if arguments is None else arguments
    try:
        app(words, prog_name="packhouse")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else WRONG
    except PackhouseError as error:
        return _report(error, as_json="--json" in words)
    except Exception as error:
        if settings.debugging():
            logging.exception("unexpected error")
        remedy = "set PACKHOUSE_DEBUG=1 to see where, and report it"
        unexpected = PackhouseError(f"unexpected {type(error).__name__}: {error}", remedy)
        unexpected.status = 500
        return _report(unexpected, as_json="--json" in words)
    return 0


def _report(error: PackhouseError, *, as_json: bool) -> int:
    if as_json:
        job = error.job.model_dump(mode="json") if isinstance(error, JobFailed) else None
        problem = {"type": error.kind, "status": error.status, "detail": error.detail, "remedy": error.remedy}
        typer.echo(json.dumps(job or problem))
    typer.echo(f"packhouse: {error}", err=True)
    if isinstance(error, Unavailable):
        return UNREACHABLE
    wrong = isinstance(error, InvalidRequest) or (400 <= error.status < 500 and not isinstance(error, JobFailed))
    return WRONG if wrong else FAILED


@app.command()
@with_job_options
def submit(
    sources: Annotated[list[str], typer.Argument(help="Files, folders or globs, on the service's machine.")],
    tokenizer: Annotated[str, typer.Option(help="Folder with a tokenizer.json, on the service's machine.")],
    options: JobOptions,
    untrained: Annotated[
        Literal["quarantine", "drop"], typer.Option(help="What happens to a record with no token to be trained.")
    ] = "quarantine",
    on_bad_record: Annotated[
        Literal["quarantine", "fail"], typer.Option(help="What happens to a record that cannot be used.")
    ] = "quarantine",
    max_bad_share: Annotated[float, typer.Option(help="Share of bad records at which the job fails.")] = 0.01,
    name: Annotated[str | None, typer.Option(help="A label for people.")] = None,
    priority: Annotated[
        int, typer.Option(min=-3, max=3, help="Each step doubles the job's share of the workers; above 0 for admins.")
    ] = 0,
    wait: Annotated[bool, typer.Option(help="Wait for the end, with a progress bar.")] = True,
    as_json: AsJson = False,
    url: Url = None,
) -> None:
    """Submit a caching job: these sources, this tokenizer."""
    spec = job_spec(
        sources,
        tokenizer,
        options,
        untrained=untrained,
        on_bad_record=on_bad_record,
        max_bad_share=max_bad_share,
        name=name,
        priority=priority,
    )
    with Client(url) as client:
        job = client.submit(spec)
        if wait:
            job = _follow(client, job)
    show(job, console.job_summary(job), as_json=as_json)


def _follow(client: Client, job: Job) -> Job:
    errors = console.err()
    errors.print(f"job {job.id}")
    try:
        with console.progress_bar(errors) as show:
            return client.wait(job.id, show)
    except JobFailed as failure:
        errors.print(console.job_summary(failure.job))
        raise
    except KeyboardInterrupt:
        errors.print(f"job {job.id} goes on: 'packhouse jobs cancel {job.id}' ends it")
        raise typer.Exit(INTERRUPTED) from None


app.command()(cli_preview.preview)
app.command()(cli_explain.explain)


@jobs_app.callback()
def jobs(
    context: typer.Context,
    state: Annotated[JobState | None, typer.Option(help="Only jobs in this state.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="Most jobs to list.")] = 20,
    as_json: AsJson = False,
    url: Url = None,
) -> None:
    """List jobs, newest first."""
    if context.invoked_subcommand is None:
        with Client(url) as client:
            found = client.jobs(state, limit)
        show(found, console.jobs_table(found), as_json=as_json)


@jobs_app.command("show")
def show_job(job_id: JobId, as_json: AsJson = False, url: Url = None) -> None:
    """Show one job."""
    with Client(url) as client:
        job = client.job(job_id)
    show(job, console.job_summary(job), as_json=as_json)
    if not as_json:
        cli_explain.print_misses(job.progress.why, console.out())


@jobs_app.command("wait")
def wait_for_job(job_id: JobId, as_json: AsJson = False, url: Url = None) -> None:
    """Wait for a job, with a progress bar."""
    with Client(url) as client:
        job = _follow(client, client.job(job_id))
    show(job, console.job_summary(job), as_json=as_json)


@jobs_app.command("cancel")
def cancel_job(job_id: JobId, as_json: AsJson = False, url: Url = None) -> None:
    """Cancel a job; finished shards stay in the cache."""
    with Client(url) as client:
        job = client.cancel(job_id)
    show(job, console.job_summary(job), as_json=as_json)


@jobs_app.command("rejected")
def rejected_records(
    job_id: JobId,
    limit: Annotated[int, typer.Option(min=1, help="Most records to list.")] = 100,
    as_json: AsJson = False,
    url: Url = None,
) -> None:
    """List the records that a job kept out: where they lie, and why."""
    with Client(url) as client:
        records = list(islice(client.rejected(job_id), limit))
    show(records, console.rejected_table(records), as_json=as_json)


@app.command()
def datasets(
    limit: Annotated[int, typer.Option(min=1, help="Most datasets to list.")] = 100,
    as_json: AsJson = False,
    url: Url = None,
) -> None:
    """List datasets."""
    with Client(url) as client:
        found = list(islice(client.datasets(), limit))
    show(found, console.datasets_table(found), as_json=as_json)


app.command()(cli_plan.plan)


_PASSED_ON: dict[str, Any] = {
    "context_settings": {"allow_extra_args": True, "ignore_unknown_options": True},
    "add_help_option": False,
}


@app.command(**_PASSED_ON)
def serve(context: typer.Context) -> None:
    """Start the service on this machine (needs packhouse[service])."""
    _run_elsewhere("serve", "service", context.args)


@app.command(**_PASSED_ON)
def token(context: typer.Context) -> None:
    """Make, list and revoke access tokens on the service's machine, and see who did what (needs packhouse[service])."""
    _run_elsewhere("token", "service", context.args)


@app.command(**_PASSED_ON)
def backup(context: typer.Context) -> None:
    """Save the service's database and what its store says of datasets and plans (needs packhouse[service])."""
    _run_elsewhere("backup", "service", context.args)


@app.command(**_PASSED_ON)
def restore(context: typer.Context) -> None:
    """Bring a backup back into an empty home (needs packhouse[service])."""
    _run_elsewhere("restore", "service", context.args)


@app.command(**_PASSED_ON)
def upgrade(context: typer.Context) -> None:
    """Bring the service's database and store up to this version (needs packhouse[service])."""
    _run_elsewhere("upgrade", "service", context.args)


@app.command(**_PASSED_ON)
def demo(context: typer.Context) -> None:
    """Run the main job end to end on text from this machine (needs packhouse[service,trainer])."""
    _run_elsewhere("demo", "service,trainer", context.args)


def _run_elsewhere(name: str, extra: str, arguments: list[str]) -> None:
    """Run a command of another portion, which this one does not import; raise ``InvalidRequest`` if it is not there."""
    remedy = f"pip install 'packhouse[{extra}]'"
    found = entry_points(group="packhouse.commands", name=name)
    if not found:
        raise InvalidRequest(f"'packhouse {name}' is not installed", remedy)
    try:
        command = next(iter(found)).load()
    except ModuleNotFoundError as error:
        raise InvalidRequest(f"'packhouse {name}' needs {error.name}, which is not installed", remedy) from error
    elsewhere = command if isinstance(command, typer.Typer) else _alone(name, command)
    elsewhere(arguments, prog_name=f"packhouse {name}")


def _alone(name: str, command: Callable[..., None]) -> typer.Typer:
    alone = typer.Typer(pretty_exceptions_enable=False, add_completion=False, rich_markup_mode=None)
    alone.command(name)(command)
    return alone

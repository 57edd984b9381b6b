"""The command ``packhouse plan``: build a plan and see how good it is, or see how two plans differ."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from packhouse.client import console
from packhouse.client.api import Client
from packhouse.client.cli_audit import audit_plan
from packhouse.client.command import AsJson, Url, request, show
from packhouse.client.errors import InvalidRequest
from packhouse.client.plan_diff import plan_diff
from packhouse.client.plan_page import page
from packhouse.client.preset import export_preset
from packhouse.client.wire_plans import CostModel, Plan, PlanSpec, Strategy


def plan(
    dataset_ids: Annotated[
        list[str],
        typer.Argument(
            metavar="DATASET... | diff PLAN PLAN | export PLAN FOLDER | audit PLAN",
            help="Ids of datasets; or two plans to compare; or a plan to export for XTuner, or to audit.",
        ),
    ],
    pack_length: Annotated[int | None, typer.Option(help="Tokens of a pack.")] = None,
    strategy: Annotated[Strategy, typer.Option(help="How samples become packs.")] = "best_fit",
    seq_len: Annotated[int | None, typer.Option(help="Longest segment, for internevo and internevo_unpacked.")] = None,
    ranks: Annotated[int, typer.Option(help="Data-parallel ranks.")] = 1,
    micro_batches: Annotated[int, typer.Option(help="Packs of a rank in a step.")] = 1,
    order: Annotated[
        Literal["shuffled", "length_grouped"], typer.Option(help="Order of the packs over steps and ranks.")
    ] = "shuffled",
    overlong: Annotated[
        Literal["truncate", "split", "drop", "error"], typer.Option(help="What happens to samples longer than a pack.")
    ] = "split",
    tail: Annotated[Literal["pad", "drop"], typer.Option(help="What happens to a last step that is not full.")] = "pad",
    seed: Annotated[int, typer.Option(help="Order of the samples; -1 keeps the datasets' own.")] = 0,
    epochs: Annotated[int, typer.Option(help="Passes over the samples.")] = 1,
    weight: Annotated[list[float] | None, typer.Option(help="Share of a dataset in the tokens; one for each.")] = None,
    dataset_epochs: Annotated[list[float] | None, typer.Option(help="Passes over a dataset; one for each.")] = None,
    max_segments: Annotated[int | None, typer.Option(help="Most segments of a pack.")] = None,
    chunk_size: Annotated[int, typer.Option(help="For soft: samples packed on their own.")] = 10_000,
    extra_buffer: Annotated[int, typer.Option(help="For soft: samples searched to fill a pack.")] = 100,
    preset: Annotated[Path | None, typer.Option(help="For preset: folder of the packs, in XTuner's form.")] = None,
    path: Annotated[list[str] | None, typer.Option(help="For export: what XTuner reads a dataset from.")] = None,
    cost_token: Annotated[int, typer.Option(help="Cost of a token.")] = CostModel().token,
    cost_square: Annotated[int, typer.Option(help="Cost of the square of a segment's tokens.")] = CostModel().square,
    report: Annotated[Path | None, typer.Option(help="Write the report as an HTML page with pictures.")] = None,
    log: Annotated[list[Path] | None, typer.Option(help="For audit: the log of a rank; one for each.")] = None,
    store: Annotated[
        Path | None, typer.Option(help="For audit: the store's folder; else the service is asked.")
    ] = None,
    until: Annotated[int | None, typer.Option(help="For audit: the first step that is left out.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Report, and store nothing.")] = False,
    as_json: AsJson = False,
    url: Url = None,
) -> None:
    """Build a plan and report how good it is; 'plan diff A B' compares two, 'plan audit' checks deliveries."""
    if dataset_ids[0] == "diff":
        return _diff(dataset_ids[1:], url, as_json=as_json)
    if dataset_ids[0] == "export":
        return _export(dataset_ids[1:], path or None, url)
    if dataset_ids[0] == "audit":
        return audit_plan(dataset_ids[1:], log or [], store, until, url, as_json=as_json)
    spec = request(
        PlanSpec,
        datasets=dataset_ids,
        pack_length=pack_length,
        strategy=strategy,
        seq_len=seq_len,
        ranks=ranks,
        micro_batches=micro_batches,
        order=order,
        overlong=overlong,
        tail=tail,
        seed=None if seed == -1 else seed,
        epochs=epochs,
        weights=weight or None,
        dataset_epochs=dataset_epochs or None,
        max_segments=max_segments,
        chunk_size=chunk_size,
        extra_buffer=extra_buffer,
        preset=None if preset is None else _put(preset, url),
        cost={"token": cost_token, "square": cost_square},
    )
    with Client(url) as client:
        built = client.plan(spec, dry_run)
    if report is not None:
        _write_page(report, built)
    return show(built, console.plan_report(built), as_json=as_json)


def _diff(plans: list[str], url: str | None, *, as_json: bool) -> None:
    if len(plans) != 2:
        raise InvalidRequest(f"'plan diff' compares two plans, not {len(plans)}", "name two ids of plans")
    with Client(url) as client:
        found = plan_diff(*(client.open_plan(plan_id) for plan_id in plans))
    show(found, console.plan_difference(found), as_json=as_json)


def _put(preset: Path, url: str | None) -> str:
    with Client(url) as client:
        return client.put_preset(preset)


def _export(words: list[str], paths: list[str] | None, url: str | None) -> None:
    if len(words) != 2:
        raise InvalidRequest(f"'plan export' writes one plan to a folder, not {words}", "name a plan and a folder")
    with Client(url) as client:
        export_preset(client.open_plan(words[0]), Path(words[1]), paths)


def _write_page(path: Path, plan: Plan) -> None:
    try:
        path.write_text(page(plan), encoding="utf-8")
    except OSError as error:
        raise InvalidRequest(f"the report {str(path)!r} cannot be written ({error})", "name another file") from None

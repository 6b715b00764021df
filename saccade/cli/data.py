"""`saccade data`: from piles of image-text pairs to curated shards."""

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any

import typer

from saccade.cli.options import JsonOption, SetOption, WorkersOption, progress, shard_progress
from saccade.errors import ConfigError

app = typer.Typer(help="Make, index, curate and inspect shard folders.", no_args_is_help=True)

ShardsArgument = Annotated[str, typer.Argument(help="Shard folder, glob, braces or one tar; a path or an fsspec URL.")]
SettingsOption = Annotated[
    Path | None, typer.Option(help="TOML file with curation settings; the defaults if not given.")
]
RayOption = Annotated[str | None, typer.Option("--ray", help="Address of a Ray cluster to measure samples on.")]


@app.command()
def prepare(
    inputs: Annotated[
        list[str], typer.Argument(help="What to read: PATH or KIND:PATH; a wrong kind lists those there are.")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="Shard folder to write.")],
    kind: Annotated[str | None, typer.Option(help="Kind of all inputs, where it cannot be told from the path.")] = None,
    images: Annotated[
        Path | None, typer.Option(help="Folder of the images that COCO, VQA and chat files name.")
    ] = None,
    annotations: Annotated[
        Path | None, typer.Option(help="The answers that belong to a file of VQA questions.")
    ] = None,
    column: Annotated[
        list[str] | None,
        typer.Option(help="ROLE=NAME: the Parquet column of an image, text, url, ...; may be repeated."),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Name of the source in the samples; the file's if not given.")
    ] = None,
    licence: Annotated[str | None, typer.Option(help="Licence to note in samples that state none.")] = None,
    samples_per_shard: Annotated[int, typer.Option(min=1, help="Samples of one tar, at most.")] = 10_000,
    resize_longest: Annotated[
        int | None,
        typer.Option(min=16, help="Shrink images to this longest side and encode them anew; as they are if not given."),
    ] = None,
    curate: Annotated[bool, typer.Option(help="Judge the samples too: clean, filter, deduplicate.")] = True,
    settings: SettingsOption = None,
    set_: SetOption = None,
    workers: WorkersOption = None,
    as_json: JsonOption = False,
) -> None:
    """Turn inputs into shards, index them and judge every sample. Run again after a crash, it goes on where it stopped."""
    from saccade.data.prepare import PrepareOptions
    from saccade.data.prepare import prepare as run
    from saccade.data.readers import parse_input

    columns = dict(_pair(text) for text in column or [])
    fields = {
        "kind": kind,
        "images": images,
        "annotations": annotations,
        "columns": columns,
        "name": name,
        "licence": licence,
    }
    specs = [parse_input(path, **fields) for path in inputs]
    chosen = _curation_settings(settings, set_) if curate else None
    options = PrepareOptions(samples_per_shard=samples_per_shard, resize_longest=resize_longest)
    with progress("samples") as advance:
        report = run(
            specs,
            out,
            options,
            on_progress=lambda now: advance(f"{now.num_skipped:,} skipped, {now.num_shards} shards"),
        )
    made: dict[str, Any] = {"shards": report.num_shards, "samples": report.num_samples, "skipped": report.skipped}
    if chosen is not None:
        made |= {"curation": dataclasses.asdict(_curate(str(out), chosen, workers, None, None))}
    if as_json:
        typer.echo(json.dumps(made))
        return
    typer.echo(f"{out}: {report.num_samples:,} samples in {report.num_shards} shards, {report.num_skipped:,} skipped")
    for reason, count in report.skipped.items():
        typer.echo(f"  {reason}: {count:,}")
    if chosen is not None:
        _say_decisions(made["curation"])
    typer.echo(f"next: saccade data inspect {out}")


@app.command()
def index(shards: ShardsArgument, workers: WorkersOption = None, as_json: JsonOption = False) -> None:
    """Index the shards that are new or have changed: where every sample lies, how large it is."""
    from saccade.data.index import build_index

    with shard_progress("indexing") as advance:
        report = build_index(shards, num_workers=workers, on_progress=advance)
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(report)))
        return
    typer.echo(
        f"{shards}: {report.num_samples:,} samples in {report.num_shards} shards ({report.num_scanned} read now), "
        f"{report.num_errors:,} cannot be used"
    )
    for shard, damage in report.damaged.items():
        typer.echo(f"  {shard}: {damage}")


@app.command()
def curate(
    shards: ShardsArgument,
    settings: SettingsOption = None,
    set_: SetOption = None,
    write: Annotated[Path | None, typer.Option(help="Also copy the kept samples into new shards here.")] = None,
    ray: RayOption = None,
    workers: WorkersOption = None,
    as_json: JsonOption = False,
) -> None:
    """Judge every sample: broken, too small, boilerplate, duplicate ... The shards stay as they are; decisions lie beside the index."""
    report = dataclasses.asdict(_curate(shards, _curation_settings(settings, set_), workers, ray, write))
    if as_json:
        typer.echo(json.dumps(report))
    else:
        _say_decisions(report)


@app.command()
def inspect(
    shards: ShardsArgument,
    page: Annotated[
        Path | None, typer.Option(help="Write a page with histograms and examples to this HTML file.")
    ] = None,
    examples: Annotated[int, typer.Option(min=1, help="Examples of each kind on the page.")] = 24,
    as_json: JsonOption = False,
) -> None:
    """What a shard folder holds, what was dropped and why."""
    from saccade.data.curate import inspect as look
    from saccade.data.curate import write_page

    funnel = write_page(shards, page, num_examples=examples) if page is not None else look(shards)
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(funnel)))
        return
    for line in funnel.lines():
        typer.echo(line)
    if page is not None:
        typer.echo(f"page: {page}")


@app.command()
def contamination(
    training: ShardsArgument,
    evaluation: Annotated[str, typer.Argument(help="Shard folder that is evaluated on.")],
    ray: RayOption = None,
    workers: WorkersOption = None,
    as_json: JsonOption = False,
) -> None:
    """Find images of an evaluation set, or near-copies of them, among those to train on."""
    from saccade.data.curate import find_contamination

    with shard_progress("measuring") as advance:
        report = find_contamination(training, evaluation, num_workers=workers, ray_address=ray, on_progress=advance)
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(report)))
        return
    typer.echo(
        f"{len(report.matches):,} of {report.num_training:,} training samples show one of {report.num_evaluation:,} images"
    )
    for match in report.matches[:20]:
        typer.echo(f"  {match.training} shows {match.evaluation}" + (", the same bytes" if match.is_exact else ""))
    if report.matches:
        typer.echo(f"""drop them: saccade data curate {training} --set 'evaluation_sets=["{evaluation}"]'""")


def _curate(shards: str, settings: Any, workers: int | None, ray: str | None, write: Path | None) -> Any:
    from saccade.data.curate import curate as run

    with shard_progress("measuring") as advance:
        return run(shards, settings, num_workers=workers, ray_address=ray, on_progress=advance, write_to=write)


def _curation_settings(file: Path | None, overrides: list[str] | None) -> Any:
    from saccade.config import load_config, override_config
    from saccade.data.curate import CurationSettings

    if file is not None:
        return load_config(CurationSettings, file, overrides or [])
    return override_config(CurationSettings(), overrides or [], "curation settings")


def _pair(text: str) -> tuple[str, str]:
    role, equals, name = text.partition("=")
    if not equals or not role or not name:
        raise ConfigError(f"--column {text}: write it as ROLE=NAME, for example --column text=caption")
    return role, name


def _say_decisions(report: dict[str, Any]) -> None:
    typer.echo(f"{report['num_kept']:,} of {report['num_samples']:,} samples kept")
    for reason, count in report["dropped"].items():
        typer.echo(f"  {reason}: {count:,}")
    for score, count in report["absent_scores"].items():
        typer.echo(f"  {count:,} samples have no {score}")

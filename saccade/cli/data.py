"""`saccade data`: from image-text pairs to curated shards."""

import dataclasses
import json
import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from saccade.cli.options import CommandGroup, JsonOption, SetOption, WorkersOption, examples
from saccade.cli.progress import count_progress, shard_progress
from saccade.errors import ConfigError, DataError

app = typer.Typer(
    help="Prepare, index, measure, publish, curate and inspect shard folders.", no_args_is_help=True, cls=CommandGroup
)

ShardsArgument = Annotated[str, typer.Argument(help="Shard folder, glob, braces or one tar; a path or an fsspec URL.")]
SettingsOption = Annotated[
    Path | None, typer.Option(help="TOML file with curation settings; default settings if not given.")
]
_NUM_NAMED = 3
"""Skipped items of each reason that are named on the screen."""
RayOption = Annotated[str | None, typer.Option("--ray", help="Address of a Ray cluster that measures the samples.")]


@app.command(
    epilog=examples(
        "saccade data prepare photos/ -o shards/mine",
        "saccade data prepare coco:captions.json --images photos/ -o shards/coco",
    )
)
def prepare(
    inputs: Annotated[
        list[str], typer.Argument(help="Inputs: PATH or KIND:PATH; an unknown kind lists the known ones.")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="Shard folder to write.")],
    kind: Annotated[str | None, typer.Option(help="Kind of all inputs; detected from the path if not given.")] = None,
    images: Annotated[
        Path | None, typer.Option(help="Folder that image paths in COCO, VQA, chat and Parquet files are relative to.")
    ] = None,
    annotations: Annotated[Path | None, typer.Option(help="Answers to a file of VQA questions.")] = None,
    column: Annotated[
        list[str] | None,
        typer.Option(help="ROLE=NAME: the Parquet column of the image, text, url, ...; may be repeated."),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Name of the input, stored in its samples; the name of the file if not given.")
    ] = None,
    licence: Annotated[str | None, typer.Option(help="Licence to store in samples that state none.")] = None,
    samples_per_shard: Annotated[int, typer.Option(min=1, help="Maximum samples of a shard.")] = 10_000,
    resize_longest: Annotated[
        int | None,
        typer.Option(min=16, help="Downscale images to this longest side and re-encode them; unchanged if not given."),
    ] = None,
    timeout: Annotated[float, typer.Option(min=0.1, help="Downloads: timeout of one request, seconds.")] = 20.0,
    retries: Annotated[int, typer.Option(min=0, help="Downloads: retries after a transient error.")] = 2,
    max_redirects: Annotated[
        int, typer.Option(min=0, help="Downloads: redirects followed; each target is checked like the URL.")
    ] = 5,
    user_agent: Annotated[
        str | None, typer.Option(help="Downloads: User-Agent header; add a contact, NAME/VERSION (you@example.org).")
    ] = None,
    max_per_host: Annotated[int, typer.Option(min=1, help="Downloads: concurrent requests to one host.")] = 8,
    port: Annotated[
        list[int] | None, typer.Option(help="Downloads: allowed port, 80 and 443 if not given; may be repeated.")
    ] = None,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(help="Downloads: HOST:PORT that is allowed although it is private; may be repeated."),
    ] = None,
    curate: Annotated[bool, typer.Option(help="Also curate: filter and deduplicate.")] = True,
    settings: SettingsOption = None,
    set_: SetOption = None,
    workers: WorkersOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write inputs as shards, index and curate them. Run it again after an interruption: it resumes."""
    from saccade.data.download import DownloadOptions
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
    download = DownloadOptions(
        timeout_s=timeout,
        num_retries=retries,
        max_redirects=max_redirects,
        user_agent=user_agent if user_agent is not None else DownloadOptions.user_agent,
        max_per_host=max_per_host,
        ports=frozenset(port) if port else DownloadOptions.ports,
        allow_hosts=frozenset(allow_host or ()),
    )
    options = PrepareOptions(samples_per_shard=samples_per_shard, resize_longest=resize_longest, download=download)
    with count_progress("samples") as advance:
        report = run(
            specs,
            out,
            options,
            on_progress=lambda now: advance(f"{now.num_skipped:,} skipped, {now.num_shards} shards"),
        )
    result: dict[str, Any] = {
        "shards": report.num_shards,
        "samples": report.num_samples,
        "merged": report.num_merged,
        "skipped": report.skipped,
    }
    if chosen is not None:
        result |= {"curation": dataclasses.asdict(_curate(str(out), chosen, workers, None, None))}
    if as_json:
        typer.echo(json.dumps(result))
        if chosen is not None:
            _check_some_kept(result["curation"], out)
        return
    typer.echo(f"{out}: {report.num_samples:,} samples in {report.num_shards} shards, {report.num_skipped:,} skipped")
    if report.num_merged:
        typer.echo(
            f"  {report.num_merged:,} rows merged: they have the image of the row before, whose sample got their "
            "caption"
        )
    _print_skipped(report, out)
    if chosen is not None:
        _print_decisions(result["curation"])
        _check_some_kept(result["curation"], out)
    typer.echo(f"next: saccade data inspect {shlex.quote(str(out))}")


@app.command(epilog=examples("saccade data split shards/mine -o shards"))
def split(
    shards: ShardsArgument,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder to write; its train/ and test/ must not exist yet.")],
    share: Annotated[float, typer.Option(help="Held-out share of the samples, about.")] = 0.1,
    max_held_out: Annotated[
        int | None, typer.Option(min=1, help="Hold out about this many samples at most.", show_default="no limit")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Another seed holds out other images.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Divide the kept samples into OUT/train and OUT/test; no image file is in both.

    An image stays on its side when more are added.
    """
    from saccade.data.split import split_shards

    with count_progress("samples read and written") as advance:
        num_training, num_held_out = split_shards(
            shards, out / "train", out / "test", share=share, max_held_out=max_held_out, seed=seed, on_progress=advance
        )
    if as_json:
        folders = {"train_folder": str(out / "train"), "test_folder": str(out / "test")}
        typer.echo(json.dumps({"train": num_training, "test": num_held_out, **folders}))
        return
    train, test = (shlex.quote(str(out / name)) for name in ("train", "test"))
    typer.echo(f"{out / 'train'}: {num_training:,} samples to train on")
    typer.echo(f"{out / 'test'}: {num_held_out:,} samples held out")
    typer.echo(f"next: saccade data contamination {train} {test}")


@app.command()
def index(shards: ShardsArgument, workers: WorkersOption = None, as_json: JsonOption = False) -> None:
    """Index new and changed shards: offset and size of every sample."""
    from saccade.data.index_builder import build_index

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
        typer.echo(f"  damaged shard {shard}: {damage}")


@app.command()
def measure(
    shards: Annotated[
        list[str],
        typer.Argument(help="Shard folders; or one training recipe (.toml): all its sources, with their text rules."),
    ],
    model: Annotated[
        Path | None, typer.Option(help="Checkpoint folder to measure for; a recipe names its own.")
    ] = None,
    set_: SetOption = None,
    workers: WorkersOption = None,
    as_json: JsonOption = False,
) -> None:
    """Index shards and measure their samples in tokens and patches ahead of a training job.

    Several machines may share the work.
    """
    from saccade.data.sources import open_sources

    report = []
    for options in _sources_to_measure(shards, model, set_ or []):
        with shard_progress("measuring") as advance:
            measured = open_sources(
                **options,
                num_workers=workers,
                on_progress=lambda _, progress, advance=advance: advance(progress),  # type: ignore[misc]
            )
        report += [
            {
                "path": one.index.path,
                "shards": len(one.index.shards),
                "shards_measured": one.num_measured,
                "samples": len(one.index),
                "samples_kept": int(one.sizes.sum()),
                "lost_bytes": one.index.lost_bytes,
            }
            for one in measured
        ]
    if as_json:
        typer.echo(json.dumps(report))
        return
    for each in report:
        lost = f", {each['lost_bytes']:,} bytes lost in damaged shards" if each["lost_bytes"] else ""
        typer.echo(
            f"{each['path']}: {each['samples_kept']:,} of {each['samples']:,} samples in {each['shards']} shards "
            f"({each['shards_measured']} measured now){lost}"
        )


def _sources_to_measure(shards: list[str], model: Path | None, overrides: list[str]) -> list[dict[str, Any]]:
    """Arguments of `open_sources` for every stage of a recipe, or for the shard folders given."""
    if not shards[0].endswith(".toml"):
        if model is None or overrides:
            raise ConfigError("shard folders are measured for a checkpoint: give --model FOLDER, and no --set")
        return [{"shards": shards, "checkpoint": model}]
    if len(shards) > 1 or model is not None:
        raise ConfigError("a recipe names its shards and its model: give the recipe alone")
    from saccade.cli.recipes import check_recipe
    from saccade.config import load_config
    from saccade.train import TrainConfig

    check_recipe(Path(shards[0]))
    config = load_config(TrainConfig, Path(shards[0]), overrides)
    measured: dict[tuple[Any, bool], dict[str, Any]] = {}
    for stage in config.stages:
        for sources in filter(None, (stage.data.sources, config.validation.sources)):
            pairs = stage.objective.reads_pairs
            options = {
                "shards": sources,
                "checkpoint": config.model.folder,
                "pairs": pairs,
                "storage": stage.data.storage,
            }
            measured.setdefault((sources, pairs), options)
    return list(measured.values())


@app.command(
    epilog=examples(
        "saccade data publish s3://bucket/laion --model checkpoint",
        "saccade data publish s3://bucket/laion --model checkpoint --features --ray auto",
    )
)
def publish(
    shards: Annotated[str, typer.Argument(help="Shard folder: a path or an fsspec URL.")],
    model: Annotated[
        list[Path] | None,
        typer.Option(help="Checkpoint folder whose token lengths are written too; may be repeated."),
    ] = None,
    features: Annotated[bool, typer.Option(help="Also write what curation measures of every sample.")] = False,
    ray: RayOption = None,
    workers: WorkersOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write index, lengths and features next to the shards in one pass over them.

    Machines that open the folder afterwards read no sample before training.
    """
    from saccade.data.lengths import Measurer
    from saccade.data.publish import publish as run
    from saccade.data.sample import TextRules

    measurers = [Measurer(str(folder), TextRules()) for folder in model or []]
    with shard_progress("publishing") as advance:
        report = run(shards, measurers, features=features, num_workers=workers, ray_address=ray, on_progress=advance)
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(report)))
        return
    typer.echo(
        f"{report.url}: {report.num_samples:,} samples in {report.num_shards:,} shards ({report.num_read:,} read now), "
        f"{report.num_errors:,} cannot be used"
    )
    for shard, reason in report.quarantined.items():
        typer.echo(f"  left out {shard}: {reason}")


@app.command(epilog=examples("saccade data takedown s3://bucket/laion removed.txt"))
def takedown(
    shards: Annotated[str, typer.Argument(help="Shard folder: a path or an fsspec URL.")],
    listed: Annotated[
        Path, typer.Argument(help="Text file with a sample per line: shard/key, source/shard/key or its checksum.")
    ],
    as_json: JsonOption = False,
) -> None:
    """Remove samples from training without touching shards, order or states.

    They are skipped, counted and named from the next start of a run on.
    """
    from saccade.data.takedown import take_down

    try:
        lines = listed.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{listed}: cannot be read: {error}. Give a text file with a sample per line") from error
    added, total = take_down(shards, lines)
    if as_json:
        typer.echo(json.dumps({"added": added, "total": total}))
        return
    typer.echo(f"{shards}: {added:,} samples taken down, {total:,} in all")


@app.command()
def curate(
    shards: ShardsArgument,
    settings: SettingsOption = None,
    set_: SetOption = None,
    write: Annotated[
        Path | None, typer.Option(help="Also copy the kept samples into new shards in this folder.")
    ] = None,
    ray: RayOption = None,
    workers: WorkersOption = None,
    as_json: JsonOption = False,
) -> None:
    """Decide which samples are kept: drop broken, small, boilerplate, duplicate ones.

    Shards are unchanged; decisions go into the index.
    """
    report = dataclasses.asdict(_curate(shards, _curation_settings(settings, set_), workers, ray, write))
    if as_json:
        typer.echo(json.dumps(report))
    else:
        _print_decisions(report)


@app.command()
def inspect(
    shards: ShardsArgument,
    page: Annotated[
        Path | None, typer.Option(help="Write the report with histograms and examples to this HTML file.")
    ] = None,
    examples: Annotated[int, typer.Option(min=1, help="Examples per reason on the page.")] = 24,
    as_json: JsonOption = False,
) -> None:
    """Show what a shard folder has, what was dropped and why."""
    from saccade.data.curate import inspect as inspect_folder
    from saccade.data.curate import write_page

    report = write_page(shards, page, num_examples=examples) if page is not None else inspect_folder(shards)
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(report)))
        return
    for line in report.lines():
        typer.echo(line)
    if page is not None:
        typer.echo(f"page: {page}")


@app.command()
def contamination(
    training: ShardsArgument,
    evaluation: Annotated[str, typer.Argument(help="Shard folder of the evaluation set.")],
    ray: RayOption = None,
    workers: WorkersOption = None,
    as_json: JsonOption = False,
) -> None:
    """Find images of an evaluation set, as they are or edited, in training data."""
    from saccade.data.curate import find_contamination

    with shard_progress("measuring") as advance:
        report = find_contamination(training, evaluation, num_workers=workers, ray_address=ray, on_progress=advance)
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(report)))
        return
    num_training, num_evaluation = (
        len({getattr(one, name) for one in report.matches}) for name in ("training", "evaluation")
    )
    typer.echo(
        f"{num_training:,} of {report.num_training:,} training samples show an image of {num_evaluation:,} of "
        f"{report.num_evaluation:,} evaluation samples"
    )
    for match in report.matches[:20]:
        typer.echo(f"  {match.training} shows {match.evaluation}" + (", same bytes" if match.is_exact else ""))
    if report.matches:
        typer.echo(f"""to drop them: saccade data curate {training} --set 'evaluation_sets=["{evaluation}"]'""")


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


def _print_skipped(report: Any, out: Path) -> None:
    """Name the first skipped items of each reason, and the file that names more."""
    is_complete = True
    for reason, count in report.skipped.items():
        typer.echo(f"  {reason}: {count:,}")
        named = [example for entry in report.inputs for example in entry.examples.get(reason, [])]
        for example in named[:_NUM_NAMED]:
            typer.echo(f"    {example}")
        is_complete &= count <= _NUM_NAMED
    if not is_complete:
        from saccade.data.prepare_report import FILE, NUM_EXAMPLES

        typer.echo(f"  {out / FILE} names up to {NUM_EXAMPLES} of each reason")


def _check_some_kept(report: dict[str, Any], out: Path) -> None:
    if not report["num_kept"]:
        reason, count = max(report["dropped"].items(), key=lambda item: item[1])
        folder = shlex.quote(str(out))
        raise DataError(
            f"{out}: curation dropped all {report['num_samples']:,} samples, {count:,} for: {reason}. See them: "
            f"saccade data inspect {folder} --page look.html; decide again with other rules: saccade data curate "
            f"{folder} --set KEY=VALUE"
        )


def _print_decisions(report: dict[str, Any]) -> None:
    typer.echo(f"{report['num_kept']:,} of {report['num_samples']:,} samples kept")
    for reason, count in report["dropped"].items():
        typer.echo(f"  {reason}: {count:,}")
    for score, count in report["absent_scores"].items():
        typer.echo(f"  {count:,} samples have no score {score}")
    if report["num_shared_images"]:
        typer.echo(
            f"  {report['num_shared_images']:,} kept samples share their image file with another one, with another "
            "text; "
            """to keep one per image: --set 'keep_one_per="image"'"""
        )
    for shard, damage in report["damaged"].items():
        typer.echo(f"  damaged shard {shard}: {damage}")
    for shard, how in report["quarantined"].items():
        typer.echo(f"  quarantined shard {shard}: {how}; none of its samples are kept")

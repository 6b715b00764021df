"""`saccade compress`."""

import json
from dataclasses import asdict, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from saccade.cli.hub import checkpoint_folder
from saccade.cli.options import DeviceOption, JsonOption
from saccade.cli.progress import bar_progress
from saccade.errors import ConfigError, QualityError

if TYPE_CHECKING:
    from saccade.compress.calibration import CalibrationConfig
    from saccade.compress.mixed_scheme import PickedScheme
    from saccade.compress.scheme import Scheme
    from saccade.compress.verify import Fidelity
    from saccade.evaluate.run import EvaluationConfig
    from saccade.processor.inputs import ModelInputs


class CalibrationKind(StrEnum):
    """The contents of calibration samples."""

    IMAGES = "images"
    TEXT = "text"
    RANDOM = "random"


class KVCache(StrEnum):
    """Forms of keys and values."""

    FP8 = "fp8"
    INT8 = "int8"


def compress(
    checkpoint: Annotated[str, typer.Argument(help="Checkpoint folder, or ORG/NAME of the Hugging Face Hub.")],
    out: Annotated[
        Path, typer.Option("--out", "-o", help="Compressed checkpoint folder to make; a killed run resumes.")
    ],
    scheme: Annotated[
        str | None,
        typer.Option(
            help="int8, int8-rtn, int8-gptq, fp8, w4a16-gptq, w4a16-awq, w4a16-rtn, or a TOML file. "
            "Not given: a mixed one is picked by --target-size or --max-loss."
        ),
    ] = None,
    calibration: Annotated[
        list[str] | None, typer.Option(help="Shard folder with calibration samples; may be repeated.")
    ] = None,
    num_samples: Annotated[int, typer.Option(min=1, help="Calibration samples.")] = 128,
    calibrate_with: Annotated[
        CalibrationKind,
        typer.Option(help="Samples as they are, without their images, or random tokens; the latter for comparison."),
    ] = CalibrationKind.IMAGES,
    image_weight: Annotated[
        str,
        typer.Option(
            help="Weight of an image token relative to a text token in the decoder's calibration, or balanced."
        ),
    ] = "1.0",
    group_size: Annotated[
        int | None, typer.Option(help="Inputs per scale of int4 weights.", show_default="128, or the scheme's")
    ] = None,
    kv_cache: Annotated[
        KVCache | None,
        typer.Option(
            help="Keys and values in 8 bits: scales from calibration for other engines, and the default of Saccade's.",
            show_default="as the scheme says",
        ),
    ] = None,
    target_size: Annotated[
        float | None, typer.Option(help="Pick a mixed scheme: share of the original's bytes, such as 0.35.")
    ] = None,
    max_loss: Annotated[
        str | None,
        typer.Option(
            help="Perplexity may rise by this much, such as 1%; more is an error. "
            "Without --scheme, picks the smallest mixed scheme within it."
        ),
    ] = None,
    verify: Annotated[
        list[str] | None,
        typer.Option(help="Shard folder to compare with the original on; other samples of --calibration if not given."),
    ] = None,
    verify_samples: Annotated[int, typer.Option(min=0, help="Samples to compare on; 0: do not compare.")] = 64,
    tasks: Annotated[
        str | None, typer.Option(help="Also evaluate both models on tasks, such as captioning,vqa; with --data.")
    ] = None,
    data: Annotated[
        list[str] | None, typer.Option(help="Evaluation data, as of saccade evaluate; may be repeated.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Examples per task.")] = None,
    efficiency: Annotated[
        bool, typer.Option("--efficiency", help="Also measure TTFT, TPOT and throughput of both models here.")
    ] = False,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the choice of samples.")] = 0,
    device: DeviceOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Quantize a checkpoint, vision tower included, and compare it with the original. Resumes.

    The result is a compressed-tensors folder, which other engines load.
    """
    from saccade.compress import compress as run
    from saccade.compress.report import FOLDER, fidelity_rows, summary, text_table, write_report
    from saccade.model.checkpoint_writer import check_new_folder

    check_new_folder(out)
    folder, bound = checkpoint_folder(checkpoint), _share(max_loss)
    samples = _calibration(calibration, num_samples, calibrate_with.value, image_weight, seed)
    held_out = _held_out(folder, samples, verify, verify_samples, seed)
    if bound is not None and held_out is None:
        raise ConfigError("--max-loss compares with the original on samples: --verify SHARDS, or more of --calibration")
    evaluations = _evaluations(tasks, data, limit, seed, out / FOLDER)
    chosen, choice = _scheme(folder, out, scheme, group_size, target_size, bound, samples, device)
    if kv_cache is not None:
        chosen = replace(chosen, kv_cache=kv_cache.value)
    with bar_progress("blocks") as advance:
        report = run(folder, out, scheme=chosen, calibration=samples, device=device, on_block=advance)
    fidelity, memory = None, None
    if held_out is not None:
        from saccade.compress.verify import verify as compare

        fidelity, memory = compare(folder, out, held_out, device=device)
    rows = fidelity_rows(report, fidelity, memory)
    folders = (folder, out)
    if evaluations:
        scored = [_scores(*one, device) for one in zip(folders, evaluations, strict=True)]
        rows = [replace(row, scores=scores) for row, scores in zip(rows, scored, strict=True)]
    if efficiency:
        from saccade.cli.joins.speed import measure_speed

        rows = [replace(row, speed=measure_speed(one, device, seed)) for one, row in zip(folders, rows, strict=True)]
    verdict = _verdict(out, fidelity, bound, is_picked=scheme is None)
    page = write_report(out, report, chosen, rows, choice=choice, verdict=verdict)
    if as_json:
        found: dict[str, Any] = {"checkpoint": str(out), "models": [asdict(row) for row in rows], "verdict": verdict}
        found["fidelity"] = None if fidelity is None else fidelity.to_json()
        typer.echo(json.dumps(report.to_json() | found))
    else:
        for line in (*summary(report), *text_table(rows), f"report: {page}"):
            typer.echo(line)
    if verdict is not None:
        raise QualityError(verdict)


def _share(text: str | None) -> float | None:
    """A share such as 1% or 0.01."""
    if text is None:
        return None
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError as error:
        raise ConfigError(f"--max-loss {text}: give a share, such as 1% or 0.01") from error
    if not 0 <= value < 10:
        raise ConfigError(f"--max-loss {text}: give a share, such as 1% or 0.01")
    return value


def _calibration(
    shards: list[str] | None,
    num_samples: int,
    kind: Literal["images", "text", "random"],
    image_weight: str,
    seed: int,
) -> "CalibrationConfig | None":
    if not shards:
        return None
    from saccade.compress.calibration import CalibrationConfig

    try:
        weight: float | Literal["balanced"] = "balanced" if image_weight == "balanced" else float(image_weight)
    except ValueError as error:
        raise ConfigError(f"--image-weight {image_weight}: give a number, or balanced") from error
    return CalibrationConfig(shards=tuple(shards), num_samples=num_samples, kind=kind, image_weight=weight, seed=seed)


def _held_out(
    folder: Path, samples: "CalibrationConfig | None", verify: list[str] | None, num_samples: int, seed: int
) -> "list[ModelInputs] | None":
    """Samples to compare on: of their own folder, or those that calibration does not draw. None: there are none."""
    if num_samples == 0 or (samples is None and not verify):
        return None
    from saccade.compress.calibration import CalibrationConfig, NoSamplesLeftError, load_batches
    from saccade.model.families import load_model_config
    from saccade.processor import Processor

    processor, vocab_size = Processor.load(folder), load_model_config(folder).language.vocab_size
    if verify:
        config = CalibrationConfig(shards=tuple(verify), num_samples=num_samples, seed=seed)
        return load_batches(config, processor, vocab_size)
    assert samples is not None, "checked above"
    config = CalibrationConfig(shards=samples.shards, num_samples=num_samples, seed=seed)
    try:
        return load_batches(config, processor, vocab_size, skip=samples.num_samples)
    except NoSamplesLeftError:
        typer.echo("calibration takes all samples; none is left to compare on. Give --verify SHARDS", err=True)
        return None


def _scheme(
    folder: Path,
    out: Path,
    name: str | None,
    group_size: int | None,
    target_size: float | None,
    max_loss: float | None,
    samples: "CalibrationConfig | None",
    device: str,
) -> tuple["Scheme", "PickedScheme | None"]:
    """The scheme that is named, or a mixed one picked by sensitivity."""
    if name is not None:
        from saccade.compress.scheme import load_scheme

        if target_size is not None:
            raise ConfigError("--target-size picks a scheme; leave out --scheme, or --target-size")
        chosen = load_scheme(name)
        if group_size is not None and all(rule.form != "int4" for rule in chosen.rules):
            raise ConfigError(f"--group-size is for int4 weights, and scheme {chosen.name} has none. Leave it out")
        return (chosen if group_size is None else chosen.with_group_size(group_size)), None
    if target_size is None and max_loss is None:
        raise ConfigError("give --scheme NAME, or --target-size 0.35 or --max-loss 1% to have a mixed one picked")
    if target_size is not None and not 0 < target_size < 1:
        raise ConfigError(f"--target-size {target_size:g}: give a share of the original's bytes, such as 0.35")
    if group_size is not None:
        raise ConfigError("--group-size is of a named scheme: give --scheme NAME, or leave it out")
    if samples is None:
        raise ConfigError("picking a scheme measures sensitivity on samples: --calibration SHARDS")
    from saccade.compress.mixed_scheme import choose_scheme

    out.parent.mkdir(parents=True, exist_ok=True)
    with bar_progress("steps") as advance:
        choice = choose_scheme(
            folder,
            samples,
            out.parent,
            target_size=target_size,
            max_loss=None if target_size is not None else max_loss,
            device=device,
            on_step=advance,
        )
    return choice.scheme, choice


def _verdict(out: Path, fidelity: "Fidelity | None", bound: float | None, *, is_picked: bool = False) -> str | None:
    """Say which bound the result exceeds; None if it exceeds none."""
    if bound is None or fidelity is None or fidelity.perplexity_increase <= bound:
        return None
    remedy = (
        "Pick with more --num-samples, or a larger --target-size"
        if is_picked
        else "Use a scheme with more bits, or leave out --scheme to have one picked"
    )
    return (
        f"{out}: perplexity rises by {100 * fidelity.perplexity_increase:.3g} % "
        f"({fidelity.original_perplexity:.4g} to {fidelity.perplexity:.4g}), "
        f"over --max-loss {100 * bound:.3g} %. {remedy}"
    )


def _evaluations(
    tasks: str | None, data: list[str] | None, limit: int | None, seed: int, out: Path
) -> "list[EvaluationConfig]":
    """How both models are evaluated; nothing without tasks."""
    from saccade.cli.joins.evaluation import evaluation_config

    if tasks is None and data is None:
        return []
    if not tasks or not data:
        raise ConfigError("--tasks NAME,NAME and --data PATH go together, as of saccade evaluate")
    limits = [] if limit is None else [str(limit)]
    return [
        evaluation_config(
            tasks, data, out / name, limits=limits, images=None, prompts=None, max_tokens=None, seed=seed, name=name
        )
        for name in ("original", "compressed")
    ]


def _scores(folder: Path, config: "EvaluationConfig", device: str) -> dict[str, dict[str, float]]:
    """Scores of a checkpoint by `saccade evaluate`, with their intervals."""
    from saccade.cli.joins.evaluation import run_evaluation

    scores = run_evaluation(folder, config, device).scores["tasks"]
    return {
        f"{task} {metric}": {key: score[key] for key in ("value", "low", "high")}
        for task, found in scores.items()
        for metric, score in found["metrics"].items()
        if metric in _SHOWN
    }


_SHOWN = tuple("bleu_4 cider rouge_l vqa_accuracy exact_match accuracy perplexity anls relaxed_accuracy f1".split())

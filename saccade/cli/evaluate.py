"""`saccade evaluate`."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from saccade.cli.joins.evaluation import evaluation_config, is_url, open_model, run_on, training_data
from saccade.cli.options import DeviceOption, DtypeOption, JsonOption, TensorParallelOption
from saccade.cli.progress import task_progress
from saccade.errors import ConfigError

if TYPE_CHECKING:
    from saccade.evaluate.results import Results
    from saccade.evaluate.run import EvaluationConfig

SHUFFLED = "image-shuffled"


def evaluate(
    model: Annotated[
        str, typer.Argument(help="Checkpoint folder, URL of an OpenAI-compatible server, or a results folder.")
    ],
    tasks: Annotated[
        str | None,
        typer.Option(
            help="Published benchmarks: mmmu, mmbench, mmstar, ai2d, scienceqa, realworldqa, mme, pope, textvqa, "
            "vqav2, docvqa, infovqa, chartqa, ocrbench; with data of your own: captioning, vqa, docvqa, chartqa, "
            "multiple_choice, pope, nlvr, retrieval, embedding_retrieval, perplexity. Several with commas."
        ),
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            help="Evaluation data: PATH or KIND:PATH for all tasks, TASK=PATH for one; may be repeated. "
            "Published benchmarks without it come from the Hugging Face Hub."
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Results folder; the same command resumes.")] = None,
    compare: Annotated[
        list[str] | None,
        typer.Option(help="Another results folder, checkpoint or URL to compare with; may be repeated."),
    ] = None,
    shuffle_images: Annotated[
        bool, typer.Option("--shuffle-images", help="Compare with the same model shown other images: without looking.")
    ] = False,
    limit: Annotated[
        list[str] | None,
        typer.Option(help="Examples per task, chosen at random by the seed: N, or TASK=N for one; may be repeated."),
    ] = None,
    images: Annotated[
        Path | None, typer.Option(help="Image folder of the data; found next to it if not given.")
    ] = None,
    prompt: Annotated[
        list[str] | None, typer.Option(help="TASK=TEXT with {question}: the prompt of a task; may be repeated.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Maximum tokens of an answer; by task if not given.")
    ] = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="Sampling temperature; 0 is greedy.")] = 0.0,
    num_beams: Annotated[
        int, typer.Option(min=1, help="Beam search with so many beams, for tasks that generate; needs a checkpoint.")
    ] = 1,
    seed: Annotated[int, typer.Option(min=0, help="Seed of examples, shuffled images, sampling and bootstrap.")] = 0,
    concurrency: Annotated[int, typer.Option(min=1, help="Examples asked at once.")] = 64,
    name: Annotated[str | None, typer.Option(help="Name of the model in reports; from its path if not given.")] = None,
    training_data: Annotated[
        list[str] | None,
        typer.Option(
            help="Shards the model was trained on, searched for the images; a run's are known. May be repeated."
        ),
    ] = None,
    contamination: Annotated[
        bool, typer.Option(help="Look for the images in the training data of the checkpoint's run.")
    ] = True,
    adapter: Annotated[
        Path | None, typer.Option(help="LoRA adapter folder: evaluate the checkpoint with it, unmerged.")
    ] = None,
    served_model: Annotated[str | None, typer.Option("--model", help="Of a URL: the model's name there.")] = None,
    api_key: Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY", help="Of a URL: the key.")] = None,
    tensor_parallel_size: TensorParallelOption = 1,
    device: DeviceOption = "auto",
    dtype: DtypeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Evaluate a model on tasks, with intervals and a report; compare it with others. Resumes automatically."""
    from saccade.evaluate.report import compare_all, terminal_report, to_json, write_reports
    from saccade.evaluate.results import Results

    if served_model is not None and not any(map(is_url, [model, *(compare or [])])):
        raise ConfigError("--model is the name of a model on a server, but no URL was given. Remove it")
    if num_beams > 1 and (url := next(filter(is_url, [model, *(compare or [])]), None)):
        raise ConfigError(
            f"--num-beams {num_beams}: {url} is a server, whose API has no beam search. Give a checkpoint folder"
        )

    def open_target(target: str, *, is_compared: bool = False) -> Any:
        own = None if is_compared else adapter
        return open_model(target, served_model, api_key, str(device), dtype, own, tensor_parallel_size)

    if Results.is_results(Path(model)):
        results = [_results_folder(model)]
        if tasks or data or shuffle_images:
            raise ConfigError(
                f"{model} has results already. To evaluate more tasks, give the checkpoint and -o {model}"
            )
        results += [_results_folder(other) for other in compare or []]
    else:
        if training_data:
            from saccade.evaluate.contamination import check_training_data

            check_training_data(training_data)
        config = evaluation_config(
            tasks,
            data,
            out,
            limits=limit or [],
            images=images,
            prompts=prompt,
            max_tokens=max_tokens,
            temperature=temperature,
            num_beams=num_beams,
            seed=seed,
            concurrency=concurrency,
            name=name or _name(str(adapter or model)),
        )
        results = _evaluate_all(model, config, compare or [], shuffle_images, open_target)
        _note_contamination(results, model, training_data or [], is_on=contamination)
    _make_names_distinct(results)
    comparisons = compare_all(results, seed=seed)
    write_reports(results, comparisons)
    if as_json:
        typer.echo(json.dumps(to_json(results, comparisons)))
        return
    from rich.console import Console

    console = Console(width=None if Console().is_terminal else 1000, highlight=False, markup=False)
    console.print(terminal_report(results, comparisons))
    typer.echo(f"report: {results[0].folder / 'report.html'}")


def _evaluate_all(
    target: str,
    config: "EvaluationConfig",
    others: list[str],
    shuffle_images: bool,
    open_target: "Callable[..., Any]",
) -> "list[Results]":
    """Results of the model, of itself with other images, and of the models it is compared with."""
    from dataclasses import replace

    from saccade.evaluate.results import Results

    baselines = config.out / "baselines"
    compared = [
        _results_folder(other) if Results.is_results(Path(other)) else open_target(other, is_compared=True)
        for other in others
    ]
    with open_target(target) as model, task_progress() as advance:
        results = [run_on(model, config, advance)]
        if shuffle_images:
            shuffled = replace(config, out=baselines / SHUFFLED, name=SHUFFLED, shuffle_images=True)
            results.append(run_on(model, shuffled, advance))
    for other, found in zip(others, compared, strict=True):
        if isinstance(found, Results):
            results.append(found)
            continue
        name = _name(other)
        with found as model, task_progress() as advance:
            results.append(run_on(model, replace(config, out=baselines / name.replace("/", "-"), name=name), advance))
    return results


def _make_names_distinct(results: "list[Results]") -> None:
    """Models of the same name go by their folder."""
    names = [one.name for one in results]
    for one in results:
        if names.count(one.name) > 1:
            one.settings["name"] = str(one.folder)


def _note_contamination(results: "list[Results]", target: str, named: list[str], *, is_on: bool) -> None:
    """Look for evaluation images in the training data that is named, or that the checkpoint's run names."""
    if not is_on:
        return
    training = named or training_data(Path(target))
    if training:
        from saccade.evaluate.contamination import check_contamination

        check_contamination(results[0], training, is_asked=bool(named))


def _results_folder(path: str) -> "Results":
    """The results of a finished evaluation."""
    from saccade.evaluate.results import Results

    results = Results.load(Path(path))
    if not results.scores:
        raise ConfigError(f"{path}: its evaluation is not finished. Run the command that began it again")
    return results


def _name(target: str) -> str:
    """The name of a model from its path: run/step-00000100 for an exported checkpoint."""
    if is_url(target):
        return target.partition("://")[2].strip("/").removesuffix("/v1")
    path = Path(target).resolve()
    return f"{path.parent.parent.name}/{path.name}" if path.parent.name == "checkpoints" else path.name

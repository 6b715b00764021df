"""The options of `saccade evaluate` as a config, and the checkpoints and servers that a config is run on."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from saccade.cli.options import check_adapter
from saccade.cli.progress import task_progress
from saccade.errors import ConfigError

if TYPE_CHECKING:
    from saccade.evaluate.model import Model
    from saccade.evaluate.readers.published import Published
    from saccade.evaluate.results import Results
    from saccade.evaluate.run import EvaluationConfig


def evaluation_config(
    tasks: str | None,
    data: list[str] | None,
    out: Path | None,
    *,
    limits: list[str],
    images: Path | None,
    prompts: list[str] | None,
    max_tokens: int | None,
    **fields: Any,
) -> "EvaluationConfig":
    """The config that the options describe."""
    from saccade.evaluate.readers.detect import parse_spec
    from saccade.evaluate.run import EvaluationConfig, TaskConfig
    from saccade.evaluate.tasks import task_named

    names = [task.strip() for task in (tasks or "").split(",") if task.strip()]
    known = {name: task_named(name) for name in names}
    required = [name for name, task in known.items() if task.published is None or (data and task.takes_other_data)]
    if not names or out is None or (required and not data):
        raise ConfigError(
            "evaluating a model takes --tasks NAME,NAME --data PATH -o RESULTS. See saccade evaluate --help"
        )
    paths = _by_task(data or [], names, "--data", required=required)
    texts = _by_task(prompts or [], names, "--prompt", is_for_all=False)
    counts = _limits(limits, names)
    configs = []
    for name in names:
        published = known[name].published
        path = paths[name] if published is None else _benchmark(name, paths.get(name), published)
        configs.append(
            TaskConfig(
                task=name,
                data=parse_spec(path, images),
                prompt=texts.get(name),
                max_tokens=max_tokens,
                limit=counts.get(name),
            )
        )
    return EvaluationConfig(out=out, tasks=tuple(configs), **fields)


def _benchmark(name: str, path: str | None, published: "Published") -> str:
    """Find a benchmark: at a path, in the folder of its name among several, or in the hub's cache."""
    from saccade.cli.hub import dataset_folder, is_hub_name

    if path is not None and (Path(path) / name).is_dir():
        return str(Path(path) / name)
    if path is None or is_hub_name(path):
        return str(dataset_folder(path or published.hub, published.files))
    return path


def _limits(values: list[str], names: list[str]) -> dict[str, int]:
    """Limits by task from `N` for all tasks and `TASK=N` for one, which counts where both are given."""
    shared, own = {}, {}
    for value in values:
        task, equals, count = value.rpartition("=")
        if (equals and task not in names) or not re.fullmatch("[1-9][0-9]{0,8}", count):
            raise ConfigError(f"--limit {value}: write N, or TASK=N with one of the tasks {', '.join(names)}")
        if equals:
            own[task] = int(count)
        else:
            shared = dict.fromkeys(names, int(count))
    return shared | own


def _by_task(
    values: list[str], names: list[str], option: str, *, is_for_all: bool = True, required: Sequence[str] = ()
) -> dict[str, str]:
    """Values by task from `TASK=VALUE`, or one value for all tasks; `required` tasks must have one."""
    found: dict[str, str] = {}
    for value in values:
        task, equals, rest = value.partition("=")
        if equals and task in names:
            found[task] = rest
        elif is_for_all and len(values) == 1:
            found = dict.fromkeys(names, value)
        else:
            raise ConfigError(f"{option} {value}: write TASK=... with one of the tasks {', '.join(names)}")
    if missing := [name for name in required if name not in found]:
        raise ConfigError(f"{option} is missing for {', '.join(missing)}: {option} {missing[0]}=...")
    return found


# ------------------------------------------------------------------ models


def is_url(target: str) -> bool:
    """Whether a model is named by the URL of its server."""
    return target.startswith(("http://", "https://"))


def open_model(
    target: str, served_model: str | None, api_key: str | None, device: str, dtype: str | None, adapter: Path | None,
    tensor_parallel_size: int = 1,
) -> Any:  # fmt: skip
    """A context manager that gives the model of a URL or of a checkpoint folder."""
    if is_url(target):
        from saccade.evaluate.openai_client import OpenAIModel

        if adapter is not None:
            raise ConfigError("--adapter is for a checkpoint folder. Of a server, name the adapter with --model")
        return OpenAIModel(target, model=served_model, api_key=api_key)
    from saccade.cli.joins.engine_model import EngineModel

    if adapter is not None:
        check_adapter(adapter, f"--adapter {adapter}")
    return EngineModel(
        Path(target), device=device, dtype=dtype, adapter=adapter, tensor_parallel_size=tensor_parallel_size
    )


def run_on(model: "Model", config: "EvaluationConfig", update: Callable[[str, int, int], None]) -> "Results":
    """Evaluate an open model."""
    from saccade.evaluate.run import evaluate

    return evaluate(model, config, on_progress=lambda task, done, total: update(f"{config.name}: {task}", done, total))


def run_evaluation(checkpoint: Path, config: "EvaluationConfig", device: str) -> "Results":
    """Evaluate one checkpoint folder."""
    from saccade.cli.joins.engine_model import EngineModel

    with EngineModel(checkpoint, device=device) as model, task_progress() as update:
        return run_on(model, config, update)


def training_data(checkpoint: Path) -> list[str]:
    """Shards of the run that exported a checkpoint: RUN/checkpoints/step-00000100 of RUN/config.toml."""
    from saccade.config import load_config
    from saccade.train.config import TrainConfig

    recipe = checkpoint.resolve().parent.parent / "config.toml"
    if checkpoint.resolve().parent.name != "checkpoints" or not recipe.is_file():
        return []
    try:
        config = load_config(TrainConfig, recipe)
    except ConfigError:
        return []
    return list(dict.fromkeys(str(source.path) for stage in config.stages for source in stage.data.sources))

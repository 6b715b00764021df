"""`saccade quickstart`: the whole flow at toy size, as a script of this package's commands.

    draw scenes -> data prepare -> init -> train -> evaluate -> serve

Every step but the first runs a command in a process of its own and prints it, so that it can be repeated by hand. A
finished step is recorded in `quickstart.json` and not repeated: a second start continues where the first ended.
"""

import ctypes
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated, Any

import typer

from saccade.cli.options import DeviceOption, JsonOption, check_modules
from saccade.cli.recipes import RECIPES
from saccade.errors import ConfigError, DataError
from saccade.files import atomic_write

RAW, ALL, TRAINING, HELD_OUT = "raw", "shards/all", "shards/train", "shards/held-out"
UNTRAINED, RUN, RESULTS, RECORD = "untrained", "run", "results", "quickstart.json"
"""What a quickstart folder holds."""
_LONGEST_SIDE = 112
"""Real images are reduced to this for the tiny recipe: 64 patches each."""
_PR_SET_PDEATHSIG = 1
Report = dict[str, Any]
"""What a step reports: `lines` for the user, and values for scripts."""


def quickstart(
    folder: Annotated[
        Path, typer.Option("--dir", help="Folder of everything it makes; a second run continues there.")
    ] = Path("quickstart"),
    data: Annotated[
        Path | None,
        typer.Option(help="Your data: shards, or a folder of images with captions.", show_default="scenes drawn here"),
    ] = None,
    text_model: Annotated[
        Path | None,
        typer.Option(help="With a GPU: a text model (SmolLM2) to train the SmolLM2 recipe instead of the tiny one."),
    ] = None,
    steps: Annotated[
        int, typer.Option(min=1, help="Training steps of the tiny recipe; with fewer the answers are worse.")
    ] = 1000,
    scenes: Annotated[int, typer.Option(min=20, help="Scenes to draw.")] = 6000,
    seed: Annotated[int, typer.Option(min=0, help="Seed of scenes, weights and order.")] = 0,
    no_serve: Annotated[bool, typer.Option("--no-serve", help="End after the evaluation.")] = False,
    device: DeviceOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Run the whole flow here: make data, prepare it, train, evaluate, serve. Takes a few minutes; resumes."""
    from saccade.cli.quickstart_server import GPU_HINT, next_steps, serve_and_ask

    def say(line: str) -> None:
        typer.echo(line, err=as_json)

    check_modules("quickstart", ("pyarrow", "daft", "aiohttp", "fastapi", "uvicorn", "orjson", "prometheus_client"))
    has_gpu = any(Path(path).exists() for path in ("/dev/nvidiactl", "/dev/kfd"))
    if text_model is not None and not has_gpu:
        raise ConfigError(
            "--text-model trains the SmolLM2 recipe, which needs a GPU. Leave it out: the tiny recipe trains on a CPU"
        )
    if device not in ("auto", "cpu"):
        from saccade.device import resolve_device

        resolve_device(device)  # an unknown device is refused before anything is made
    script = Quickstart(folder, data, text_model, steps, scenes, seed, device)
    made = script.run(say)
    image, question = script.held_out_image()
    checkpoint, served = Path(made["train"]["checkpoint"]), None
    if not no_serve:
        words = ["serve", str(checkpoint), "--model-name", "quickstart", "--device", device]
        stay = sys.stdout.isatty() and not as_json
        served = serve_and_ask(words, image, question, say, log=folder / "server.log", stay=stay)
    for line in next_steps(checkpoint, image, question):
        say(line)
    if has_gpu and text_model is None:
        say(GPU_HINT)
    if as_json:
        values = {name: {key: value for key, value in one.items() if key != "lines"} for name, one in made.items()}
        typer.echo(json.dumps({"dir": str(folder), "steps": values, "served": served}))


@dataclass(frozen=True)
class Quickstart:
    """The quickstart of one folder. A folder belongs to one set of options."""

    folder: Path
    data: Path | None = None
    text_model: Path | None = None
    num_steps: int = 1000
    num_scenes: int = 6000
    seed: int = 0
    device: str = "auto"

    def run(self, say: Callable[[str], None]) -> dict[str, Report]:
        """Make data, train and evaluate; returns the report of every step."""
        settings = self._settings()
        reports = finished_steps(self.folder, settings)
        steps = (self.make_data, self.prepare, self.init, self.train, self.evaluate)
        for number, step in enumerate(steps, 1):
            name = step.__name__.removeprefix("make_")
            time_taken = "done before"
            if name not in reports:
                began = time.monotonic()
                report = step(say)
                reports[name] = report | {"seconds": round(time.monotonic() - began, 1)}
                time_taken = f"{reports[name]['seconds']} s"
                record_steps(self.folder, settings, reports)
            first, *others = reports[name]["lines"]
            say(f"{number}. {first}  ({time_taken})")
            for line in others:
                say(f"   {line}" if line else "")
        return reports

    def _settings(self) -> dict[str, Any]:
        """The options that the contents of the folder depend on."""
        paths = {"data": self.data, "text_model": self.text_model}
        numbers = {"scenes": self.num_scenes, "steps": self.num_steps, "seed": self.seed}
        return {name: path and str(path) for name, path in paths.items()} | numbers

    # -------------------------------------------------------------- steps

    def make_data(self, _say: Callable[[str], None]) -> Report:
        """Draw scenes, unless there is data."""
        if self.data is not None:
            if not self.data.exists():
                raise DataError(f"{self.data}: no such folder. --data takes shards, or images with captions")
            return {"lines": [f"data: {self.data}"]}
        num_held_out = max(12, self.num_scenes // 40)
        raw = self.folder / RAW
        for name, count in (("train", self.num_scenes), ("held-out", num_held_out)):
            if not (raw / name).exists():
                with atomic_write(raw / name) as folder:
                    _draw(folder, count, self.seed, held_out=name == "held-out")
        lines = [
            f"drew {self.num_scenes:,} scenes with captions and questions, and {num_held_out} held-out ones that "
            "combine them as no training scene does",
            str(raw),
        ]
        return {"lines": lines, "folder": str(raw)}

    def prepare(self, _say: Callable[[str], None]) -> Report:
        """Write shards of the data, filtered and deduplicated, divided into training and held-out samples."""
        commands = self.prepare_commands()
        reports = [json.loads(run([*words, "--json"]))["curation"] for words in commands]
        kept, found = (sum(report[name] for report in reports) for name in ("num_kept", "num_samples"))
        lines = [f"prepared and deduplicated: {kept:,} of {found:,} samples kept"]
        lines += [f"{count:,} {reason}" for report in reports for reason, count in report["dropped"].items()]
        training, held_out = self.folder / TRAINING, self.folder / HELD_OUT
        if self.data is None:
            lines.append("the search for near-copies is off: rendered scenes resemble each other")
        else:
            from saccade.data.split import split_shards

            shutil.rmtree(training, ignore_errors=True)
            shutil.rmtree(held_out, ignore_errors=True)
            sizes = split_shards(self.folder / ALL, training, held_out, max_held_out=200)
            lines.append(f"{sizes[0]:,} to train on, {sizes[1]:,} held out, no image in both")
        lines += [*map(shown, commands), f"{training}  {held_out}"]
        return {"lines": lines, "kept": kept, "samples": found}

    def init(self, _say: Callable[[str], None]) -> Report:
        """Make the initial checkpoint; an incomplete one of an earlier start is made again."""
        folder = self.folder / UNTRAINED
        shutil.rmtree(folder, ignore_errors=True)
        words = ["init", str(folder), "--seed", str(self.seed)]
        if self.text_model is None:
            words += ["--size", "tiny", "--dtype", "fp32"]
        else:
            words += ["--text", str(self.text_model), "--tower", "90m"]
        made = json.loads(run([*words, "--json"]))
        what = "random weights" if self.text_model is None else f"{self.text_model.name} and a new vision tower"
        size = f"made a checkpoint: {what}, {made['bytes'] / 1e6:.1f} MB"
        return {"lines": [size, shown(words), str(folder)], "checkpoint": str(folder)}

    def train(self, say: Callable[[str], None]) -> Report:
        """Train the recipe; resumes a run that was interrupted."""
        words, folder = self.train_command(), self.folder / RUN
        say(f"   training: {shown(words)}")
        run(words)
        checkpoint = max((folder / "checkpoints").glob("step-*"), default=None)
        if checkpoint is None:
            raise ConfigError(f"training has stopped early. Run the same command again: it resumes {folder}")
        lines = [f"trained: {checkpoint.name}", str(checkpoint), f"curves: {folder / 'report.html'}"]
        return {"lines": lines, "checkpoint": str(checkpoint), "run": str(folder)}

    def evaluate(self, say: Callable[[str], None]) -> Report:
        """Evaluate on held-out data, together with two baselines."""
        checkpoint, results = max((self.folder / RUN / "checkpoints").glob("step-*")), self.folder / RESULTS
        words = ["evaluate", str(checkpoint), "--tasks", ",".join(tasks_of(self.folder / HELD_OUT))]
        words += ["--data", str(self.folder / HELD_OUT), "-o", str(results)]
        words += ["--shuffle-images", "--compare", str(self.folder / UNTRAINED)]
        words += ["--name", "trained", "--device", self.device, "--seed", str(self.seed)]
        words += ["--no-contamination"] if self.data is None else []
        say(f"   evaluating: {shown(words)}")
        table = run(words).rstrip().splitlines()
        title = "evaluated on held-out data, with the same model shown other images and its untrained self"
        return {"lines": [title, *table], "results": str(results), "scores": _scores_of(results)}

    # -------------------------------------------------------------- commands

    def prepare_commands(self) -> list[list[str]]:
        """Commands that write shards and deduplicate them.

        Rendered scenes differ in little but a shape and a colour: the search for near-duplicate images would take
        most of them for copies. It is off for scenes; identical files are dropped.
        """
        if self.data is None:
            pairs = ((self.folder / RAW / "train", TRAINING), (self.folder / RAW / "held-out", HELD_OUT))
            is_off = "near_duplicate_images=false"
            return [["data", "prepare", str(raw), "-o", str(self.folder / out), "--set", is_off] for raw, out in pairs]
        resize = [] if self.text_model is not None else ["--resize-longest", str(_LONGEST_SIDE)]
        return [["data", "prepare", str(self.data), "-o", str(self.folder / ALL), *resize]]

    def train_command(self) -> list[str]:
        """The command that trains the recipe on the shards."""
        recipe, stages = ("tiny", ["learn"]) if self.text_model is None else ("smollm2-vlm", ["align", "all"])
        settings = [
            f"run={self.folder / RUN}",
            f"model.folder={self.folder / UNTRAINED}",
            f"seed={self.seed}",
            f"checkpoint.every={max(1, self.num_steps // 5)}",
            f"validation.sources=[{{path='{self.folder / HELD_OUT}'}}]",
        ]
        settings += [f"stages.{stage}.data.sources=[{{path='{self.folder / TRAINING}'}}]" for stage in stages]
        if self.text_model is None:
            settings.append(f"stages.learn.steps={self.num_steps}")
            settings.append(f"stages.learn.schedule.warmup_steps={min(50, self.num_steps)}")
        words = ["train", str(RECIPES / f"{recipe}.toml"), "--device", self.device]
        return words + [word for setting in settings for word in ("--set", setting)]

    def held_out_image(self) -> tuple[Path, str]:
        """The first held-out image as a file, and a question about it."""
        from itertools import islice

        from saccade.data.sample import description, images

        first = list(islice(_samples(self.folder / HELD_OUT), 8))
        sample = next((one for one in first if description(one).get("questions")), first[0])
        asked, image = description(sample).get("questions"), images(sample)[0]
        name = next(name for name, content in sample.members.items() if content == image)
        path = self.folder / f"held-out.{name.rpartition('.')[2]}"
        path.write_bytes(image)
        return path, asked[0]["question"] if asked else "Describe the image."


# ------------------------------------------------------------------ data and results


def _draw(folder: Path, count: int, seed: int, *, held_out: bool) -> None:
    """Write scenes as files: an image, and its caption or questions in a file of the same name."""
    from saccade.data.scenes import scene_sample

    folder.mkdir()
    for number in range(count):
        sample = scene_sample(number, seed=seed, held_out=held_out)
        for extension, content in sample.members.items():
            (folder / f"{sample.key}.{extension}").write_bytes(content)


def _samples(shards: Path) -> Any:
    """The samples of a shard folder in order."""
    from saccade.data.index import open_index

    index = open_index(str(shards))
    return (index.read_sample(shard, row) for shard in range(len(index.shards)) for row in index.kept(shard).tolist())


def tasks_of(shards: Path) -> list[str]:
    """The tasks that a shard folder has examples of."""
    from saccade.data.sample import description

    fields = map(description, _samples(shards))
    kinds = {any(one.get(name) for name in ("questions", "messages", "conversations")) for one in fields}
    return [task for task, asks in (("vqa", True), ("captioning", False)) if asks in kinds]


def _scores_of(results: Path) -> dict[str, dict[str, dict[str, float]]]:
    """Metrics by task and model, which is the trained one or a baseline."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    folders = {"trained": results} | {path.name: path for path in sorted((results / "baselines").iterdir())}
    for name, folder in folders.items():
        tasks = json.loads((folder / "scores.json").read_text(encoding="utf-8"))["tasks"]
        for task, scores in tasks.items():
            metrics = {metric: one["value"] for metric, one in scores["metrics"].items()}
            found.setdefault(task, {})[name] = metrics
    return found


# ------------------------------------------------------------------ finished steps


def finished_steps(folder: Path, settings: Mapping[str, Any]) -> dict[str, Report]:
    """The reports of finished steps; a new folder has none. A folder of other contents or options is refused."""
    path = folder / RECORD
    if not path.is_file():
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ConfigError(f"{folder} is not empty. Remove it or choose another: saccade quickstart --dir NAME")
        return {}
    saved = json.loads(path.read_text(encoding="utf-8"))
    changed = [name for name, value in settings.items() if saved["settings"].get(name) != value]
    if changed:
        was = ", ".join(f"{name} {saved['settings'].get(name)}" for name in changed)
        raise ConfigError(
            f"{folder} was made with other options ({was}). Use the same, or another folder: "
            "saccade quickstart --dir NAME"
        )
    return dict(saved["steps"])


def record_steps(folder: Path, settings: Mapping[str, Any], reports: Mapping[str, Report]) -> None:
    """Replace the record of finished steps."""
    with atomic_write(folder / RECORD) as path:
        path.write_text(json.dumps({"settings": settings, "steps": reports}, indent=1), encoding="utf-8")


# ------------------------------------------------------------------ processes


def shown(words: Sequence[str]) -> str:
    """A command as one would type it."""
    return shlex.join(["saccade", *words])


def start(words: Sequence[str], *, stdout: int | None, stderr: IO[bytes] | None = None) -> subprocess.Popen[str]:
    """Start a command. It gets SIGTERM when this process ends, so that nothing writes to a folder that is used again.

    It runs in one thread: the models of the quickstart are too small for several.
    """
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    parent, libc = os.getpid(), ctypes.CDLL(None)

    def end_with_parent() -> None:
        if sys.platform == "linux":
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
            if os.getppid() != parent:
                os._exit(1)

    command = [sys.executable, "-m", "saccade", *words]
    return subprocess.Popen(  # noqa: S603  our own command
        command, stdout=stdout, stderr=stderr, env=environment, text=True, preexec_fn=end_with_parent
    )


def run(words: Sequence[str]) -> str:
    """Run a command to its end and return what it printed; its log goes to standard error."""
    with start(words, stdout=subprocess.PIPE) as process:
        try:
            output, _ = process.communicate()
        except KeyboardInterrupt:  # the terminal has sent it to the command too, which saves its state
            process.wait()
            raise
    if process.returncode in (130, -signal.SIGINT, -signal.SIGTERM):
        raise KeyboardInterrupt
    if process.returncode != 0:
        raise ConfigError(f"{shown(words)} failed (exit status {process.returncode}); the lines above say why")
    return output

"""`saccade chat`: one question, or a conversation line by line."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from saccade.cli.hub import checkpoint_folder
from saccade.cli.options import DeviceOption, DtypeOption, JsonOption, TensorParallelOption, check_adapter
from saccade.errors import ConfigError, RequestError, UserError

if TYPE_CHECKING:
    import asyncio

    from saccade.engine import Completion, Engine, RequestOptions, SamplingParams

_IMAGE_SUFFIXES = {".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".avif"}
_VIDEO_SUFFIXES = {".mp4", ".m4v", ".mov", ".webm", ".mkv", ".avi"}
_HELP = """\
/image FILE...  add images or videos to the next question; a path in a question does too
/new            start a new conversation
/exit           end, as Ctrl-D does; Ctrl-C stops an answer, twice ends"""
_WORD = re.compile(r"""'[^']*'|"[^"]*"|(?:\\.|\S)+""")
"""A word of a line. Terminals insert paths with spaces quoted or escaped."""


def chat(
    checkpoint: Annotated[str, typer.Argument(help="Checkpoint folder, or ORG/NAME of the Hugging Face Hub.")],
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[[IMAGE|VIDEO]... QUESTION]",
            help="Image and video files, then the question. Without them questions are read line by line.",
        ),
    ] = None,
    system: Annotated[str | None, typer.Option(help="System message; the template's default if not given.")] = None,
    adapter: Annotated[
        str | None, typer.Option(help="FOLDER or NAME=FOLDER: answer with a LoRA adapter of the checkpoint.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Maximum number of generated tokens per answer.")] = 256,
    temperature: Annotated[float, typer.Option(help="Sampling temperature; 0 is greedy.")] = 0.0,
    top_k: Annotated[int | None, typer.Option(help="Sample from the k most probable tokens.")] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Sample from the most probable tokens of this total probability.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0,
    fps: Annotated[float, typer.Option(help="Frames per second to sample from video files.")] = 2.0,
    tensor_parallel_size: TensorParallelOption = 1,
    device: DeviceOption = "auto",
    dtype: DtypeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Ask a model about images and videos, or talk to it: without a question, line by line. Answers are streamed."""
    import asyncio

    files, question = (words[:-1], words[-1]) if words else ([], None)
    if question is not None and os.path.isfile(question):  # noqa: PTH113  Path.is_file raises for a question longer than a file name
        raise ConfigError(f"the last argument is the question, but {question} is a file. Ask something about it")
    adapters = {} if adapter is None else _adapter(adapter)
    folder = checkpoint_folder(checkpoint)

    from saccade.engine import Engine, EngineConfig, RequestOptions, SamplingParams
    from saccade.errors import CheckpointError

    sampling = SamplingParams(
        temperature=temperature, top_k=top_k, top_p=1.0 if top_p is None else top_p, seed=seed, max_tokens=max_tokens
    )
    start: list[dict[str, Any]] = [{"role": "system", "content": system}] if system is not None else []
    config = EngineConfig(
        max_requests=1, num_workers=0, prefix_cache=question is None, tensor_parallel_size=tensor_parallel_size
    )
    # The engine is closed before the event loop is, also after Ctrl-C: the engine's thread posts to the loop.
    with (
        asyncio.Runner() as runner,
        Engine.load(folder, device=device, dtype=dtype, config=config, adapters=adapters) as engine,
    ):
        if engine.refused_adapters:
            raise CheckpointError("; ".join(engine.refused_adapters.values()))
        options = RequestOptions(adapter=next(iter(adapters), None))
        answers = _Answers(engine, runner, sampling, options, as_json)
        if question is None:
            _converse(_Conversation(answers, start, fps))
            return
        content = [*(_media_part(file, fps) for file in files), {"type": "text", "text": question}]
        answers.answer([*start, {"role": "user", "content": content}])


def _adapter(given: str) -> dict[str, Path]:
    """The folder of FOLDER or NAME=FOLDER, by name."""
    name, _, path = given.partition("=")
    folder = Path(path if path and not Path(given).is_dir() else given)
    check_adapter(folder, f"--adapter {given}")
    return {name: folder}


class _Answers:
    """Prints answers while they are generated."""

    def __init__(
        self, engine: Engine, runner: asyncio.Runner, sampling: SamplingParams, options: RequestOptions, as_json: bool
    ) -> None:
        self._engine, self._runner, self._sampling, self._options = engine, runner, sampling, options
        self._as_json = as_json
        self.text = ""
        """The last answer, as far as it was generated."""

    def answer(self, conversation: list[dict[str, Any]]) -> None:
        """Answer a conversation. RequestError: it is refused or fails; KeyboardInterrupt: Ctrl-C has stopped it."""
        self.text = ""
        self._runner.run(self._answer(conversation))

    async def _answer(self, conversation: list[dict[str, Any]]) -> None:
        async for part in self._engine.stream(conversation, self._sampling, options=self._options):
            self.text += part.text
            if not self._as_json:
                typer.echo(part.text, nl=False)
            if (completion := part.completion) is not None:
                self._end(completion)

    def _end(self, completion: Completion) -> None:
        if completion.failure is not None:
            raise RequestError(completion.failure.message)
        record = {
            "text": completion.text,
            "prompt_tokens": completion.num_prompt_tokens,
            "tokens": len(completion.token_ids),
            "finish_reason": completion.finish_reason,
        }
        typer.echo(json.dumps(record, ensure_ascii=False) if self._as_json else "")


# ------------------------------------------------------------------ line by line


def _converse(conversation: _Conversation) -> None:
    """Answer lines of standard input until its end or /exit.

    Ctrl-C twice without a line in between raises KeyboardInterrupt.
    """
    prompt = ""
    if sys.stdin.isatty():
        import readline  # noqa: F401  arrow keys and earlier lines

        prompt = "> "
        typer.echo(_HELP, err=True)
    was_interrupted = False
    while True:
        try:
            line = input(prompt).strip()
            was_interrupted = False
            if line in ("/exit", "/quit"):
                return
            if line:
                conversation.read(line)
        except EOFError:
            return
        except UserError as error:
            typer.echo(f"saccade: {error}", err=True)
        except KeyboardInterrupt:
            if was_interrupted:
                raise
            was_interrupted = True
            typer.echo("\n(Ctrl-C again or /exit ends)", err=True)


class _Conversation:
    """The messages so far, and images for the next question."""

    def __init__(self, answers: _Answers, start: list[dict[str, Any]], fps: float) -> None:
        self._answers, self._start, self._fps = answers, start, fps
        self._messages = list(start)
        self._media: list[dict[str, Any]] = []

    def read(self, line: str) -> None:
        """Answer a question, or do what a line with a slash says. A line of paths alone is for the next question."""
        first, _, rest = line.partition(" ")
        if first == "/new":
            self._messages, self._media = list(self._start), []
        elif first == "/image":
            self._media += [_media_part(_existing(path), self._fps) for path in map(_path, _WORD.findall(rest))]
        elif re.fullmatch(r"/\w+", first):
            typer.echo(_HELP, err=True)
        else:
            content = [*self._media, *_parts(line, self._fps)]
            is_question = any(part["type"] == "text" for part in content)
            self._media = [] if is_question else content
            if is_question:
                self._ask({"role": "user", "content": content})

    def _ask(self, question: dict[str, Any]) -> None:
        """A question without an answer, as it was refused, is not part of the conversation; a stopped answer is."""
        try:
            self._answers.answer([*self._messages, question])
        finally:
            if self._answers.text:
                self._messages += [question, {"role": "assistant", "content": self._answers.text}]


def _parts(line: str, fps: float) -> list[dict[str, Any]]:
    """Return text, images and videos of a line in order.

    A word is a path if it ends like a media file and the file exists.
    """
    parts: list[dict[str, Any]] = []
    text_start = 0
    for word in _WORD.finditer(line):
        path = _path(word[0].rstrip("?!,.;:"))
        if Path(path).suffix.lower() in _IMAGE_SUFFIXES | _VIDEO_SUFFIXES and Path(path).is_file():
            parts += [_text_part(line[text_start : word.start()]), _media_part(path, fps)]
            text_start = word.start() + len(word[0].rstrip("?!,.;:"))
    parts.append(_text_part(line[text_start:]))
    return [part for part in parts if part.get("text") != ""]


def _path(word: str) -> str:
    """The path that a word of a line names: quoted, with escaped characters, or plain."""
    plain = word[1:-1] if word[0] in "'\"" and word[-1] == word[0] else re.sub(r"\\(.)", r"\1", word)
    return os.path.expanduser(plain)  # noqa: PTH111  Path.expanduser raises for users that do not exist


def _existing(path: str) -> str:
    if not Path(path).is_file():
        raise ConfigError(f"{path}: no such file. Check the path; one with spaces needs quotes")
    return path


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text.strip()}


def _media_part(file: str, fps: float) -> dict[str, Any]:
    """The message part of an image or video file."""
    if Path(file).suffix.lower() in _VIDEO_SUFFIXES:
        return {"type": "video", "video": file, "fps": fps}
    return {"type": "image", "image": file}

"""`saccade serve` and `saccade keys`: the server and its API keys."""

import json
import logging
from pathlib import Path
from typing import Annotated, Any

import typer

from saccade.cli.hub import checkpoint_folder
from saccade.cli.options import (
    CommandGroup,
    DeviceOption,
    DtypeOption,
    JsonOption,
    TensorParallelOption,
    check_adapter,
    check_modules,
)
from saccade.errors import ConfigError
from saccade.workers.process import exit_on_interrupt

keys = typer.Typer(help="API keys of a server.", no_args_is_help=True, cls=CommandGroup)


def serve(
    checkpoint: Annotated[str, typer.Argument(help="Checkpoint folder, or ORG/NAME of the Hugging Face Hub.")],
    host: Annotated[
        str, typer.Option(help="Address to listen on; other than loopback needs --api-keys.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0 takes a free one.")] = 8000,
    api_keys: Annotated[Path | None, typer.Option(help="Key file made by saccade keys create.")] = None,
    no_auth: Annotated[bool, typer.Option("--no-auth", help="Serve other machines without keys.")] = False,
    model_name: Annotated[
        str | None, typer.Option(help="Name of the model in requests.", show_default="the folder's name")
    ] = None,
    adapter: Annotated[
        list[str] | None,
        typer.Option(help="NAME=FOLDER: serve a LoRA adapter as a model of this name; may be repeated."),
    ] = None,
    chat_template: Annotated[
        Path | None, typer.Option(help="Jinja file to use as chat template.", show_default="the checkpoint's")
    ] = None,
    tool_call_format: Annotated[
        str | None,
        typer.Option(help="How the model calls tools: hermes, or none.", show_default="by the chat template"),
    ] = None,
    allow_remote_media: Annotated[
        list[str] | None,
        typer.Option(help="Fetch images and videos by URL from this host (host:port if private); may be repeated."),
    ] = None,
    max_model_len: Annotated[
        int | None, typer.Option(min=1, help="Maximum tokens of prompt and output.", show_default="the model's")
    ] = None,
    max_requests: Annotated[int, typer.Option(min=1, help="Requests that run at the same time.")] = 256,
    max_queued: Annotated[int, typer.Option(min=1, help="Requests that may wait; more are answered 429.")] = 256,
    admin_port: Annotated[
        int | None, typer.Option(help="Loopback port of the admin routes; needs an admin key.", show_default="none")
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="Any other limit, serve.KEY=VALUE or engine.KEY=VALUE; may be repeated."),
    ] = None,
    json_logs: Annotated[bool, typer.Option("--json-logs", help="Log JSON lines.")] = False,
    tensor_parallel_size: TensorParallelOption = 1,
    device: DeviceOption = "auto",
    dtype: DtypeOption = None,
) -> None:
    """Serve a checkpoint over HTTP with OpenAI's API. Listens on loopback only, unless --host says otherwise."""
    check_modules("serve", ("fastapi", "uvicorn", "orjson", "prometheus_client"))
    with exit_on_interrupt():
        from saccade.config import override_config
        from saccade.engine import EngineConfig
        from saccade.log import set_up_logging
        from saccade.processor.chat_template import check_template
        from saccade.serve import ServeConfig
        from saccade.serve import serve as run

    overrides: dict[str, list[str]] = {"serve": [], "engine": []}
    for setting in set_ or []:
        section, _, rest = setting.partition(".")
        if section not in overrides:
            raise ConfigError(f"--set {setting}: use serve.KEY=VALUE or engine.KEY=VALUE. See docs/serving.md")
        overrides[section].append(rest)
    folder = checkpoint_folder(checkpoint)
    if model_name is None and folder != Path(checkpoint):
        model_name = checkpoint  # downloaded: the folder is named by a hash
    config = ServeConfig(
        host=host, port=port, api_keys=api_keys, no_auth=no_auth, model_name=model_name, max_queued_requests=max_queued,
        admin_port=admin_port, allow_remote_media=tuple(allow_remote_media or ()), tool_call_format=tool_call_format,
    )  # fmt: skip
    if json_logs:
        set_up_logging(as_json=True, verbose=logging.getLogger("saccade").level == logging.DEBUG)
    source = None if chat_template is None else check_template(chat_template)
    engine = EngineConfig(
        core_process=True, max_length=max_model_len, max_requests=max_requests, chat_template=source,
        tensor_parallel_size=tensor_parallel_size,
    )  # fmt: skip
    run(
        folder,
        override_config(config, overrides["serve"], "--set serve"),
        override_config(engine, overrides["engine"], "--set engine"),
        device=device,
        dtype=dtype,
        adapters=_adapters(adapter or [], config.model_name or folder.resolve().name),
        on_listening=lambda url, *admin: typer.echo(
            f"{url}  loading {checkpoint}" + "".join(f"\n{other}  admin" for other in admin)
        ),
    )


def _adapters(named: list[str], model_name: str) -> dict[str, Path]:
    """Folders by name."""
    found: dict[str, Path] = {}
    for one in named:
        name, _, path = one.partition("=")
        if not name or not path:
            raise ConfigError(f"--adapter {one}: use NAME=FOLDER")
        if name in found or name == model_name:
            raise ConfigError(f"--adapter {one}: the name {name!r} is taken. Choose another one")
        check_adapter(Path(path), f"--adapter {one}")
        found[name] = Path(path)
    return found


@keys.command("create")
def create(
    file: Annotated[Path, typer.Argument(help="Key file; created if missing.")],
    name: Annotated[str, typer.Option(help="Name of the key in logs and metrics.")],
    tenant: Annotated[
        str | None, typer.Option(help="Keys of one tenant share caches.", show_default="the key's name")
    ] = None,
    requests_per_minute: Annotated[int | None, typer.Option(min=1, help="Rate limit of requests.")] = None,
    tokens_per_minute: Annotated[int | None, typer.Option(min=1, help="Rate limit of tokens.")] = None,
    admin: Annotated[bool, typer.Option("--admin", help="A key of the admin port instead of the API.")] = False,
) -> None:
    """Add an API key to a key file and print it. The file has only its hash."""
    from saccade.serve.keys import create_key

    fields: dict[str, Any] = {
        "name": name,
        "tenant": tenant,
        "requests_per_minute": requests_per_minute,
        "tokens_per_minute": tokens_per_minute,
        "scope": "admin" if admin else "api",
    }
    typer.echo(create_key(file, **fields))


@keys.command("list")
def list_(
    file: Annotated[Path, typer.Argument(help="Key file made by saccade keys create.")], as_json: JsonOption = False
) -> None:
    """List the keys of a key file: names, scopes, tenants and limits. The keys themselves are stored nowhere."""
    from saccade.serve.keys import read_keys

    entries = [
        {
            "name": key.name,
            "scope": key.scope,
            "tenant": key.tenant or key.name,
            "requests_per_minute": key.requests_per_minute,
            "tokens_per_minute": key.tokens_per_minute,
        }
        for key in read_keys(file)
    ]
    if as_json:
        typer.echo(json.dumps({"keys": entries}, ensure_ascii=False))
        return
    if not entries:
        typer.echo(f"{file}: no keys")
        return
    titles = ("NAME", "SCOPE", "TENANT", "REQUESTS/MIN", "TOKENS/MIN")
    rows = [titles, *(tuple("-" if value is None else str(value) for value in entry.values()) for entry in entries)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        typer.echo("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())


@keys.command("revoke")
def revoke(
    file: Annotated[Path, typer.Argument(help="Key file made by saccade keys create.")],
    name: Annotated[str, typer.Argument(help="Name of the key; see saccade keys list.")],
) -> None:
    """Remove a key from a key file. A running server refuses the key within seconds.

    Requests that have started end as usual.
    """
    from saccade.serve.keys import revoke_key

    revoke_key(file, name)
    typer.echo(f"{file}: the key {name} is revoked")

"""Start the server, wait for signals, drain, stop.

The first SIGTERM or SIGINT drains: new requests are refused with 503, those in progress finish. The second one quits.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import logging
import resource
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import uvicorn

from saccade.engine import Engine
from saccade.engine.config import EngineConfig
from saccade.engine.frontend.adapters import with_slots
from saccade.engine.frontend.preprocessing.preprocessor import default_num_workers
from saccade.errors import ConfigError, UserError
from saccade.processor import MediaLimits
from saccade.processor.families import vision_language_type
from saccade.serve.app import create_admin_app, create_app
from saccade.serve.config import ServeConfig
from saccade.serve.front import Front
from saccade.serve.gate import Gate
from saccade.serve.http_protocol import guarded_protocol
from saccade.serve.keys import KeyRing
from saccade.serve.models import OneModel
from saccade.serve.remote_media import RemoteMedia
from saccade.serve.service import Service
from saccade.serve.supervisor import Supervisor
from saccade.serve.tracing import RequestTracer, otlp_provider

logger = logging.getLogger(__name__)

_BACKLOG = 1024
"""Maximum connections that wait to be accepted."""
_OTHER_FILES = 768
"""Open files that are not connections: images in shared memory, workers, the log."""
_GRACE_S = 5
"""Time for the last bytes of answers after a drain."""
_ADMIN_HOST = "127.0.0.1"


def serve(
    checkpoint: Path,
    config: ServeConfig,
    engine_config: EngineConfig,
    *,
    device: str = "auto",
    dtype: str | None = None,
    limits: MediaLimits | None = None,
    adapters: Mapping[str, Path] | None = None,
    on_listening: Callable[..., None] = lambda *urls: None,
) -> None:
    """Serve a checkpoint until a signal. `adapters`: PEFT folders, served as models of these names.

    `on_listening` is called with the URL, and with that of the admin routes if they are served. The model may still be
    loading.
    """
    vision_language_type(checkpoint)  # a wrong folder is an error before anything starts
    keys = None if config.api_keys is None else KeyRing(config.api_keys)
    engine_config, limits = with_media_workers(engine_config), limits or public_limits()
    remote_media = None
    if config.allow_remote_media:
        remote_media = RemoteMedia(config.allow_remote_media, limits=limits, timeout_s=config.remote_media_timeout_s)
    engine_config = with_slots(engine_config, adapters or {})
    load = partial(
        Engine.load, checkpoint, device=device, dtype=dtype, config=engine_config, limits=limits, adapters=adapters
    )
    supervisor = Supervisor(load, max_restarts=config.max_restarts, backoff_s=config.restart_backoff_s)
    front = Front(config=config, keys=keys, remote_media=remote_media)
    service = Service(
        front=front,
        engine_config=engine_config,
        model_name=config.model_name or checkpoint.resolve().name,
        owner=supervisor,
    )
    only_model = service.model_name if engine_config.max_adapters == 0 else None
    gate = create_app(front, OneModel(service), only_model=only_model)
    with contextlib.ExitStack() as opened:
        sockets = [opened.enter_context(contextlib.closing(listen(config.host, config.port)))]
        gates = [gate]
        if config.admin_port is not None:
            sockets.append(opened.enter_context(contextlib.closing(listen(_ADMIN_HOST, config.admin_port))))
            gates.append(create_admin_app(service, supervisor))
        opened.enter_context(traced(front, service.model_name))
        on_listening(*[url_of(one) for one in sockets])
        listeners = [Listener(config, *pair) for pair in zip(gates, sockets, strict=True)]
        lifecycle = _Lifecycle(service, supervisor, gate, listeners)
        with asyncio.Runner(loop_factory=event_loop_factory()) as runner:
            runner.run(lifecycle.run())
    if lifecycle.is_interrupted:
        raise KeyboardInterrupt
    if supervisor.error is not None:
        if isinstance(supervisor.error, UserError):
            raise supervisor.error
        raise RuntimeError("the engine has failed; the log above says why") from supervisor.error


@contextlib.contextmanager
def traced(front: Front, model_name: str | None = None) -> Iterator[None]:
    """Export spans of all requests, if an endpoint is configured. `model_name` is the only model, if there is one."""
    if front.config.otlp_endpoint is None:
        yield
        return
    tracer = RequestTracer(model_name, otlp_provider(front.config.otlp_endpoint))
    front.tracer = tracer
    front.observers.append(tracer.observe)
    try:
        yield
    finally:
        tracer.close()


def public_limits() -> MediaLimits:
    """Return the limits on images and videos of clients, which may not name paths."""
    return MediaLimits(allow_local_files=False)


def with_media_workers(config: EngineConfig) -> EngineConfig:
    """Configure at least one worker: files of clients are decoded in sandboxed processes, never in this one."""
    if config.num_workers == 0:
        raise ConfigError("engine.num_workers is 0: the server decodes images in worker processes. Use at least 1")
    if config.num_workers is None:
        return dataclasses.replace(config, num_workers=max(1, default_num_workers()))
    return config


def listen(host: str, port: int, *, shares_port: bool = False) -> socket.socket:
    """Open a listening socket, before anything expensive starts.

    `shares_port`: other processes of this user may listen on the same port; the kernel divides connections among them.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if shares_port:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        listening.bind((host, port))
        listening.listen(_BACKLOG)
    except OSError as error:
        listening.close()
        is_host = isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL
        remedy = (
            "an address of this machine with --host" if is_host else "another with --port, or --port 0 for a free one"
        )
        raise ConfigError(f"cannot listen on {host} port {port}: {error.strerror}. Choose {remedy}") from error
    return listening


def allowed_connections(wanted: int) -> int:
    """Raise this process's limit on open files for the wanted connections; return how many are allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + _OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        if soft < needed:
            logger.warning(
                "%d connections are allowed instead of %d: the limit on open files is %d",
                soft - _OTHER_FILES,
                wanted,
                hard,
            )
    return wanted if soft == resource.RLIM_INFINITY else max(16, min(wanted, soft - _OTHER_FILES))


def _set_up_uvicorn_log() -> None:
    """Log uvicorn's errors where ours go. Its warnings are about what clients send, and would fill the log."""
    uvicorn_logger = logging.getLogger("uvicorn.error")
    uvicorn_logger.handlers[:] = logging.getLogger("saccade").handlers
    uvicorn_logger.propagate = False
    uvicorn_logger.setLevel(logging.ERROR)


def url_of(listening: socket.socket) -> str:
    """Return the URL of a listening socket."""
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def event_loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return uvloop's factory, if it is installed."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


class Listener(uvicorn.Server):
    """uvicorn for one application, with our connection limits. `_Lifecycle` handles signals."""

    def __init__(self, config: ServeConfig, gate: Gate, listening: socket.socket) -> None:
        super().__init__(
            uvicorn.Config(
                gate,
                http=guarded_protocol(config, allowed_connections(config.max_connections)),
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                timeout_keep_alive=int(config.keep_alive_s),
                timeout_graceful_shutdown=_GRACE_S,
                backlog=_BACKLOG,
            )
        )
        self._listening = listening
        _set_up_uvicorn_log()

    async def listen(self) -> None:
        """Serve until `should_exit`."""
        await self.serve(sockets=[self._listening])

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle no signals."""
        yield

    def quit(self) -> None:
        """Stop without waiting for connections."""
        self.should_exit = self.force_exit = True


class _Lifecycle:
    """Runs the listeners, drains and stops them."""

    def __init__(self, service: Service, supervisor: Supervisor, gate: Gate, listeners: Sequence[Listener]) -> None:
        """`gate` counts the requests that a drain waits for."""
        self._service, self._supervisor, self._gate, self._listeners = service, supervisor, gate, listeners
        self._draining: asyncio.Task[None] | None = None
        self.is_interrupted = False
        """Whether a Ctrl-C has ended the server while the model was loading."""

    async def run(self) -> None:
        """Run until a signal, or until the engine has failed for good."""
        loop, supervisor, front = asyncio.get_running_loop(), self._supervisor, self._service.front
        supervisor.on_failed = lambda: _post(loop, self._quit)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        supervisor.start()
        recording = asyncio.create_task(front.record_history())
        try:
            await asyncio.gather(*[listener.listen() for listener in self._listeners])
        finally:
            recording.cancel()
            await front.close()
            await asyncio.to_thread(supervisor.stop)

    def _on_signal(self, number: int) -> None:
        is_loading = self._supervisor.state == "loading"
        if is_loading or self._draining is not None:
            self.is_interrupted = is_loading and number == signal.SIGINT
            self._quit()
            return
        logger.info("draining: no new requests; those in progress finish. A second signal quits")
        self._supervisor.drain()
        self._draining = asyncio.create_task(self._drain())

    async def _drain(self) -> None:
        """Wait for requests in progress, cancel those that take too long, and stop."""
        deadline = time.monotonic() + self._service.front.config.drain_timeout_s
        while self._gate.num_open and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        if self._gate.num_open:
            logger.warning("%d requests did not finish in time and are cancelled", self._gate.num_open)
            self._service.cancel_all()
        for listener in self._listeners:
            listener.should_exit = True

    def _quit(self) -> None:
        for listener in self._listeners:
            listener.quit()


def _post(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    """Run a call in the event loop, from another thread."""
    loop.call_soon_threadsafe(call)

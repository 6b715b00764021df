"""Real servers on loopback for the tests of `data`: files over HTTP with ranges, and S3, both with faults on demand."""

import contextlib
import functools
import http.client
import re
import socket
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class Faults:
    """The faults of a server, and the requests it has seen.

    Every `every`-th request that reads content is answered with the fault.
    """

    def __init__(self, kind=None, every=3):
        self.kind, self.every = kind, every
        self.requests, self.num_faults = [], 0
        self._lock = threading.Lock()

    def is_due(self, line):
        with self._lock:
            self.requests.append(line)
            is_due = self.kind is not None and len(self.requests) % self.every == 0
            self.num_faults += is_due
            return is_due


class _Handler(SimpleHTTPRequestHandler):
    """Files of a folder; answers ranges, which the standard handler does not."""

    protocol_version = "HTTP/1.1"

    def __init__(self, *arguments, faults, **options):
        self.faults = faults
        super().__init__(*arguments, **options)

    def do_GET(self):
        if self.faults.is_due(f"GET {self.path} {self.headers.get('Range', '')}") and self._misbehave():
            return
        path = Path(self.translate_path(self.path))
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if not asked or not path.is_file() or self.faults.kind == "no ranges":
            super().do_GET()
            return
        data = path.read_bytes()
        begin, end = int(asked[1]), min(int(asked[2] or len(data)), len(data) - 1)
        if begin >= len(data):
            self._answer(416, b"")
            return
        self._answer(206, data[begin : end + 1], {"Content-Range": f"bytes {begin}-{end}/{len(data)}"})

    def do_HEAD(self):
        if not self.faults.is_due(f"HEAD {self.path}") or not self._misbehave():
            super().do_HEAD()

    def _misbehave(self):
        """Whether the fault was the whole answer."""
        kind = self.faults.kind
        if isinstance(kind, int):
            self._answer(kind, b"")
        elif kind == "cut" and "Range" not in self.headers:
            return False
        elif kind == "cut":  # promises more than it sends
            self.send_response(206)
            self.send_header("Content-Length", "1000000")
            self.end_headers()
            self.wfile.write(b"x" * 1000)
            self.close_connection = True
        elif kind == "reset":
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True
        elif kind == "hang":
            threading.Event().wait(30)
            self.close_connection = True
        return kind != "no ranges"

    def _answer(self, status, body, headers=()):
        self.send_response(status)
        for name, value in dict(headers).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments):
        pass


class _Proxy(_Handler):
    """Passes requests on to another server on loopback."""

    def __init__(self, *arguments, port, **options):
        self.port = port
        super().__init__(*arguments, **options)

    def _pass_on(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.faults.is_due(f"{self.command} {self.path} {self.headers.get('Range', '')}") and self._misbehave():
            return
        connection = http.client.HTTPConnection("127.0.0.1", self.port)
        connection.request(self.command, self.path, body, dict(self.headers))
        response = connection.getresponse()
        data = response.read()
        self.send_response(response.status)
        skipped = {"transfer-encoding", "connection", "server", "date"}
        for name, value in response.getheaders():
            if name.lower() not in skipped:
                self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)
        connection.close()

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _pass_on  # noqa: N815


@contextlib.contextmanager
def _running(handler):
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextlib.contextmanager
def serve_folder(folder, kind=None, every=3):
    """A folder over HTTP: (URL, faults). `kind`: a status, "cut", "reset", "hang" or "no ranges"."""
    faults = Faults(kind, every)
    with _running(functools.partial(_Handler, directory=str(folder), faults=faults)) as port:
        yield f"http://127.0.0.1:{port}", faults


@contextlib.contextmanager
def proxy_to(port, kind=None, every=3):
    """The server on `port`, with faults in front of it: (URL, faults)."""
    faults = Faults(kind, every)
    with _running(functools.partial(_Proxy, port=port, faults=faults)) as own:
        yield f"http://127.0.0.1:{own}", faults

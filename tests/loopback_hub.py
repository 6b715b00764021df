"""A Hugging Face Hub on loopback that has one repository."""

import hashlib
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@contextmanager
def serve_hub(folder, repository, kind="models"):
    """Serve the files of a folder as a repository; yields the environment of a client, and the names it has read."""
    served = []
    prefix = f"/{repository}" if kind == "models" else f"/{kind}/{repository}"

    class Hub(BaseHTTPRequestHandler):
        def do_GET(self):
            path = self.path.partition("?")[0]
            files = {str(file.relative_to(folder)): file for file in sorted(folder.rglob("*")) if file.is_file()}
            if path.startswith(f"/api/{kind}/{repository}"):
                siblings = [{"rfilename": name, "size": file.stat().st_size} for name, file in files.items()]
                tree = [
                    {"type": "file", "path": one["rfilename"], "size": one["size"], "oid": "0" * 40} for one in siblings
                ]
                info = {"id": repository, "sha": COMMIT, "private": False, "siblings": siblings}
                return self._reply(json.dumps(tree if "/tree/" in path else info).encode(), {})
            if (name := path.removeprefix(f"{prefix}/resolve/{COMMIT}/")) not in files:
                return self._reply(b"", {"X-Error-Code": "RepoNotFound"}, status=404)
            if self.command == "GET":
                served.append(name)
            data = files[name].read_bytes()
            return self._reply(data, {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Repo-Commit": COMMIT})

        do_HEAD = do_GET  # noqa: N815

        def _reply(self, body, headers, status=200):
            self.send_response(status)
            for name, value in {"Content-Type": "application/json", **headers, "Content-Length": len(body)}.items():
                self.send_header(name, str(value))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        yield {"HF_ENDPOINT": url, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}, served
        server.shutdown()

"""What the scripts of Python clients share: the server they talk to, and how their checks are run and reported."""

import asyncio
import base64
import inspect
import os
import struct
import traceback
import zlib
from pathlib import Path

URL = os.environ["SACCADE_URL"] + "/v1"
KEY = os.environ["SACCADE_KEY"]
MODEL = "tiny"
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": [1, 2]}, "b": {"enum": [3, 4]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
ADD = {"type": "function", "function": {"name": "add", "description": "Adds two numbers.", "parameters": SCHEMA}}


def png():
    """A small image, made without a library that the environment may not have."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    pixels = b"".join(b"\0" + bytes([200, 30, 60]) * 56 for _ in range(56))
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", 56, 56, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(pixels)) + chunk(b"IEND", b"")


IMAGE = "data:image/png;base64," + base64.b64encode(png()).decode()


def run(checks):
    """Run all checks and print one line for each; exits with 1 if one has failed."""
    failed = 0
    for name, check in checks.items():
        if not name.startswith("check_"):
            continue
        try:
            asyncio.run(check()) if inspect.iscoroutinefunction(check) else check()
            print("ok     ", name.removeprefix("check_").replace("_", " "), flush=True)
        except Exception as error:
            failed += 1
            print("FAILED ", name.removeprefix("check_").replace("_", " "), flush=True)
            where = traceback.extract_tb(error.__traceback__)
            line = next(
                (one.lineno for one in reversed(where) if Path(one.filename).parent == Path(__file__).parent), 0
            )
            print(f"        line {line}: {type(error).__name__}: {error}"[:1500], flush=True)
    raise SystemExit(1 if failed else 0)

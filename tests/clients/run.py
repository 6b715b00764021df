"""Run the scripts of this folder against a server on a tiny checkpoint: `make test-clients`.

    python tests/clients/run.py CLIENTS_PYTHON [NAME ...]

CLIENTS_PYTHON is the Python that has the clients of `requirements.txt`; the JavaScript clients are in `node_modules`.
Each script prints one line per check. Exits with 1 if one has failed. NAMEs select scripts by the beginning of their
names.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1])]

from model.hugging_face import SHAPES, make_checkpoint  # noqa: E402
from serve.running import RunningServer  # noqa: E402

from saccade.serve.keys import create_key  # noqa: E402

TIMEOUT_S = 300
"""Timeout of one script."""
SETTINGS = ("engine.num_pages=800",)


def main(clients_python, *names):
    commands = {
        "openai, of the development environment": [sys.executable, "openai_client.py"],
        "openai": [clients_python, "openai_client.py"],
        "litellm": [clients_python, "litellm_client.py"],
        "langchain-openai": [clients_python, "langchain_client.py"],
        "llama-index": [clients_python, "llama_index_client.py"],
        "openai (JavaScript)": ["node", "openai_client.mjs"],
        "ai, @ai-sdk/openai-compatible (JavaScript)": ["node", "ai_sdk_client.mjs"],
    }
    chosen = {title: words for title, words in commands.items() if not names or words[1].startswith(names)}
    failed = []
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        checkpoint = make_checkpoint(folder / "tiny", SHAPES[0])
        key = create_key(folder / "keys.json", name="clients")
        options = ["--api-keys", folder / "keys.json", "--max-model-len", 4096]
        with RunningServer(checkpoint, folder, *options, settings=SETTINGS, key=key) as server:
            environment = os.environ | {"SACCADE_URL": server.url, "SACCADE_KEY": key}
            for title, words in chosen.items():
                print(f"\n{title}", flush=True)
                ended = subprocess.run(words, cwd=HERE, env=environment, timeout=TIMEOUT_S, check=False)
                failed += [title] if ended.returncode else []
    print(f"\nfailed: {', '.join(failed)}" if failed else "\nall clients passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

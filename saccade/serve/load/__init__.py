"""Load on a server with OpenAI's chat API, ours or another one, and its latencies: `saccade bench serve URL`. Start at `loops.py`."""

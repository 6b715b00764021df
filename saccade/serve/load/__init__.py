"""`saccade bench serve URL`: load on a server with OpenAI's chat API, and its latencies. Start at `loops.py`."""

"""The front end: conversations to token prompts, output tokens to text.

Start with `api.py`, the public `Engine`. The front end exchanges messages with the core (`saccade.engine.core.messages`) through a
transport, and never imports code of the device.
"""

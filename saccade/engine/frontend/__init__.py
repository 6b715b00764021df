"""The front end: conversations to token prompts, output tokens to text.

Start with `front_end.py`, which follows every accepted request to its end. The front end exchanges messages
(`saccade.engine.core.messages`) with the core and never imports the device.
"""

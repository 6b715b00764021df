"""The front end: conversations to token prompts, output tokens to text.

Start with `front_end.py`, which follows every accepted request to its end. The front end exchanges messages with the core
(`saccade.engine.core.messages`) through a transport; it never imports code of the device.
"""

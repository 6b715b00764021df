"""The front end: conversations to token prompts, output tokens to text.

Start with `open_requests.py`, which follows every accepted request to its end, and `front_end.py`, whose requests get
text. The front end exchanges messages (`saccade.engine.core.messages`) with the core and never imports the device.
"""

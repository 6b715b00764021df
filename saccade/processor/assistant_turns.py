"""Find the assistant's turns in a rendered conversation.

A chat template does not mark turns, so they are found by rendering: a turn begins after the generation prompt and ends
where the next message begins.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from saccade.errors import RequestError
from saccade.processor.messages import Message

Render = Callable[..., str]
"""`ChatTemplate.render` with the tools of the conversation."""
_MAX_WHOLE_RENDERINGS = 32
"""Maximum turns of a request that are rendered with all earlier turns: each takes time in proportion to length."""


def assistant_turns(
    messages: Sequence[Message], text: str, render: Render, *, is_training: bool
) -> list[tuple[int, int]]:
    """Start and end of each assistant turn in `text`: after the generation prompt, up to the next message.

    A turn is located by rendering it after the turn before it, so that the cost is linear in the number of turns. If
    the template writes it differently there (numbered messages, for example), it is rendered after the whole
    conversation. The turns are unknown if the template rewrites earlier ones: training needs them, serving does not.
    """
    turns: list[tuple[int, int]] = []
    num_system = next((i for i, message in enumerate(messages) if message["role"] != "system"), len(messages))
    num_whole = 0
    previous = first = num_system  # the first message of the turn before, and of this one
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        end = turns[-1][1] if turns else 0
        context = [*messages[:num_system], *messages[previous:first]]
        turn = _locate_turn(context, messages[first : number + 1], text, end, render)
        if turn is None and previous > num_system:
            num_whole += 1
            if not is_training and num_whole > _MAX_WHOLE_RENDERINGS:
                raise RequestError(
                    "the chat template writes each turn depending on all earlier ones, which takes too long for "
                    f"{number + 1} messages. Send fewer turns"
                )
            turn = _locate_turn(messages[:first], messages[first : number + 1], text, end, render)
        if turn is None:
            if not is_training:
                return []
            raise RequestError(
                f"messages[{number}]: the chat template rewrites earlier turns, so the tokens to train on "
                "cannot be found. End the conversation at this turn, or train with a template that only appends"
            )
        turns.append(turn)
        previous, first = first, number + 1
    return turns


def _locate_turn(
    context: Sequence[Message], turn: Sequence[Message], text: str, offset: int, render: Render
) -> tuple[int, int] | None:
    """Start and end in `text` of the assistant's message that ends `turn`. None: `text` has another turn there.

    The turn should be at `offset`, after the rendered `context`.
    """
    conversation = [*context, *turn]
    after = render(conversation, add_generation_prompt=False)
    start = turn_start(conversation, len(conversation) - 1, after, render)
    before = render(context, add_generation_prompt=False) if offset else ""
    if start is None or start < len(before) or not after.startswith(before):
        return None
    written = after[len(before) :]
    start += offset - len(before)
    if len(text) >= start and written.startswith(text[offset:]):  # a turn to be continued
        return start, len(text)
    return (start, offset + len(written)) if text.startswith(written, offset) else None


def turn_start(messages: Sequence[Message], number: int, after: str, render: Render) -> int | None:
    """Where the text of an assistant's message begins in `after`, the conversation up to it; None if that is unknown.

    It begins after the generation prompt. In a past turn a template may write the prompt with further white space.
    """
    before = render(messages[:number], add_generation_prompt=True)
    if after.startswith(before):
        return len(before)
    past = render(messages[:number], add_generation_prompt=False)
    if not (before.startswith(past) and after.startswith(past)):
        return None
    pattern = "".join(f"[ \\t]*{re.escape(c)}" if c.isspace() else re.escape(c) for c in before[len(past) :])
    found = re.compile(pattern).match(after, len(past))
    return found.end() if found else None


def split_turns(text: str, turns: Sequence[tuple[int, int]]) -> list[tuple[str, bool]]:
    """The text in parts: (part, whether it is an assistant turn)."""
    parts, end = [], 0
    for start, stop in turns:
        parts += [(text[end:start], False), (text[start:stop], True)]
        end = stop
    return [*parts, (text[end:], False)]

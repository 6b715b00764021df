"""Assistant turns are found in a rendered conversation, in time proportional to their number."""

import pytest
from processor.messages import CHATML, assistant, system, user

from saccade.errors import RequestError
from saccade.processor.chat_template import ChatTemplate
from saccade.processor.conversation import render_prompt

MISTRAL = (
    "{% for message in messages %}{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{ "
    "raise_exception('no') }}{% endif %}"
    "{% if message.role == 'user' %}[INST] {{ message.content }} [/INST]{% else %} "
    "{{ message.content }}<|im_end|>{% endif %}"
    "{% endfor %}"
)
NUMBERED = CHATML.replace("{{ message.content }}", "{{ loop.index }}: {{ message.content }}")
NUMBERED_PROMPT = NUMBERED.replace("assistant\n{% endif %}", "assistant\n{{ messages|length + 1 }}: {% endif %}")


def many_turns(count, *first):
    words = ("hi", "", "hi <|im_end|>", "a\nb ", "assistant\n")
    turns = [[user(words[i % 5] or "x"), assistant(words[i % 3])] for i in range(count)]
    return [*first, *(message for turn in turns for message in turn)]


@pytest.mark.parametrize(
    "source", [CHATML, MISTRAL, NUMBERED, NUMBERED_PROMPT], ids=["chatml", "mistral", "numbered", "prompt"]
)
def test_turns_are_found_where_each_is_when_it_is_the_last(processor, source):
    """The oracle renders the conversation up to each turn."""
    messages = many_turns(9, *([] if source is MISTRAL else [system("s")]))
    template = ChatTemplate(source)
    found = render_prompt(messages, template, processor.tokenizer, add_generation_prompt=False)
    for number, message in enumerate(messages):
        if message["role"] == "assistant":
            alone = render_prompt(messages[: number + 1], template, processor.tokenizer, add_generation_prompt=False)
            assert alone.pieces == found.pieces[: len(alone.pieces)]


class CountedTemplate(ChatTemplate):
    num_messages = 0

    def render(self, messages, **options):
        self.num_messages += len(messages)
        return super().render(messages, **options)


@pytest.mark.parametrize("source", [CHATML, MISTRAL], ids=["chatml", "mistral"])
def test_rendering_takes_time_in_proportion_to_the_number_of_turns(processor, source):
    template = CountedTemplate(source)
    messages = [*many_turns(400), user("x")]
    prompt = render_prompt(messages, template, processor.tokenizer, add_generation_prompt=True)
    assert template.num_messages < 20 * len(messages)
    assert len(prompt.pieces) > 400


def test_a_template_that_needs_all_turns_for_each_is_refused_for_many(processor):
    template = ChatTemplate(NUMBERED)
    render_prompt([*many_turns(30), user("x")], template, processor.tokenizer, add_generation_prompt=True)
    with pytest.raises(RequestError, match="Send fewer turns"):
        render_prompt([*many_turns(40), user("x")], template, processor.tokenizer, add_generation_prompt=True)

"""Messages, templates and fragments of text that the tests of conversations share."""

from hypothesis import settings
from hypothesis import strategies as st
from PIL import Image

from saccade.processor import Processor
from saccade.processor.chat_template import ChatTemplate

repeatable = settings(deadline=None, derandomize=True)
NONCHARACTERS = "".join(map(chr, range(0xFDD0, 0xFDF0)))
FRAGMENTS = [
    "<|im_end|>",
    "<|im_start|>",
    "<|image_pad|>",
    "<|vision_start|>",
    "<|",
    "|>",
    "im_end",
    "<",
    ">",
    "|",
    "\n",
    " ",
    "é",
    "🙂",
    "\ufdd0",
    "\ufdd1",
    "assistant",
]
tricky_text = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=5), max_size=10).map("".join)
PICTURE = Image.new("RGB", (56, 56), "crimson")

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def user(content):
    return {"role": "user", "content": content}


def assistant(content):
    return {"role": "assistant", "content": content}


def system(content):
    return {"role": "system", "content": content}


def text_part(text):
    return {"type": "text", "text": text}


def image_part(image=PICTURE):
    return {"type": "image", "image": image}


def control_names(processor, inputs):
    """The names of the control tokens of model inputs, in order."""
    names = {token_id: name for name, token_id in processor.tokenizer.control_ids.items()}
    return [names[token_id] for token_id in inputs.token_ids.tolist() if token_id in names]


def whole_text(processor, inputs):
    return processor.tokenizer.decode(inputs.token_ids.tolist(), skip_special=False)


def trained_text(processor, inputs):
    return processor.tokenizer.decode(inputs.token_ids[inputs.loss_mask].tolist(), skip_special=False)


def with_template(processor, source):
    """The same processor with another template."""
    return Processor(
        tokenizer=processor.tokenizer,
        template=ChatTemplate(source),
        rules=processor.rules,
        eos_ids=processor.eos_ids,
        limits=processor.limits,
    )

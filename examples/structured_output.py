"""Read fields from an image: the answer is valid JSON by a schema, whatever the model would have said.

python examples/structured_output.py CHECKPOINT photo.jpg
"""

import json
import sys

from saccade.engine import Engine, SamplingParams, StructuredOutput

SCHEMA = {
    "type": "object",
    "properties": {
        "colour": {"enum": ["red", "green", "blue", "other"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["colour", "count"],
    "additionalProperties": False,
}


def main(checkpoint: str, image: str) -> None:
    """Print the object."""
    question = "Which colour do the objects have, and how many are there?"
    conversation = [
        {"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": question}]}
    ]
    sampling = SamplingParams(temperature=0.0, max_tokens=400, structured=StructuredOutput(json_schema=SCHEMA))
    with Engine.load(checkpoint) as engine:
        [completion] = engine.generate(conversation, sampling)
    if completion.finish_reason != "stop":
        sys.exit(f"not complete: {completion.finish_reason}")
    found = json.loads(completion.text)
    print(f"{found['count']} objects, colour {found['colour']}")


if __name__ == "__main__":
    main(*sys.argv[1:])

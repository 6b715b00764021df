"""Ask a model about an image.

python examples/chat_with_image.py CHECKPOINT photo.jpg "What is in the picture?"
"""

import sys

from saccade.engine import Engine, SamplingParams


def main(checkpoint: str, image: str, question: str) -> None:
    """Load the checkpoint folder and print the answer."""
    content = [{"type": "image", "image": image}, {"type": "text", "text": question}]
    conversation = [{"role": "user", "content": content}]
    with Engine.load(checkpoint) as engine:
        [completion] = engine.generate(conversation, SamplingParams(temperature=0.0, max_tokens=64))
    if completion.failure is not None:
        sys.exit(completion.failure.message)
    print(completion.text)
    print(f"{len(completion.token_ids)} tokens, finish reason {completion.finish_reason}", file=sys.stderr)


if __name__ == "__main__":
    main(*sys.argv[1:])

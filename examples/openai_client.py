"""Ask a running server about an image with OpenAI's client, streamed.

saccade serve CHECKPOINT &
python examples/openai_client.py http://127.0.0.1:8000 photo.jpg "What is in the picture?" [MODEL]
"""

import base64
import os
import sys
from pathlib import Path

from openai import OpenAI


def main(url: str, image: str, question: str, model: str | None = None) -> None:
    """Send one image and print the answer as it comes; the key, if the server has keys, is in OPENAI_API_KEY.

    A served adapter is a model too, with the base model as its `parent`; without `model` the base model is asked.
    """
    client = OpenAI(base_url=f"{url}/v1", api_key=os.environ.get("OPENAI_API_KEY", "none"))
    if model is None:
        model = next(one.id for one in client.models.list() if getattr(one, "parent", None) is None)
    data = base64.b64encode(Path(image).read_bytes()).decode()
    kind = "png" if image.endswith(".png") else "jpeg"
    content = [
        {"type": "image_url", "image_url": {"url": f"data:image/{kind};base64,{data}"}},
        {"type": "text", "text": question},
    ]
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": content}],
        max_tokens=64,
        temperature=0,
        stream=True,
    )
    for chunk in stream:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Read COCO captions: one json with `images` and `annotations`, and a folder of images.

https://cocodataset.org/#format-data. All captions of an image make one sample. Images that only annotations name are
skipped.
"""

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from saccade.data.readers.json_files import load_json, records
from saccade.data.readers.reader import (
    InputSpec,
    Item,
    Part,
    Skipped,
    UnusableError,
    file_part,
    image_folder,
    make_sample,
    read_image,
    read_item,
)
from saccade.data.sample import Sample
from saccade.errors import DataError


class CocoCaptions(NamedTuple):
    """The content of a file of captions."""

    images: list[dict[str, Any]]
    """Records of images: `id`, `file_name` and more."""
    captions: dict[Any, list[str]]
    """The captions of each image id, also of ids without a record."""
    licences: dict[Any, Any]
    """URL or name of each licence id."""


def load_captions(path: Path | str) -> CocoCaptions:
    """Load a file of captions."""
    content = load_json(path)
    images, captions = records(content, "images", path), defaultdict(list)
    for annotation in records(content, "annotations", path):
        caption = annotation.get("caption")
        if isinstance(caption, str) and caption.strip():
            captions[annotation.get("image_id")].append(caption.strip())
    if not captions:
        raise DataError(
            f"{path}: its annotations have no captions. Give captions_*.json, not instances_* or person_keypoints_*"
        )
    licences = {
        record.get("id"): record.get("url") or record.get("name") for record in content.get("licenses") or [] if record
    }
    return CocoCaptions(images, captions, licences)


def list_parts(spec: InputSpec) -> list[Part]:
    """The file."""
    return [file_part(spec.path)]


def read_part(spec: InputSpec, part: Part, begin: int) -> Iterator[Item]:
    """Read the images in order, from number `begin`, then the image ids that are not in the list of images."""
    content = load_captions(part.path)
    images, captions = content.images, content.captions
    for image in images[begin:]:
        key = str(image.get("id"))
        yield read_item(key, _sample, spec, key, image, content)
    known = {image.get("id") for image in images}
    unknown = [image_id for image_id in captions if image_id not in known]
    for image_id in unknown[max(0, begin - len(images)) :]:
        yield Skipped(str(image_id), "unknown image", f"{len(captions[image_id])} captions of an image not in `images`")


def _sample(spec: InputSpec, key: str, image: dict[str, Any], content: CocoCaptions) -> Sample:
    if image.get("id") not in content.captions:
        raise UnusableError("no caption")
    metadata = {"captions": content.captions[image["id"]], "file_name": image.get("file_name")}
    if url := image.get("coco_url") or image.get("flickr_url") or image.get("url"):
        metadata["url"] = url
    if licence := content.licences.get(image.get("license")):
        metadata["licence"] = licence
    return make_sample(spec, key, [read_image(image_folder(spec), image.get("file_name"))], metadata)

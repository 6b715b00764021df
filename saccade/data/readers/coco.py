"""Read COCO captions: one json with `images` and `annotations`, and a folder of images.

https://cocodataset.org/#format-data. All captions of an image make one sample. Images that only annotations name are skipped.
"""

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from saccade.data.readers.reader import (
    InputSpec,
    Item,
    Part,
    Skipped,
    UnusableError,
    file_part,
    image_folder,
    load_json,
    make_sample,
    read_image,
    read_item,
    records,
)
from saccade.data.sample import Sample
from saccade.errors import DataError


def list_parts(spec: InputSpec) -> list[Part]:
    """The file."""
    return [file_part(spec.path)]


def read_part(spec: InputSpec, part: Part, begin: int) -> Iterator[Item]:
    """Read the images in order, from number `begin`, then the image ids that are not in the list of images."""
    content = load_json(part.path)
    images = records(content, "images", part.path)
    captions = _captions_of_images(records(content, "annotations", part.path))
    if not captions:
        raise DataError(
            f"{part.path}: its annotations have no captions. Give captions_*.json, not instances_* or person_keypoints_*"
        )
    licences = {
        record.get("id"): record.get("url") or record.get("name") for record in content.get("licenses") or [] if record
    }
    for image in images[begin:]:
        key = str(image.get("id"))
        yield read_item(key, _sample, spec, key, image, captions, licences)
    known = {image.get("id") for image in images}
    unknown = [image_id for image_id in captions if image_id not in known]
    for image_id in unknown[max(0, begin - len(images)) :]:
        yield Skipped(str(image_id), "unknown image", f"{len(captions[image_id])} captions of an image not in `images`")


def _captions_of_images(annotations: list[dict[str, Any]]) -> dict[Any, list[str]]:
    captions = defaultdict(list)
    for annotation in annotations:
        caption = annotation.get("caption")
        if isinstance(caption, str) and caption.strip():
            captions[annotation.get("image_id")].append(caption.strip())
    return captions


def _sample(
    spec: InputSpec, key: str, image: dict[str, Any], captions: dict[Any, list[str]], licences: dict[Any, Any]
) -> Sample:
    if image.get("id") not in captions:
        raise UnusableError("no caption")
    metadata = {"captions": captions[image["id"]], "file_name": image.get("file_name")}
    if url := image.get("coco_url") or image.get("flickr_url") or image.get("url"):
        metadata["url"] = url
    if licence := licences.get(image.get("license")):
        metadata["licence"] = licence
    return make_sample(spec, key, [read_image(image_folder(spec), image.get("file_name"))], metadata)

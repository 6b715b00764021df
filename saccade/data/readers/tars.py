"""Read WebDataset tars, as img2dataset writes them: `KEY.jpg`, `KEY.txt`, `KEY.json`, adjacent. Local or remote."""

from collections.abc import Iterator

from saccade.data.image_formats import UNSUPPORTED_EXTENSIONS
from saccade.data.readers.reader import (
    MAX_IMAGE_BYTES,
    InputSpec,
    Item,
    Part,
    Skipped,
    UnusableError,
    check_image,
    complete,
    read_item,
    unsupported_image,
)
from saccade.data.sample import Sample, description, image_names
from saccade.data.shards import ShardFile, list_shards, samples, window
from saccade.data.tar import Gap, Member
from saccade.errors import DataError


def list_parts(spec: InputSpec) -> list[Part]:
    """The tars, by name."""
    return [Part(file.url, file.num_bytes) for file in list_shards(spec.path)]


def read_part(spec: InputSpec, part: Part, begin: int) -> Iterator[Item]:
    """Read the samples of one tar in order, from number `begin`. Of a damaged tar the complete samples are read."""
    seen: set[str] = set()
    tar = window(ShardFile(part.path, part.name, part.num_bytes))

    def load(number: int, member: Member) -> bytes | None:
        """None for data that is not read: too large, or before `begin`."""
        is_read = number >= begin and member.size <= MAX_IMAGE_BYTES
        return tar.get(member.offset, member.size) if is_read else None

    for number, item in enumerate(samples(tar, load)):
        if isinstance(item, Gap):
            if number >= begin:
                yield Skipped(part.name, "tar damaged", f"{item.reason}; bytes {item.begin} to {item.end} are skipped")
            continue
        key, parts = item
        if number >= begin:
            files = {extension: data for extension, _, data in parts}
            yield read_item(key, _sample, spec, key, files, key in seen)
        seen.add(key)


def _sample(spec: InputSpec, key: str, files: dict[str, bytes | None], is_repeated: bool) -> Sample:
    """The members unchanged, the json completed."""
    if is_repeated:
        raise UnusableError("key twice in a tar", "The members of a sample must be adjacent")
    members = {name: data for name, data in files.items() if data is not None}
    if len(members) < len(files):
        raise UnusableError(
            "member too large", f"{', '.join(files.keys() - members.keys())}: over {MAX_IMAGE_BYTES} bytes"
        )
    try:
        fields = description(Sample(key, spec.name or "", members))
    except DataError as error:
        raise UnusableError("json unreadable", str(error)) from error
    for name in members:
        if name.rpartition(".")[2] in UNSUPPORTED_EXTENSIONS:
            raise unsupported_image(name)
    for name in image_names(members):
        check_image(members[name])
    fields.pop("key", None)  # img2dataset's key; in the new shards it would name another sample
    return complete(spec, key, members, fields)

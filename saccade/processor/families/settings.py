"""Read the image settings and token ids of a checkpoint folder, shared by the families."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from saccade.errors import CheckpointError, ConfigError
from saccade.processor.folder import read_json
from saccade.processor.patches import ImageSettings


def read_settings(
    folder: Path, config: Mapping[str, Any], images: ImageSettings, tower_patch_size: int
) -> tuple[ImageSettings, ImageSettings]:
    """Settings of images and of videos.

    `images`: the family's defaults; the settings of images are the defaults of videos. `tower_patch_size`: side of a
    patch unless the config of the tower has it.
    """
    unsaid = {"patch_size": tower_patch_size, "temporal_patch_size": 2, "spatial_merge_size": 2}
    vision = unsaid | (config.get("vision_config") or {})
    images = _parse(preprocessor_config(folder, "preprocessor_config.json", "image_processor"), images)
    videos = _parse(preprocessor_config(folder, "video_preprocessor_config.json", "video_processor"), images)
    for settings in (images, videos):
        _check_same_patches(settings, vision, folder)
    if (images.mean, images.std) != (videos.mean, videos.std):
        raise CheckpointError(
            f"{folder}: images and videos have different image_mean or image_std; one of each is supported"
        )
    return images, videos


def required_id(config: Mapping[str, Any], name: str, folder: Path) -> int:
    """A token id of `config.json`."""
    value = config.get(name)
    if not isinstance(value, int):
        raise CheckpointError(
            f"{folder}/config.json has no {name} (model_type {config.get('model_type')!r}): not a supported "
            "vision-language model. Make one with saccade init"
        )
    return value


def preprocessor_config(folder: Path, file: str, section: str) -> dict[str, Any]:
    """The settings from their own file, or from a section of `processor_config.json`; both are Hugging Face layouts."""
    found = read_json(folder / file) or read_json(folder / "processor_config.json").get(section) or {}
    if not isinstance(found, dict):
        raise CheckpointError(f"{folder}/processor_config.json: {section} is {found!r}, not an object")
    return found


def three_numbers(config: Mapping[str, Any], name: str, default: Sequence[float]) -> tuple[float, ...]:
    """A number for each colour."""
    values = config.get(name, default)
    if not isinstance(values, list | tuple) or len(values) != 3 or not all(isinstance(v, int | float) for v in values):
        raise CheckpointError(f"preprocessor_config.json: {name} is {values!r}, not three numbers, one per colour")
    return tuple(values)


def _parse(config: Mapping[str, Any], default: ImageSettings) -> ImageSettings:
    """Parse the supported fields; unsupported values that would change the pixels are refused."""
    check_pixels(config)
    size = config.get("size") or {}
    try:
        return ImageSettings(
            patch_size=config.get("patch_size", default.patch_size),
            merge_size=config.get("merge_size", default.merge_size),
            temporal_patch_size=config.get("temporal_patch_size", default.temporal_patch_size),
            min_pixels=config.get("min_pixels") or size.get("shortest_edge") or default.min_pixels,
            max_pixels=config.get("max_pixels") or size.get("longest_edge") or default.max_pixels,
            mean=three_numbers(config, "image_mean", default.mean),
            std=three_numbers(config, "image_std", default.std),
        )
    except (TypeError, AttributeError) as error:
        raise CheckpointError(f"preprocessor_config.json: {error}. Copy it from the original again") from error
    except ConfigError as error:
        raise CheckpointError(f"preprocessor_config.json: {error}") from error


def check_pixels(config: Mapping[str, Any]) -> None:
    """Refuse settings of a preprocessor config that would change the pixels and are not supported.

    `transformers` takes null for false.
    """
    supported = {"do_resize": True, "do_rescale": True, "do_normalize": True, "do_convert_rgb": True, "resample": 3}
    for name, value in supported.items():
        is_unsaid = name not in config or (config[name] is None and name in ("do_convert_rgb", "resample"))
        if not is_unsaid and config[name] != value:
            raise CheckpointError(f"preprocessor_config.json: {name} is {config[name]!r}; only {value!r} is supported")
    factor = config.get("rescale_factor", 1 / 255)
    if not isinstance(factor, float) or abs(factor - 1 / 255) > 1e-9:
        raise CheckpointError(f"preprocessor_config.json: rescale_factor is {factor!r}; only 1/255 is supported")


def _check_same_patches(images: ImageSettings, vision: Mapping[str, Any], folder: Path) -> None:
    """Check that the processor and the vision tower agree on the patches."""
    for ours, theirs in (
        ("patch_size", "patch_size"),
        ("temporal_patch_size",) * 2,
        ("merge_size", "spatial_merge_size"),
    ):
        if vision[theirs] != getattr(images, ours):
            raise CheckpointError(
                f"{folder}: {ours} is {getattr(images, ours)} in preprocessor_config.json, {vision[theirs]} in "
                "config.json. Take both files from the same model"
            )

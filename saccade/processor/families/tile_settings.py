"""Settings of families that cut images into tiles, read from a checkpoint folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from saccade.errors import CheckpointError, ConfigError
from saccade.processor.families.settings import check_pixels, preprocessor_config, three_numbers
from saccade.processor.patches import ImageSettings
from saccade.processor.tiles import Size, Tiling


@dataclass(frozen=True, kw_only=True)
class TileSettings(ImageSettings):
    """Settings of images in tiles. A token is a patch, of one frame; pixel limits are those of the tiles."""

    tiling: Tiling
    """How images become tiles."""
    max_feature_tiles: int | None = None
    """Images with more features than this many tiles have are interpolated to about as many; None: they are not."""

    @staticmethod
    def of(
        tiling: Tiling, mean: Sequence[float], std: Sequence[float], max_feature_tiles: int | None = None
    ) -> TileSettings:
        """The settings of a tiling."""
        return TileSettings(
            patch_size=tiling.patch_size,
            merge_size=1,
            temporal_patch_size=1,
            min_pixels=tiling.tile_size**2,
            max_pixels=tiling.max_tiles * tiling.tile_size**2,
            mean=tuple(mean),
            std=tuple(std),
            tiling=tiling,
            max_feature_tiles=max_feature_tiles,
        )


@dataclass(frozen=True, kw_only=True)
class TileDefaults:
    """Defaults of `transformers` for what the files of a folder do not say."""

    tile_size: int
    """Side of a tile of the tower without a vision config."""
    size: int
    """`size` of `preprocessor_config.json`."""
    crop_size: int | None
    """`crop_size` of `preprocessor_config.json`; None: there is none."""
    patch_size: int
    """`patch_size` of a vision config without it."""
    image_size: int
    """`image_size` of a vision config without it."""
    resolutions: tuple[Size, ...]
    """`image_grid_pinpoints`."""
    whole_patch_size: int = 14
    """Side of a patch of the tower without a vision config."""
    mean: tuple[float, ...] = ImageSettings.mean
    """`image_mean`."""
    std: tuple[float, ...] = ImageSettings.std
    """`image_std`."""


def read_tile_settings(
    folder: Path, config: Mapping[str, Any], default: TileDefaults, max_feature_tiles: int | None = None
) -> TileSettings:
    """Settings of images. The processor and the tower must agree on the tiles."""
    found = preprocessor_config(folder, "preprocessor_config.json", "image_processor")
    check_pixels(found)
    try:
        tiling = tower_tiling(config, default)
        _check_same(_tile_size(found, default), tiling.tile_size, "size", "image_size", folder)
        if (pinpoints := found.get("image_grid_pinpoints")) is not None:
            _check_same(_sizes(pinpoints), tiling.resolutions, *("image_grid_pinpoints",) * 2, folder)
        mean, std = (three_numbers(found, f"image_{name}", getattr(default, name)) for name in ("mean", "std"))
        return TileSettings.of(tiling, mean, std, max_feature_tiles)
    except ConfigError as error:
        raise CheckpointError(f"{folder}: {error}") from error
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{folder}/preprocessor_config.json: {error}. Copy it from the original again") from error


def tower_tiling(config: Mapping[str, Any], default: TileDefaults) -> Tiling:
    """The tiling that `config.json` says."""
    vision, pinpoints = config.get("vision_config"), config.get("image_grid_pinpoints")
    if vision is None:
        vision = {"image_size": default.tile_size, "patch_size": default.whole_patch_size}
    return Tiling(
        tile_size=vision.get("image_size", default.image_size),
        patch_size=vision.get("patch_size", default.patch_size),
        resolutions=default.resolutions if pinpoints is None else _sizes(pinpoints),
    )


def _sizes(pinpoints: Sequence[Sequence[int]]) -> tuple[Size, ...]:
    return tuple((int(height), int(width)) for height, width in pinpoints)


def _tile_size(found: Mapping[str, Any], default: TileDefaults) -> int:
    """The side of a tile: `size`, with which `crop_size` must agree."""
    sides: set[int] = set()
    found = {"size": default.size, "crop_size": default.crop_size} | dict(found)
    for size in (found["size"], found["crop_size"]):
        given = {"height": size} if isinstance(size, int) else size or {}
        sides |= {given[name] for name in ("height", "width", "shortest_edge") if given.get(name) is not None}
    if len(sides) > 1:
        raise CheckpointError(
            f"preprocessor_config.json: size is {found.get('size')}, crop_size {found.get('crop_size')}; "
            "only one square for both is supported"
        )
    return int(sides.pop()) if sides else default.size


def _check_same(ours: object, theirs: object, name: str, name_in_config: str, folder: Path) -> None:
    if ours != theirs:
        raise CheckpointError(
            f"{folder}: {name} is {ours} in preprocessor_config.json, {name_in_config} {theirs} in config.json. "
            "Take both files from the same model"
        )

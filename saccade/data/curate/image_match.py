"""Decide whether two thumbnails show the same image: align them, then compare the differences that remain.

    coarse 16x16  ->  32x32: scale, shift, gain and offset by weighted least squares  ->  residual over the overlap

The two most likely of the eight orientations are tried. One image is registered to the other (Lucas-Kanade with robust
weights, two iterations at each resolution), so a crop, a change of brightness or contrast and an encoder's noise
disappear; cells under an overlay get little weight. The residual is relative to the image's own contrast. On 8,000
photos (32 million pairs) copies reach 0.12 at the 99th percentile, the closest two photos that are not of one scene
0.22.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from saccade.data.curate.thumbnails import split_thumbnails

Floats = NDArray[np.float32]
Bools = NDArray[np.bool_]

_NOISE = 3  # grey levels: thumbnails this close everywhere are not aligned
_CHUNK = 256  # pairs aligned at a time: their arrays stay in the cache
_ITERATIONS = 2  # at each of the two resolutions
_MAX_STEP = 0.08  # share of half a side, in one iteration
_MAX_SCALE, _MAX_SHIFT = 0.16, 0.13  # a crop of 5 % of each side needs 0.11 and 0.05
_GAINS = (0.75, 1.33)
_COARSE_RESIDUAL = 0.5  # pairs above are not aligned further
_MIN_CONTRAST = 8.0  # grey levels: a flatter image is compared by absolute differences
_STRONG = 0.6  # share of the contrast that noise and interpolation do not reach
_INFORMATIVE = 8.0  # grey levels from the image's background
_COLOUR, _COLOUR_SHARE = 14.0, 0.75  # largest difference of colours: absolute, or relative to their standard deviation
_NUM_ORIENTATIONS = 8
_TRIED = 2  # orientations that a pair is aligned in
_GREY = 8.0  # colour differences below everywhere: compared by luma alone


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """The differences allowed between two images that count as the same."""

    quantile: float
    """Share of the informative cells that must agree."""
    residual: float
    """Difference of those cells, relative to the contrast of the image."""
    covered: float
    """Share of the image that may be covered: of the box around all cells that differ strongly."""


COPY = Tolerance(quantile=0.90, residual=0.14, covered=0.01)
"""Tolerance for dropping one of two samples: resized, encoded again, cropped, mirrored, turned, brighter or grey, but
the same everywhere."""
SHOWN = Tolerance(quantile=0.80, residual=0.13, covered=0.2)
"""Tolerance for finding evaluation images: a text or a logo may cover up to a fifth."""


def same_picture(one: NDArray[np.uint8], other: NDArray[np.uint8], tolerance: Tolerance) -> Bools:
    """Whether the [n, 1152] thumbnails `one[i]` and `other[i]` show the same image, also mirrored, turned, cropped."""
    found = np.zeros(len(one), bool)
    for begin in range(0, len(one), _CHUNK):
        part = slice(begin, begin + _CHUNK)
        is_equal = np.abs(one[part].astype(np.int16) - other[part]).max(1) <= _NOISE
        rest = begin + np.flatnonzero(~is_equal)
        found[part] = is_equal
        found[rest] = _same(one[rest], other[rest], tolerance)
    return found


def _same(one: NDArray[np.uint8], other: NDArray[np.uint8], tolerance: Tolerance) -> Bools:
    if not len(one):
        return np.zeros(0, bool)
    (luma, colours), (other_luma, other_colours) = split_thumbnails(one), split_thumbnails(other)
    found = np.zeros(len(one), bool)
    for orientation in _likely_orientations(luma, other_luma):
        turned = _turned(colours, orientation)
        rest = np.flatnonzero(~found & _same_colours(turned, other_colours, tolerance))
        first, second = _smooth(_turned(luma[rest], orientation[rest])), _smooth(other_luma[rest])
        agree = _agree(first, second, tolerance)
        agree[~agree] = _agree(
            second[~agree], first[~agree], tolerance
        )  # a crop fits the whole better than the reverse
        found[rest[agree]] = True
    return found


def _likely_orientations(one: Floats, other: Floats) -> list[NDArray[np.int64]]:
    """[n]: the orientation in which `one` is most like `other` at low resolution; then the second one."""
    small, fixed = (_halve(_halve(luma)).reshape(len(luma), 8, 8) for luma in (one, other))
    turns = [_turned(small, np.full(len(small), number)) for number in range(_NUM_ORIENTATIONS)]
    likeness = np.stack([(turned * fixed).sum((1, 2)) for turned in turns], 1)
    order = np.argsort(-likeness, axis=1, kind="stable")
    return [order[:, rank] for rank in range(_TRIED)]


def _turned(pictures: Floats, orientations: NDArray[np.int64]) -> Floats:
    """Pictures [n, ..., side, side] mirrored (bit 0), upside down (bit 1) and then transposed (bit 2)."""
    turned = pictures.copy()
    mirrored, upside_down, transposed = (np.flatnonzero(orientations >> bit & 1) for bit in range(3))
    turned[mirrored] = turned[mirrored][..., ::-1]
    turned[upside_down] = turned[upside_down][..., ::-1, :]
    turned[transposed] = turned[transposed].swapaxes(-1, -2)
    return turned


def _same_colours(one: Floats, other: Floats, tolerance: Tolerance) -> Bools:
    """Whether the colours agree, or one of the two is grey."""
    num = len(one)
    is_grey = (np.abs(one).reshape(num, -1).max(1) <= _GREY) | (np.abs(other).reshape(num, -1).max(1) <= _GREY)
    difference = np.quantile(np.abs(one - other).max(1).reshape(num, -1), tolerance.quantile, axis=1)
    spread = np.maximum(one.reshape(num, -1).std(1), other.reshape(num, -1).std(1))
    return np.asarray(is_grey | (difference <= np.maximum(_COLOUR, _COLOUR_SHARE * spread)))


def _agree(moving: Floats, fixed: Floats, tolerance: Tolerance) -> Bools:
    """Whether `moving` can be laid over `fixed`."""
    if not len(moving):
        return np.zeros(0, bool)
    identity = np.tile(np.array([1, 0, 1, 0], np.float32), (len(moving), 1))
    warp, fit = _register(_halve(moving), _halve(fixed), identity)
    rest = np.flatnonzero(fit.relative_residual(tolerance.quantile) <= _COARSE_RESIDUAL)
    agree = np.zeros(len(moving), bool)
    if not rest.size:
        return agree
    _, fit = _register(moving[rest], fixed[rest], warp[rest])
    agree[rest] = (
        (fit.relative_residual(tolerance.quantile) <= tolerance.residual)
        & (fit.covered_share() <= tolerance.covered)
        & (np.abs(fit.mean_shift) <= 3 + 1.5 * fit.contrast)
    )
    return agree


# ------------------------------------------------------------------ registration


@dataclass(frozen=True)
class _Fit:
    """`moving` under a warp, scaled to the brightness of `fixed`: n pairs of side x side cells."""

    rows: Floats
    """[n, side, side]: interpolation along the rows; `rows @ moving @ columns` is the warped image."""
    columns: Floats
    warped: Floats
    """The warped image minus its mean."""
    fixed: Floats
    """The fixed image minus its mean."""
    gain: Floats
    overlap: Bools
    residual: Floats
    """fixed - gain * warped, zero outside of the overlap."""
    mean_shift: Floats
    """[n] brightness of `fixed` above that of `moving`."""

    @property
    def contrast(self) -> Floats:
        """[n] standard deviation of `fixed` in the overlap."""
        num_cells = self.overlap.sum((1, 2))
        return np.asarray(np.sqrt((self.fixed**2 * self.overlap).sum((1, 2)) / np.maximum(num_cells, 1)), np.float32)

    def relative_residual(self, quantile: float) -> Floats:
        """[n] quantile of the residual over the cells that differ from the background, in units of the contrast."""
        num = len(self.residual)
        size = np.abs(self.residual).reshape(num, -1)
        fixed = self.fixed.reshape(num, -1)
        is_informative = np.abs(fixed - np.median(fixed, axis=1, keepdims=True)) > _INFORMATIVE
        is_counted = self.overlap.reshape(num, -1) & (is_informative | (size > _INFORMATIVE))
        ordered = np.sort(np.where(is_counted, size, np.float32(-1)), axis=1)
        num_cells, num_counted = ordered.shape[1], is_counted.sum(1)
        rank = num_cells - np.maximum(1, np.ceil(num_counted * (1 - quantile)).astype(np.int64))
        value = np.maximum(ordered[np.arange(num), rank], 0)
        return np.asarray(value / np.maximum(self.contrast, _MIN_CONTRAST), np.float32)

    def covered_share(self) -> Floats:
        """[n] area of the box around the cells that differ strongly, as a share of the image."""
        side = self.residual.shape[1]
        differs = np.abs(self.residual) > _STRONG * np.maximum(self.contrast, 2 * _MIN_CONTRAST)[:, None, None]
        extents = []
        for axis in (1, 2):
            line: Bools = np.asarray(differs.any(axis))
            extents.append(side - line.argmax(1) - line[:, ::-1].argmax(1))
        return np.asarray(np.where(differs.any((1, 2)), extents[0] * extents[1], 0) / side**2, np.float32)


def _register(moving: Floats, fixed: Floats, warp: Floats) -> tuple[Floats, _Fit]:
    """Refine the warp (scale and shift along x, then along y) of n pairs; returns the warp and its fit."""
    num, side, _ = moving.shape
    centres = (np.arange(side, dtype=np.float32) * 2 + 1) / side - 1
    slope_y, slope_x = (np.gradient(moving, axis=axis).astype(np.float32) * (side / 2) for axis in (1, 2))
    weights = np.ones_like(fixed)
    for _ in range(_ITERATIONS):
        fit = _fit(moving, fixed, warp, weights)
        size = np.abs(fit.residual)
        typical = np.median(size.reshape(num, -1), axis=1)[:, None, None] + np.float32(1)
        weights = np.asarray(1 / (1 + (size / (3 * typical)) ** 2), np.float32)
        along_x, along_y = (fit.gain * (fit.rows @ slope @ fit.columns) for slope in (slope_x, slope_y))
        parts = (along_x * centres, along_x, along_y * centres[:, None], along_y, fit.warped, np.ones_like(fixed))
        jacobian = np.stack(parts, 1).reshape(num, 6, -1)
        weighted = jacobian * (weights * fit.overlap).reshape(num, 1, -1)
        normal = weighted @ jacobian.transpose(0, 2, 1)
        normal[:, range(6), range(6)] += np.float32(side * side) * np.array([1, 1, 1, 1, 0.01, 0.01], np.float32)
        step = np.linalg.solve(normal, weighted @ fit.residual.reshape(num, -1, 1))[:, :4, 0]
        warp = warp + np.clip(step, -_MAX_STEP, _MAX_STEP)
        bound = np.array([_MAX_SCALE, _MAX_SHIFT, _MAX_SCALE, _MAX_SHIFT], np.float32)
        centre = np.array([1, 0, 1, 0], np.float32)
        warp = np.clip(warp, centre - bound, centre + bound)
    return warp, _fit(moving, fixed, warp, weights)


def _fit(moving: Floats, fixed: Floats, warp: Floats, weights: Floats) -> _Fit:
    side = moving.shape[1]
    columns, in_x = _interpolation(side, warp[:, 0], warp[:, 1])
    rows, in_y = _interpolation(side, warp[:, 2], warp[:, 3])
    columns = columns.transpose(0, 2, 1)
    warped, overlap = rows @ moving @ columns, in_y[:, :, None] & in_x[:, None, :]
    weights = weights * overlap
    total = weights.sum((1, 2), keepdims=True) + np.float32(1e-6)
    mean_warped, mean_fixed = ((weights * picture).sum((1, 2), keepdims=True) / total for picture in (warped, fixed))
    warped, fixed = warped - mean_warped, fixed - mean_fixed
    power = np.maximum((weights * warped * warped).sum((1, 2), keepdims=True), np.float32(1))
    gain = np.clip((weights * warped * fixed).sum((1, 2), keepdims=True) / power, *_GAINS)
    residual = (fixed - gain * warped) * overlap
    return _Fit(rows, columns, warped, fixed, gain, overlap, residual, (mean_fixed - mean_warped)[:, 0, 0])


def _interpolation(side: int, scale: Floats, shift: Floats) -> tuple[Floats, Bools]:
    """[n, side, side] matrices that sample a line at `scale * x + shift`, and which samples are inside of it."""
    centres = (np.arange(side, dtype=np.float32) * 2 + 1) / side - 1
    x = centres * scale[:, None] + shift[:, None]
    position = np.clip((x + 1) * (side / 2) - np.float32(0.5), 0, side - 1)
    matrices = np.maximum(np.float32(0), 1 - np.abs(position[:, :, None] - np.arange(side, dtype=np.float32)))
    return matrices, np.abs(x) <= 1


def _smooth(pictures: Floats) -> Floats:
    """Filter with weights 1 2 1 along both axes, so that interpolation between cells costs no sharpness."""
    padded = np.pad(pictures, ((0, 0), (1, 1), (1, 1)), mode="edge")
    rows = padded[:, :-2] + 2 * padded[:, 1:-1] + padded[:, 2:]
    return np.asarray((rows[:, :, :-2] + 2 * rows[:, :, 1:-1] + rows[:, :, 2:]) / np.float32(16))


def _halve(pictures: Floats) -> Floats:
    num, side, _ = pictures.shape
    return np.asarray(pictures.reshape(num, side // 2, 2, side // 2, 2).mean((2, 4), dtype=np.float32))

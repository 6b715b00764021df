"""Image formats: file extensions, and formats by their first bytes."""

from __future__ import annotations

from saccade.processor.image import FORMATS

IMAGE_EXTENSIONS = frozenset({"jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff", "avif"})
UNSUPPORTED_EXTENSIONS = frozenset({"heic", "heif", "jxl", "jp2", "svg"})
"""Images that are not decoded: a sample with one is an error, not a text-only sample."""


def image_extension(data: bytes) -> str | None:
    """The extension of a supported image format, by the first bytes."""
    if data.startswith(b"\xff\xd8\xff"):
        return "jpg"
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return "png"
    if data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        return "webp"
    if data.startswith((b"GIF87a", b"GIF89a")):
        return "gif"
    if data.startswith(b"BM") and data[6:10] == b"\0\0\0\0" and len(data) > 26:
        return "bmp"
    if data.startswith((b"II*\0", b"MM\0*")):
        return "tif"
    return "avif" if "AVIF" in FORMATS and _is_avif(data) else None


def unsupported_format(data: bytes) -> str | None:
    """The name of a known format that is not supported, by the first bytes."""
    if data[4:8] == b"ftyp":
        return "AVIF" if _is_avif(data) else "HEIF"
    if data.startswith((b"\xff\x0a", b"\0\0\0\x0cJXL ")):
        return "JPEG XL"
    if data.startswith(b"\0\0\0\x0cjP  "):
        return "JPEG 2000"
    return "SVG" if b"<svg" in data[:1024] else None


def _is_avif(data: bytes) -> bool:
    """Whether the first box lists a brand of AVIF, as its main or as a compatible one."""
    brands = data[8 : min(int.from_bytes(data[:4], "big"), 64)]
    return data[4:8] == b"ftyp" and (b"avif" in brands or b"avis" in brands)

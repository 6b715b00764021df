"""How the engine uses the machine."""

from dataclasses import dataclass
from typing import Literal, get_args

from saccade.errors import ConfigError

KVFormat = Literal["model", "fp8", "int8"]


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Sizes and switches of one engine."""

    page_size: int = 16
    """Tokens of a page of the key/value cache: a power of two, 1 to 128."""
    num_pages: int | None = None
    """Pages of the cache. None: as many as fit into `memory_share` beside a measured step."""
    memory_share: float = 0.9
    """Share of the GPU's memory the engine may use in all."""
    kv_format: KVFormat = "model"
    """What keys and values are kept in: the model's own number format, or 8 bits with a scale per token and head."""
    max_length: int | None = None
    """Longest prompt and answer together, in tokens. None: what the model was made for, or what the cache can hold."""
    max_requests: int = 256
    """Requests that run at once."""
    max_step_tokens: int = 8192
    """Tokens of a step. Prompts are computed in chunks that fit; more is faster in all, less is smoother for those who wait."""
    max_step_patches: int = 32768
    """Patches the tower encodes in a step; a larger image is encoded alone."""
    image_pool_tokens: int = 65536
    """Tokens of image features kept on the device."""
    image_cache: bool = True
    """Keep features of images that no request uses any more until their room is needed."""
    prefix_cache: bool = True
    """Keep pages of ended requests for others that begin alike."""
    target_step_ms: float | None = None
    """Compute less of waiting prompts per step, so that steps take about this long. None: as much as fits."""
    max_draft_tokens: int = 0
    """Guess up to this many tokens ahead from what was said before (0: never). Tokens stay the same, steps may become fewer."""
    cuda_graphs: bool = True
    """Replay steps and the vision tower from recordings, by size. A size is recorded when it has come once (answers) or four times (prompts)."""
    num_workers: int | None = None
    """Processes that prepare images. 0: none, everything in this one. None: by the number of cores."""
    processed_image_cache_bytes: int = 2 << 30
    """Bytes of processed images cached in host memory."""

    def __post_init__(self) -> None:
        for name in ("page_size", "max_requests", "max_step_tokens", "max_step_patches", "image_pool_tokens"):
            self._check_whole(name, least=1)
        for name in ("num_pages", "max_length"):
            if getattr(self, name) is not None:
                self._check_whole(name, least=1)
        self._check_whole("processed_image_cache_bytes", least=0)
        self._check_whole("max_draft_tokens", least=0)
        if self.num_workers is not None:
            self._check_whole("num_workers", least=0)
        if self.page_size not in (1, 2, 4, 8, 16, 32, 64, 128):
            raise ConfigError(f"page_size is {self.page_size}; use a power of two from 1 to 128")
        if self.kv_format not in get_args(KVFormat):
            raise ConfigError(f"kv_format is {self.kv_format!r}; use one of {', '.join(get_args(KVFormat))}")
        if not 0 < self.memory_share <= 1:
            raise ConfigError(f"memory_share is {self.memory_share}; use a number above 0 and up to 1")
        if self.target_step_ms is not None and not 0 < self.target_step_ms < float("inf"):
            raise ConfigError(f"target_step_ms is {self.target_step_ms}; use a positive number of milliseconds")
        if self.max_draft_tokens > 16:
            raise ConfigError(f"max_draft_tokens is {self.max_draft_tokens}; use 0 to 16")

    def _check_whole(self, name: str, *, least: int) -> None:
        value = getattr(self, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ConfigError(f"{name} is {value!r}; use a whole number from {least}")

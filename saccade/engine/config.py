"""Engine configuration."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Literal, get_args

from saccade.errors import ConfigError

KVFormat = Literal["model", "fp8", "int8"]


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Sizes and switches of one engine."""

    page_size: int = 16
    """Tokens per KV-cache page: a power of two, 1 to 128."""
    num_pages: int | None = None
    """Pages of the KV cache. None: as many as fit into `gpu_memory_utilization` with the largest step."""
    gpu_memory_utilization: float = 0.9
    """Fraction of the GPU's memory that the engine may use in total."""
    kv_format: KVFormat | Literal["auto"] = "auto"
    """Storage of keys and values: the model's dtype, or fp8 or int8 with a scale per token and head. auto: the format
    that the checkpoint's `kv_cache_scheme` names, else model."""
    max_length: int | None = None
    """Maximum tokens of prompt and output together. None: the model's context length, or the size of the KV cache."""
    max_requests: int = 256
    """Maximum number of running requests."""
    max_step_tokens: int = 4352
    """Maximum tokens per step: 4096 of prompts, the size of the largest CUDA graph, and one of each decoding request.
    Longer prompts are computed in chunks."""
    max_encoder_patches: int = 8192
    """Maximum patches per pass of the vision encoder; a larger image is encoded alone."""
    encoder_cache_tokens: int = 65536
    """Tokens of image features kept on the device."""
    encoder_cache: bool = True
    """Keep the features of images that no request uses, until their memory is needed."""
    prefix_cache: bool = True
    """Keep the pages of ended requests for requests with the same prefix."""
    target_step_ms: float | None = 13.0
    """Time of a step while requests decode: bounds its prompt tokens and the part of the vision encoder that runs
    before it. A step may always take three times as long as one without prompts. None: any number of prompt tokens, and
    a quarter of a pass of the encoder."""
    max_draft_tokens: int | None = None
    """Prompt-lookup drafts per request and step, 0 to 16 (0: off). Output tokens do not change; fewer steps may be
    needed. None: 4 on a CPU, where requests draft while it pays; off on a GPU, where drafts need more CUDA graphs at
    the start."""
    cuda_graphs: bool = True
    """Run steps and the vision encoder as CUDA graphs, which are captured by size before the engine is ready."""
    core_process: bool = False
    """Run the engine core in a process of its own, so that it does not share the caller's interpreter. Several ranks
    always do."""
    tensor_parallel_size: int = 1
    """Number of GPUs that one engine runs on, each with a part of every matrix. On a CPU: number of processes."""
    rank_timeout_s: float = 60.0
    """Seconds that a step may take with several ranks. After that the engine has failed: one of them hangs."""
    max_waiting_requests: int = 4096
    """Maximum number of waiting requests; more are refused at once."""
    num_workers: int | None = None
    """Preprocessing worker processes. 0: preprocess in this process. None: by the number of cores."""
    processed_image_cache_bytes: int = 2 << 30
    """Host memory for preprocessed images, or for decoded ones where the device patchifies them."""
    preprocess_timeout_s: float = 10.0
    """Seconds a worker may take for one image, one text, 32 video frames or 8 MiB of a video file, before it is killed
    and replaced."""
    max_images_per_request: int = 64
    """Maximum images and videos of a request."""
    chat_template: str | None = None
    """Jinja source of a chat template that is used instead of the checkpoint's."""
    max_adapters: int = 0
    """Maximum number of loaded LoRA adapters, each in a slot of device memory."""
    max_adapter_rank: int = 16
    """Maximum rank of an adapter. A slot of rank 16 takes 60 MB for a 3B model."""

    def __post_init__(self) -> None:
        for name in (
            "page_size",
            "num_pages",
            "max_length",
            "max_requests",
            "max_step_tokens",
            "max_encoder_patches",
            "encoder_cache_tokens",
            "max_waiting_requests",
            "max_adapter_rank",
            "tensor_parallel_size",
        ):
            self._check_whole(name, least=1)
        for name in (
            "max_draft_tokens",
            "num_workers",
            "processed_image_cache_bytes",
            "max_images_per_request",
            "max_adapters",
        ):
            self._check_whole(name, least=0)
        if self.page_size not in (1, 2, 4, 8, 16, 32, 64, 128):
            raise ConfigError(f"page_size is {self.page_size}; use a power of two from 1 to 128")
        if self.kv_format not in ("auto", *get_args(KVFormat)):
            raise ConfigError(f"kv_format is {self.kv_format!r}; use one of auto, {', '.join(get_args(KVFormat))}")
        self._check_positive("gpu_memory_utilization", "a number above 0 and up to 1", most=1)
        if self.target_step_ms is not None:
            self._check_positive("target_step_ms", "a positive number of milliseconds")
        if not isinstance(self.chat_template, str | None):
            raise ConfigError(f"chat_template is {self.chat_template!r}; use the source of a template, which is text")
        for name in ("preprocess_timeout_s", "rank_timeout_s"):
            self._check_positive(name, "a positive number of seconds")
        if self.max_draft_tokens is not None and self.max_draft_tokens > 16:
            raise ConfigError(f"max_draft_tokens is {self.max_draft_tokens}; use 0 to 16")

    @property
    def cache_format(self) -> KVFormat:
        """`kv_format` of a model whose folder names none."""
        return "model" if self.kv_format == "auto" else self.kv_format

    @property
    def has_core_process(self) -> bool:
        """Whether the core is in a process of its own."""
        return self.core_process or self.tensor_parallel_size > 1

    def draft_tokens(self, device_type: str) -> int:
        """`max_draft_tokens`, or its default for a type of device."""
        if self.max_draft_tokens is not None:
            return self.max_draft_tokens
        return 4 if device_type == "cpu" else 0

    def _check_whole(self, name: str, *, least: int) -> None:
        """Refuse all but whole numbers, and None unless it is the default."""
        value = getattr(self, name)
        if value is None and getattr(type(self), name) is None:
            return
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ConfigError(f"{name} is {value!r}; use a whole number from {least}")

    def _check_positive(self, name: str, expected: str, *, most: float = sys.float_info.max) -> None:
        value = getattr(self, name)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= most:
            raise ConfigError(f"{name} is {value!r}; use {expected}")

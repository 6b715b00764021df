"""Configuration of a stream: its sources, the order and packing of samples, and how they are read.

Importing this loads no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from saccade.data.augment import AugmentConfig
from saccade.data.order import MAX_DRAWS
from saccade.data.sample import TextRules
from saccade.data.storage import StorageConfig
from saccade.errors import ConfigError

_PATCHES_PER_TOKEN = 64
"""More patches than any model merges into one token."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """One weighted shard folder of a data mixture."""

    path: str | Path
    """Shards: a folder, a glob, one tar, or a URL."""
    name: str | None = None
    """Name in sample ids and logs, unique in a mixture; default: the folder's name."""
    weight: float | None = None
    """Sampling weight relative to the other sources; without any weights, sources are sampled in proportion to their
    sizes."""
    rules: TextRules = field(default_factory=TextRules)
    """How its text becomes conversations: prompt before a caption, system message."""

    def __post_init__(self) -> None:
        if self.weight is not None and not self.weight > 0:
            raise ConfigError(f"weight is {self.weight}; it must be above 0")


@dataclass(frozen=True, kw_only=True)
class StreamConfig:
    """How a stream orders, packs, divides and reads the samples of its sources."""

    checkpoint: str | Path
    """Folder of the model: its processor tokenises the text and resizes the images."""

    # Order: the same samples in the same packed sequences for any number of ranks and workers.
    seed: int = 0
    """Determines the order of samples and of packed sequences, and the random numbers of augmentation and token
    dropout."""
    num_epochs: int | None = None
    """Passes over all samples after which the stream ends, for sources without weights; None repeats forever."""
    num_samples: int | None = None
    """Samples after which the stream ends; None repeats forever."""
    window_shards: int = 16
    """Shards of a source whose samples are shuffled together: more shards mix better and are in use at a time. With
    `unit_bytes` it counts units."""
    num_lanes: int = 1
    """Equal parts of every epoch that are read side by side: each node reads only its lanes. For many nodes a number
    up to `global_batch_size`, at least 5 per node. It changes the order; the number of nodes does not."""
    unit_bytes: int | None = None
    """Larger shards are cut into units of at most this size, which are shuffled and cached as shards are: 128 MiB for
    many nodes. None: shards are not cut."""

    # Packing.
    max_seq_len: int
    """Maximum tokens of a packed sequence."""
    max_patches: int | None = None
    """Maximum vision patches of a packed sequence; None: as many as its tokens allow."""
    global_batch_size: int = 1
    """Packed sequences of a batch, over all ranks."""
    packing_buffer_size: int = 4096
    """Maximum samples packed together: more fill the sequences better and take longer to pack, also on a resume."""
    pairs: bool = False
    """Whether samples are preference pairs: chosen and rejected conversation follow each other in a packed sequence."""

    # This process.
    rank: int = 0
    """Number of this process among those that train together."""
    num_ranks: int = 1
    """Processes that train together; each gets its share of every batch."""
    context_rank: int = 0
    """Number of this process among those that share the packed sequences of `rank`."""
    num_context_ranks: int = 1
    """Processes that share packed sequences: each has all tokens, and decodes its share of the images."""
    has_images: bool = True
    """Whether this process decodes its share of the images; False: another one with the same `context_rank` does."""
    has_sharers: bool | None = None
    """Whether other processes have the same packed sequences. Default: with several context ranks."""
    ranks_per_node: int | None = None
    """Consecutive ranks that share a machine and its cache; None: all of them."""
    num_workers: int = 2
    """Worker processes that decode images and collate sequences; 0 collates in this process."""
    prefetch: int = 2
    """Batches that are kept ready."""

    # Samples.
    resize: Literal["pillow", "torch"] = "torch"
    """Image resize: "pillow" gives Hugging Face's pixels; "torch" is within 2/255 at less than half of the cost of an
    image."""
    augment: AugmentConfig | None = None
    """Random changes of the images, a function of seed, sample and epoch; None changes nothing."""
    token_dropout: float = 0.0
    """Probability that the model reads a random token in place of one of an answer, which it still predicts."""
    max_bad_share: float = 0.01
    """Share of bad samples (damaged, over a limit) above which a rank's stream stops, once it has met at least 10 of
    them."""
    bad_log: str | Path | None = None
    """File to which bad samples are appended as JSON lines, each once; ranks may share it."""
    storage: StorageConfig = field(default_factory=StorageConfig)
    """Cache, retries and timeouts. Storage that fails is not a bad sample: after `storage.max_wait_s` the stream
    raises."""

    @property
    def is_shared(self) -> bool:
        """Whether other processes have the same packed sequences, and decode images of them."""
        return self.num_context_ranks > 1 if self.has_sharers is None else self.has_sharers

    def __post_init__(self) -> None:
        self._check_order()
        if not 0 <= self.rank < self.num_ranks:
            raise ConfigError(f"rank is {self.rank} of {self.num_ranks} ranks; it counts from 0")
        if not 0 <= self.context_rank < self.num_context_ranks:
            raise ConfigError(
                f"context_rank is {self.context_rank} of {self.num_context_ranks} ranks; it counts from 0"
            )
        if self.global_batch_size < self.num_ranks:
            raise ConfigError(
                f"global_batch_size is {self.global_batch_size} for {self.num_ranks} ranks: some would have nothing to "
                f"do. Raise it to {self.num_ranks}"
            )
        if self.ranks_per_node is not None and self.ranks_per_node < 1:
            raise ConfigError(f"ranks_per_node is {self.ranks_per_node}; it must be at least 1")
        if self.num_workers < 0 or self.prefetch < 1:
            raise ConfigError(
                f"num_workers is {self.num_workers} and prefetch {self.prefetch}; at least 0 and 1 are needed"
            )
        if not 0 <= self.max_bad_share <= 1:
            raise ConfigError(f"max_bad_share is {self.max_bad_share}, not a share between 0 and 1")
        if self.resize not in ("pillow", "torch"):
            raise ConfigError(f"resize is {self.resize!r}. Use one of pillow, torch")

    def _check_order(self) -> None:
        limits = ("max_seq_len", "max_patches", "global_batch_size", "num_epochs", "num_lanes", "unit_bytes")
        for name in (*limits, *self.order_settings):
            value, least = getattr(self, name), 0 if name == "seed" else 1
            if value is not None and value < least:
                raise ConfigError(f"{name} is {value}; it must be at least {least}")
        if self.packing_buffer_size > MAX_DRAWS:
            raise ConfigError(f"packing_buffer_size is {self.packing_buffer_size}; use at most {MAX_DRAWS}")
        if self.num_epochs is not None and self.num_samples is not None:
            raise ConfigError("num_epochs and num_samples both end the stream; give one of them")

    @property
    def order_settings(self) -> dict[str, int | None]:
        """Settings that determine which samples a packing buffer holds: a stream resumes only with the same.

        Lanes and units are listed where they are used, so that states of streams without them stay valid.
        """
        names = ["seed", "packing_buffer_size", "window_shards", "num_samples"]
        names += ["num_lanes"] if self.num_lanes > 1 else []
        names += ["unit_bytes"] if self.unit_bytes is not None else []
        return {name: getattr(self, name) for name in names}

    @property
    def patch_limit(self) -> int:
        """Maximum vision patches of a packed sequence, as a number."""
        return _PATCHES_PER_TOKEN * self.max_seq_len if self.max_patches is None else self.max_patches

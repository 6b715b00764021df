"""How far the vision encoder will be, from how fast it was. Plain Python, no clock.

The encoder runs beside the steps, which slow it down, and its end is seen only between two steps. So its speed is learned from what
that amounts to: the patches that were seen to be complete over the time since the encoder started, or since the last ones were. On a CPU,
where images are encoded before anything else runs, it has no meaning, and none is waited for.
"""

from __future__ import annotations

_DECAY = 7 / 8
"""Of what was seen before, each time encodings end."""


class EncoderProgress:
    """Learns the encoder's speed and predicts what it will have encoded."""

    def __init__(self) -> None:
        self._busy_since: float | None = None
        self._num_patches = self._seconds = 0.0  # seen, the newest with the most weight

    def start(self, now: float) -> None:
        """Encodings were launched."""
        if self._busy_since is None:
            self._busy_since = now

    def finish(self, num_patches: int, *, num_left: int, now: float) -> None:
        """So many patches were encoded, or none that the speed can be learned from; `num_left` are in flight."""
        if num_patches and self._busy_since is not None:
            self._num_patches = _DECAY * self._num_patches + num_patches
            self._seconds = _DECAY * self._seconds + now - self._busy_since
        self._busy_since = now if num_left else None

    def num_patches(self, now: float, within_s: float) -> int:
        """Patches, of those in flight or launched now, that will be encoded within a time. 0 until the first were."""
        if self._seconds == 0:
            return 0
        since = now if self._busy_since is None else self._busy_since
        return int(self._num_patches / self._seconds * (now - since + within_s))

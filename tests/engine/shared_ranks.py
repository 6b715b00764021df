"""Ranks that are started once and load one engine after another: a start takes seconds, an engine milliseconds."""

import contextlib
from unittest.mock import patch

from saccade.engine import load_core
from saccade.engine.core.loop import EngineCore
from saccade.engine.device import divided_forward
from saccade.engine.device.runner import PixelScale
from saccade.engine.ranks import launch
from saccade.engine.ranks.launch import Ranks
from saccade.processor import Processor


class SharedRanks(Ranks):
    """Closing an engine keeps the processes. This process is the leader."""

    def __init__(self, size, device="cpu", timeout_s=60.0):
        self.deaths = []
        super().__init__([device] * size, timeout_s=timeout_s, on_death=self.deaths.append)

    def core(self, folder, config, grammars=None) -> EngineCore:
        if self._is_serving:  # a test failed before it closed its core
            self.unload()
        processor = Processor.load(folder)
        pixels = PixelScale(mean=processor.images.mean, std=processor.images.std)
        return EngineCore(self.load(folder, config, pixels=pixels, dtype=None), grammars=grammars)

    @contextlib.contextmanager
    def engines(self):
        """`Engine.load` runs on these ranks, with its core in a thread."""

        def load_runner(folder, config, pixels, device, dtype):
            return self.load(folder, config, pixels=pixels, dtype=dtype)

        with patch.object(load_core, "_load_runner", load_runner):
            yield

    def close(self):
        self.unload()

    def __exit__(self, *_):
        super().close()


class CheckedForwardPass(divided_forward.DividedForwardPass):
    """The leader's forward pass: its collectives are those that are expected, in order."""

    num_checked = 0

    @contextlib.contextmanager
    def _together(self, expected):
        with super()._together(expected := iter(list(expected))):
            yield
        assert self._exchange.done == list(expected)
        type(self).num_checked += 1


@contextlib.contextmanager
def checked_collectives():
    with patch("saccade.engine.device.runner.DividedForwardPass", CheckedForwardPass):
        yield CheckedForwardPass


@contextlib.contextmanager
def planted(program):
    """Followers that are started meanwhile run `program` first."""
    main = f"import gc; gc.disable(); {program}; from saccade.engine.ranks.follower import main; main()"
    with patch.object(launch, "_MAIN", main):
        yield

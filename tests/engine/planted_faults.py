"""Faults of one rank alone, planted in its process: requests and images named `doomed` fail at some place there."""

from saccade.engine.device.divided_encoder import DividedEncoder
from saccade.engine.device.step_inputs import InputBuilder
from saccade.engine.ranks.following_runner import FollowingRunner
from saccade.model.language import DecoderLayer

PLACES = ("inputs", "layer", "late layer", "start of a pass", "pass", "register")


def plant():
    """Fail at the place that a doomed request is named after: doomed-PLACE-NUMBER."""
    doomed = [""]

    def is_doomed(place, *names):
        return any(name.startswith(f"doomed-{place}-") for name in names)

    fill, start_pass, own_features, register = (
        InputBuilder.fill, FollowingRunner._start_pass, DividedEncoder._own_features, FollowingRunner.register
    )  # fmt: skip
    layer = DecoderLayer.forward

    def failing_fill(self, out, num_decode, decode, prefill, requests):
        names = [chunk.request_id for chunk in [*decode, *prefill]]
        doomed[:] = names or [""]
        if is_doomed("inputs", *names):
            raise RuntimeError("bad inputs")
        fill(self, out, num_decode, decode, prefill, requests)

    def failing_layer(self, *arguments, **settings):
        number = self.self_attn.layer
        if (is_doomed("layer", *doomed) and number == 0) or (is_doomed("late layer", *doomed) and number == 1):
            raise MemoryError("out of memory in a layer")
        return layer(self, *arguments, **settings)

    def failing_start(self, arguments):
        names = [image[0] for image in arguments[0]]
        self.images.encoder.names = names
        if is_doomed("start of a pass", *names):
            raise RuntimeError("bad image")
        start_pass(self, arguments)

    def failing_features(self):
        if is_doomed("pass", *getattr(self, "names", ())):
            raise RuntimeError("bad image")
        return own_features(self)

    def failing_register(self, request, prompt, adapter_slot=None):
        if is_doomed("register", request.id):
            raise OSError("no memory")
        register(self, request, prompt, adapter_slot)

    InputBuilder.fill, FollowingRunner._start_pass = failing_fill, failing_start
    DividedEncoder._own_features = failing_features
    DecoderLayer.forward, FollowingRunner.register = failing_layer, failing_register

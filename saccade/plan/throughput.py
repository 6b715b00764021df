"""Times of serving in a steady state, estimated from bandwidth and peak throughput.

Little's law: requests in progress = requests per second x seconds that one takes.
"""

from dataclasses import dataclass
from typing import NamedTuple

from saccade.errors import ConfigError
from saccade.plan.gpus import Gpu
from saccade.plan.served_model import ServedModel

_BANDWIDTH_SHARE = 0.875
"""Share of the published bandwidth at which a step reads weights and KV cache: that of a device copy on an H200."""
_COMPUTE_SHARE = 0.55
"""Share of the peak that prefill reaches: 540 of 989 TFLOP/s on an H200."""
_STEP_S = 0.1e-3
"""Time of a decode step without layers: embedding, sampling, and what is between two steps. This and the following are
those of the 3B shape on an H200 (docs/log/2026-11-19.md, "Microseconds of a decode step")."""
_LAYER_S = 34e-6
"""Time of a layer in addition to what it reads: kernels that wait for one another."""
_LONE_LAYER_S, _LONE_QUANTIZED_LAYER_S = 8e-6, 21e-6
"""The same with one request, whose norms, products and activation are one kernel if the weights are in 16 bits."""
_PRODUCT_SHARE = 0.63
"""Share of the time of its products at peak that a request adds to a step; the rest passes while weights are read."""


_LINK_SHARE = 0.7
"""Share of a link's bandwidth that a large all-reduce reaches. Assumed: NCCL's on NVLink, not measured here."""
_COLLECTIVE_S = 10e-6
"""Time of a small collective in a CUDA graph. Assumed, likewise."""


def exchange_s(model: ServedModel, gpu: Gpu, num_tokens: float, num_samples: float) -> float:
    """Time in which the ranks of an engine exchange what a step needs, while none of them computes.

    A ring sends each byte of a sum 2 (N - 1) / N times.
    """
    if model.num_ranks == 1:
        return 0.0
    found, share = model.exchanges, 2 * (model.num_ranks - 1) / model.num_ranks
    num_bytes = found.bytes_per_token * num_tokens * share + found.bytes_per_sample * num_samples
    return found.num_collectives * _COLLECTIVE_S + num_bytes / (gpu.link * _LINK_SHARE)


@dataclass(frozen=True, kw_only=True)
class RequestLoad:
    """Requests to be served, all alike."""

    text_tokens: int
    """Text tokens of a request, prompt and output together."""
    image_tokens: int = 0
    """Image tokens of a request."""
    image_patches: int = 0
    """Patches of a request's images, for the time of the vision encoder."""
    output_tokens: int | None = None
    """Text tokens that are generated; a quarter if not given."""
    requests_per_s: float | None = None
    """Requests that arrive per second, over all GPUs."""
    concurrency: int | None = None
    """Requests in progress at once, over all GPUs."""
    latency_s: float | None = None
    """Seconds that a request takes; estimated if not given."""

    def __post_init__(self) -> None:
        if self.requests_per_s is not None and self.concurrency is not None:
            raise ConfigError(
                "requests per second and concurrency depend on each other (Little's law). Give one of them"
            )
        if not 0 <= self.num_output <= self.text_tokens:
            raise ConfigError(f"{self.num_output} output tokens of {self.text_tokens} text tokens. Raise --text-tokens")

    @property
    def tokens(self) -> int:
        """Tokens of a request in the KV cache at its end."""
        return self.text_tokens + self.image_tokens

    @property
    def num_output(self) -> int:
        """Generated tokens."""
        return self.text_tokens // 4 if self.output_tokens is None else self.output_tokens

    @property
    def num_prompt(self) -> int:
        """Prompt tokens, text and image."""
        return self.tokens - self.num_output


class Times(NamedTuple):
    """Estimated times of one GPU in a steady state."""

    prefill_s: float
    """Vision encoder and prefill of one request."""
    step_s: float
    """Time per output token."""
    latency_s: float
    """Time of a request."""
    in_progress: float
    """Requests in progress on the GPU."""


def steady_state(
    model: ServedModel, gpu: Gpu, scheme: str, kv_bytes: int, load: RequestLoad, rate: float
) -> Times | None:
    """Times when `rate` requests per second arrive at a GPU. None: it does not keep up, or its speed is not known.

    Requests in progress and latency depend on each other: a step reads the weights once and every request's KV cache.
    """
    peak = gpu.peak(scheme)
    if peak is None or gpu.bandwidth is None:
        return None
    flops = peak * _COMPUTE_SHARE
    products = model.num_decoder_parameters * load.num_prompt + model.num_tower_parameters * load.image_patches
    prefill_s = 2.0 * products / flops + exchange_s(model, gpu, load.num_prompt, 1)
    decoding = 1.0 - rate * prefill_s
    if decoding <= 0.0:
        return None
    mean_kv_bytes = kv_bytes * (1.0 - load.num_output / (2 * load.tokens))  # outputs are added one by one
    for has_one in (True, False):
        # step = fixed + n each and n = rate * (prefill + output * step / decoding): linear in n.
        fixed_s, each_s = _decode_times(model, gpu, scheme, mean_kv_bytes, has_one=has_one)
        per_request = rate * load.num_output * each_s / decoding
        if per_request >= 1.0:
            return None
        in_progress = rate * (prefill_s + load.num_output * fixed_s / decoding) / (1.0 - per_request)
        if in_progress <= 1.0:
            break
    computing_s = 2.0 * model.num_decoder_parameters * in_progress / flops
    step_s = max(fixed_s + in_progress * each_s, computing_s) / decoding
    latency_s = prefill_s + load.num_output * step_s
    return Times(prefill_s, step_s, latency_s, max(in_progress, rate * latency_s))


def _decode_times(model: ServedModel, gpu: Gpu, scheme: str, kv_bytes: float, *, has_one: bool) -> tuple[float, float]:
    """(time of a decode step without requests, and what each request adds). `has_one`: the step has one request."""
    assert gpu.bandwidth is not None, "asked of a GPU by name"
    bandwidth, peak = gpu.bandwidth * _BANDWIDTH_SHARE, gpu.peak(scheme)
    lone_s = _LONE_LAYER_S if scheme == "bf16" else _LONE_QUANTIZED_LAYER_S
    layers_s = model.shape.num_layers * (lone_s if has_one else _LAYER_S)
    product_s = 0.0 if peak is None else 2.0 * model.num_decoder_parameters / peak * _PRODUCT_SHARE
    exchanges_s = exchange_s(model, gpu, 0, 0)
    fixed_s = _STEP_S + layers_s + model.decode_bytes[scheme] / bandwidth + exchanges_s
    return fixed_s, kv_bytes / bandwidth + product_s + exchange_s(model, gpu, 1, 1) - exchanges_s


def decode_step_s(model: ServedModel, gpu: Gpu, scheme: str, kv_bytes: int, num_requests: int) -> float | None:
    """Time of a step that decodes `num_requests`, each with `kv_bytes` of KV cache. None: the GPU is not known."""
    if gpu.bandwidth is None:
        return None
    fixed_s, each_s = _decode_times(model, gpu, scheme, kv_bytes, has_one=num_requests == 1)
    return fixed_s + num_requests * each_s

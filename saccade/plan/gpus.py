"""GPUs by name: memory, bandwidth and peak throughput, as published. Plain Python.

Memory is what torch can allocate: the H200's is measured, the others' are published sizes minus the driver's share.
"""

import math
from dataclasses import dataclass

from saccade.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU. Peaks are of dense matrix products, in operations per second; None: unknown, or no such units."""

    name: str
    """The name for `--gpu`."""
    gib: float
    """Memory in GiB."""
    bandwidth: float | None = None
    """Bandwidth of the memory, in bytes per second."""
    bf16: float | None = None
    """Peak with bf16 operands."""
    fp8: float | None = None
    """Peak with fp8 operands."""
    int8: float | None = None
    """Peak with int8 operands."""
    link: float = 32e9
    """Bandwidth to the other GPUs of the machine, in bytes per second and direction: NVLink, or PCIe 4.0 x16."""

    def peak(self, scheme: str) -> float | None:
        """Peak of the products of a storage scheme; 4-bit weights are multiplied in bf16."""
        return {"fp8": self.fp8, "int8": self.int8}.get(scheme, self.bf16)


GPUS = (
    Gpu(name="B200", gib=178.0, bandwidth=8.0e12, bf16=2250e12, fp8=4500e12, int8=4500e12, link=900e9),
    Gpu(name="H200", gib=139.8, bandwidth=4.8e12, bf16=989e12, fp8=1979e12, int8=1979e12, link=450e9),
    Gpu(name="H100", gib=79.1, bandwidth=3.35e12, bf16=989e12, fp8=1979e12, int8=1979e12, link=450e9),
    Gpu(name="A100", gib=79.1, bandwidth=2.04e12, bf16=312e12, int8=624e12, link=300e9),
    Gpu(name="A100-40GB", gib=39.4, bandwidth=1.56e12, bf16=312e12, int8=624e12, link=300e9),
    Gpu(name="L40S", gib=44.4, bandwidth=0.864e12, bf16=362e12, fp8=733e12, int8=733e12),
    Gpu(name="L4", gib=22.0, bandwidth=0.3e12, bf16=121e12, fp8=242e12, int8=242e12),
    Gpu(name="RTX4090", gib=23.5, bandwidth=1.01e12, bf16=165e12, fp8=330e12, int8=661e12),
)


def gpu_named(name: str) -> Gpu:
    """The GPU of a name; with a number of GiB, one of which only the memory is known."""
    known = {gpu.name.lower(): gpu for gpu in GPUS}
    if name.lower() in known:
        return known[name.lower()]
    try:
        gib = float(name)
    except ValueError:
        gib = math.nan
    if not 0.0 < gib < math.inf:
        names = ", ".join(gpu.name for gpu in GPUS)
        raise ConfigError(f"unknown GPU {name!r}. Known: {names}; or give its memory in GiB, such as 80")
    return Gpu(name=name, gib=gib)

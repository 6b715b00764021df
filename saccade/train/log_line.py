"""The log line of an interval: its numbers, short and aligned."""

from collections.abc import Mapping
from typing import Any


def format_line(record: Mapping[str, Any], num_steps: int) -> str:
    """The record as one aligned log line."""
    tokens = None if record["ms"] is None else record["text_tokens_per_s"] + record["image_tokens_per_s"]
    rate = max(record["lr"].values(), default=None)
    fields = [
        f"step {record['step']:0{len(str(num_steps))}d}/{num_steps}",
        f"{record['step'] / num_steps:6.1%}",
        f"loss {_format(record['loss'], '6.3f')}",
        f"grad {_format(record['grad_norm'], '5.2f')}",
        f"lr {_short_exponent(rate):>6}",
        f"{_format(record['ms'], '5.0f')} ms",
        f"{thousands(tokens):>5} tok/s",
        f"mfu {_format(record['mfu'], '4.0%')}",
        f"data wait {_format(record['data_wait'], '6.1%')}",
        f"eta {duration(record['eta_s']):>6}",
    ]
    fields += [f"{name} {value:.4g}" for name, value in record.get("objective", {}).items()]
    if record["skipped"]:
        fields.append(f"skipped {record['skipped']}")
    return "  ".join(fields)


def _format(value: float | None, spec: str) -> str:
    """The number, or a dash of the same width."""
    return f"{'-':>{spec.split('.')[0]}}" if value is None else f"{value:{spec}}"


def _short_exponent(value: float | None) -> str:
    """2.9e-4 rather than 2.9e-04."""
    if value is None:
        return "-"
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa}e{int(exponent)}" if value else "0"


def thousands(value: float | None) -> str:
    """318k, 1.2M."""
    if value is None:
        return "-"
    for size, letter in ((1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.0f}"


def duration(seconds: float | None) -> str:
    """2d04h, 2h09m, 3m20s, 12s."""
    if seconds is None:
        return "-"
    for unit, part, letters in ((86400, 3600, "dh"), (3600, 60, "hm"), (60, 1, "ms")):
        if seconds >= unit:
            return f"{int(seconds // unit)}{letters[0]}{int(seconds % unit // part):02d}{letters[1]}"
    return f"{seconds:.0f}s"

"""Distinguish failures of one request from failures of the device itself."""

from __future__ import annotations

import logging

import torch

from saccade.engine.core.step_runner import DeviceError
from saccade.engine.request import Failure, FailureKind, Stage
from saccade.errors import RequestError

logger = logging.getLogger(__name__)


def is_alive(device: torch.device) -> bool:
    """Whether the device still works. After some errors (an illegal address) it fails until the process ends."""
    if device.type != "cuda":
        return True
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return False
    return True


def check_alive(device: torch.device, error: Exception) -> None:
    """Raise DeviceError if an error means that no request can run any more."""
    if not is_alive(device):
        raise DeviceError(f"the device failed: {error}") from error


def failure_of(device: torch.device, stage: Stage, request_id: str, error: Exception) -> Failure:
    """The failure for the client; the exception is logged. DeviceError: no other request could run either."""
    check_alive(device, error)
    logger.warning("request %s failed while %s: %r", request_id, stage, error, exc_info=error)
    if isinstance(error, RequestError):
        return Failure(stage, str(error), "invalid_request")
    is_memory = isinstance(error, MemoryError | torch.cuda.OutOfMemoryError)
    kind: FailureKind = "out_of_memory" if is_memory else "internal_error"
    return Failure(stage, f"the request failed while {stage}; other requests continue", kind)

"""One engine per device, queueing on torch's current stream."""

import os
import threading

import torch

from .._abi import Engine, UsageError, library

NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}

_engines = {}
_lock = threading.Lock()


def engine_for(device):
    """The handle of a device's engine; its next call runs in the order of torch's own work there."""
    if device.type not in ("cpu", "cuda"):
        hint = ": give it memory first, by model.to_empty(device=...)" if device.type == "meta" else ""
        raise UsageError(f"a parameter is on device {device}; scruple has engines for cpu and cuda{hint}")
    # Threads do not survive a fork, and follow torch.set_num_threads.
    cpu = device.type == "cpu"
    key = "cpu" if cpu else f"cuda:{device.index}", torch.get_num_threads() if cpu else 0, os.getpid()
    with _lock:
        if key not in _engines:
            _engines[key] = Engine(*key[:2])
        handle = _engines[key].handle
    if not cpu:
        library.engine_set_stream(handle, torch._C._cuda_getCurrentRawStream(device.index) or None)
    return handle

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
    # Threads do not survive a fork, and follow torch.set_num_threads.
    key = (torch.get_num_threads(), os.getpid()) if device.type == "cpu" else device
    engine = _engines.get(key)
    if engine is None:
        if device.type not in ("cpu", "cuda"):
            hint = ": give it memory first, by model.to_empty(device=...)" if device.type == "meta" else ""
            raise UsageError(f"a parameter is on device {device}; scruple has engines for cpu and cuda{hint}")
        engine = _engines.setdefault(key, Engine("cpu", key[0]) if device.type == "cpu" else Engine(str(device)))
    if key is device and (stream := torch._C._cuda_getCurrentRawStream(device.index) or None) != engine.stream:
        with _lock:
            library.engine_set_stream(engine.handle, stream)
            engine.stream = stream
    return engine.handle

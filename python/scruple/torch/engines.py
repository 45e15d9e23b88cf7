"""One engine per device, queueing on torch's current stream."""

import os
import threading

import torch

from .._abi import Engine, library

_engines = {}
_lock = threading.Lock()


def engine_for(device):
    """The handle of the engine of a torch device; its next call runs in the order of torch's own work
    there."""
    if device.type == "cpu":
        # Threads do not survive a fork, and follow torch.set_num_threads.
        key = ("cpu", torch.get_num_threads(), os.getpid())
    elif device.type == "cuda":
        key = ("cuda", device.index, os.getpid())
    else:
        raise ValueError(f"a parameter is on device {device}; scruple has engines for cpu and cuda")
    engine = _engines.get(key)
    if engine is None:
        with _lock:
            if key not in _engines:
                name = "cpu" if key[0] == "cpu" else f"cuda:{device.index}"
                _engines[key] = Engine(name, key[1] if key[0] == "cpu" else 0)
            engine = _engines[key]
    if key[0] == "cuda":
        library.engine_set_stream(engine.handle, torch.cuda.current_stream(device).cuda_stream or None)
    return engine.handle

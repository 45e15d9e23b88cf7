"""Pinned memory of the host, where an optimizer's state lies with offload=True and from which a GPU's engine steps it."""

import ctypes
import math
import os
import pathlib
import weakref
from ctypes import byref

import torch

from .. import _abi
from .._abi import UsageError, library
from .engines import engine_for

SMALL = 1 << 16  # parameters of no more elements stay on the device: copies would cost more than they save
_HINT = "Offload less (offload=True in some parameter groups), take a recipe with less state ('scant'), or raise the limit"


def zeros(shape, dtype, device):
    """From the library: torch's allocator rounds sizes up to a power of two, and lends memory anew while copies that
    run on the engine's own streams still go there."""
    if torch.cuda.is_current_stream_capturing():
        raise UsageError("offload=True: a step copies state beside the stream, which no CUDA graph records; leave it out")
    size, engine = math.prod(shape) * dtype.itemsize, engine_for(device)
    rule, form = _abi.Rule("sgd"), _abi.format_named("bf16+8")  # of whose weights each has one byte on the host
    row = _abi.Tensor(optimizer=rule.handle, size=size, step=1, host=_abi.HOST_STATE)
    row.arrays[_abi.WEIGHT] = _abi.Array(form.handle, 1)  # its codes, which nobody reads
    try:
        library.tensor_alloc(engine, byref(row), 1 << _abi.WEIGHT)
    except MemoryError:
        torch.cuda.empty_cache()  # the first such memory takes some of the device, too
        library.tensor_alloc(engine, byref(row), 1 << _abi.WEIGHT)
    memory = (ctypes.c_char * size).from_address(row.arrays[_abi.WEIGHT].aux)
    weakref.finalize(memory, _free, engine, row, os.getpid()).atexit = False
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def _free(engine, row, process):
    if os.getpid() == process:  # not in a worker that was forked
        library.engine_synchronize(engine)
        library.tensor_free(engine, byref(row))


def refuse_short(asked):
    """Before the system ends the process for it."""
    if asked > (free := _free_bytes()):
        raise MemoryError(f"{_wanted(asked)}, and the host, or this container, has {free / 2**30:.1f} GiB free. {_HINT}")


def not_had(asked, problem):
    return MemoryError(f"{_wanted(asked)}: {problem}. {_HINT}")


def _wanted(asked):
    return f"offload=True puts {asked / 2**30:.1f} GiB of moments and extra bits into pinned host memory"


def _free_bytes():
    """What the machine has, and the container may take: files that Linux keeps in memory give way."""
    found = dict(line.split()[:2] for line in pathlib.Path("/proc/meminfo").read_text().splitlines())
    free = 1024 * int(found["MemAvailable:"])
    try:
        limit, used, kept = (pathlib.Path("/sys/fs/cgroup/memory." + x).read_text() for x in ("max", "current", "stat"))
        kept = dict(map(str.split, kept.splitlines()))
        used = int(used) - int(kept["active_file"]) - int(kept["inactive_file"])
        return min(free, max(int(limit) - used, 0))
    except (OSError, ValueError):  # no container, or one without a limit
        return free

"""The rows of one library call: the parameters of one device that have a gradient in this step.

A table lives as long as the same parameters come; then a step only writes addresses and step numbers into it.
"""
import ctypes

import torch

from .. import _abi
from .._abi import UsageError, library
from .engines import engine_for
from .planes import NAMES
from .shards import is_sharded, local

_WORDS = ctypes.sizeof(_abi.Tensor) // 8
_STEP = _abi.Tensor.step.offset // 8
_FORMAT = (_abi.Tensor.arrays.offset + _abi.GRADIENT * ctypes.sizeof(_abi.Array)) // 8
_CODES = _FORMAT + 1
_WEIGHT = (_abi.Tensor.arrays.offset + _abi.Array.codes.offset) // 8


def gradient_problem(param, gradient):
    """Why a gradient cannot be stepped with, or None."""
    if gradient.layout is not torch.strided:
        return (f"a gradient of shape {tuple(gradient.shape)} is sparse ({gradient.layout}); sparse gradients are not "
                "supported: use sparse=False in the embedding, or gradient.to_dense()")
    if gradient.dtype not in NAMES:
        return f"a gradient has dtype {gradient.dtype}; it can be fp32, bf16 or fp16"
    if gradient.shape != param.shape:
        return f"a gradient of shape {tuple(gradient.shape)} came for a parameter of shape {tuple(param.shape)}"
    return None


class Table:
    """`entries` are in the order of `params`; `base` holds the steps that each has taken so far."""

    def __init__(self, key, device, params, entries, base):
        self.key, self.device, self.params, self.entries, self.base = key, device, params, entries, base
        self.rows = (_abi.Tensor * len(params)).from_buffer(bytearray(b"".join(bytes(e.row) for e in entries)))
        self.words = memoryview(self.rows).cast("B").cast("q")
        self.at = range(0, _WORDS * len(params), _WORDS)
        self.any_sharded = any(is_sharded(p) for p in params)
        self.dtypes = [None] * len(params)  # of the last gradients
        self.copies = [i for i, e in enumerate(entries) if e.strided]
        self.taken = 0        # steps since `base`, counted here
        self.counter = None   # and those counted on the device, where a step may be skipped
        self.kept = []        # contiguous copies, until the call has been queued

    def fill(self, gradients):
        """Writes the addresses of this step's gradients. False: a weight has moved, make a new table."""
        words, dtypes, kept = self.words, self.dtypes, []
        weights = self.params
        if self.any_sharded:
            gradients, weights = [local(g) for g in gradients], [local(p) for p in weights]
        for i, at, g, p in zip(range(len(dtypes)), self.at, gradients, weights):
            if p.data_ptr() != self.entries[i].address:
                return False
            if g.dtype is not dtypes[i] or not g.is_contiguous():
                g = self._adopt(i, at, g, p)
                kept.append(g)
            words[at + _CODES] = g.data_ptr()
        self.kept = kept
        return True

    def _adopt(self, i, at, gradient, param):
        problem = gradient_problem(param, gradient)
        if problem:
            raise UsageError(problem)
        if gradient.dtype is not self.dtypes[i]:
            self.words[at + _FORMAT] = _abi.format_named(NAMES[gradient.dtype]).handle
            self.dtypes[i] = gradient.dtype
        return gradient.contiguous()

    def step(self, options, counted):
        """`counted`: whether the step takes place is known to the device alone."""
        words, base, taken = self.words, self.base, self.taken + 1
        for at, steps in zip(self.at, base):
            words[at + _STEP] = steps + taken
        for i in self.copies:  # weights that are not one run of memory: stepped in a copy
            copy = local(self.params[i]).detach().contiguous()
            words[self.at[i] + _WEIGHT] = copy.data_ptr()
            self.kept.append((i, copy))
        engine = engine_for(self.device)
        if counted and self.counter is None:
            self.counter = torch.zeros((), dtype=torch.int64, device=self.device)
        if self.counter is not None:
            options.steps = self.counter.data_ptr()
        library.step(engine, self.rows, len(base), ctypes.byref(options))
        if counted:
            library.advance(engine, options.found_inf, None, self.counter.data_ptr())
        else:
            self.taken = taken
        for item in self.kept:
            if isinstance(item, tuple):
                local(self.params[item[0]]).copy_(item[1])
        self.kept = []

    def measure(self, options):
        library.measure(engine_for(self.device), self.rows, len(self.base), ctypes.byref(options))

    def by_groups(self, groups_of):
        """The rows by the process groups that share their parameters."""
        found = {}
        for p, row in zip(self.params, self.rows):
            found.setdefault(groups_of(p), []).append(row)
        return {groups: (_abi.Tensor * len(rows))(*rows) for groups, rows in found.items()}

    def steps(self):
        """What each parameter has taken by now; waits for the device where it counts."""
        taken = self.taken + (int(self.counter) if self.counter is not None else 0)
        return [steps + taken for steps in self.base]

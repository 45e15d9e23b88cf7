"""The rows of one library call: the parameters of one device that have a gradient in this step.

A table lives as long as the same parameters come; then a step only writes addresses and step numbers into it.
"""

import array
import ctypes

import torch
from torch.autograd.graph import increment_version

from .. import _abi
from .._abi import UsageError, library
from .engines import engine_for
from .planes import NAMES
from .shards import is_sharded, local

_WORDS, _STEP = ctypes.sizeof(_abi.Tensor) // 8, _abi.Tensor.step.offset // 8
_GRADIENT = _abi.Tensor.arrays.offset + _abi.GRADIENT * ctypes.sizeof(_abi.Array)
_CODES = (_GRADIENT + _abi.Array.codes.offset) // 8
# Torch's table of functions that show a tensor to C; older versions have none.
_exchange = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
if _exchange is not None:
    _pointer_of = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)
    _exchange = _pointer_of(("PyCapsule_GetPointer", ctypes.pythonapi))(_exchange, b"dlpack_exchange_api")


def identities(objects):
    """The addresses of these objects, as C has them: equal where all are the same ones."""
    objects = tuple(objects)  # which has its items behind its head
    return ctypes.string_at(id(objects) + tuple.__basicsize__, 8 * len(objects))


def check_gradient(param, gradient):
    """Refuses a gradient that cannot be stepped with."""
    if gradient.layout is not torch.strided:
        raise UsageError(
            f"a gradient of shape {tuple(gradient.shape)} is sparse ({gradient.layout}); sparse gradients "
            "are not supported: use sparse=False in the embedding, or gradient.to_dense()"
        )
    if gradient.dtype not in NAMES:
        raise UsageError(f"a gradient has dtype {gradient.dtype}; it can be fp32, bf16 or fp16")
    if gradient.shape != param.shape:
        raise UsageError(
            f"a gradient of shape {tuple(gradient.shape)} came for a parameter of shape {tuple(param.shape)}"
        )


class Table:
    """`entries` are in the order of `params`, which are all on one device."""

    def __init__(self, key, params, entries):
        self.key, self.device, self.params, self.entries = key, local(params[0]).device, params, entries
        # Rows by their 8-byte fields: one slice is a field of all of them.
        self.words = array.array("q", b"".join(bytes(entry.row) for entry in entries))
        self.rows = (_abi.Tensor * len(params)).from_buffer(self.words)
        self.first = self.words[_STEP::_WORDS]  # the steps that these begin with
        self.together = len(set(self.first)) == 1
        self.taken = self.told = 0  # steps since then, and when the states were last written
        self.counter = None  # of those that only the device knows to have been taken
        self.any_sharded = any(is_sharded(p) for p in params)
        self.addresses = [entry.address for entry in entries]
        # The first plane of each stands for all: who replaces state replaces that too.
        with_planes = [entry for entry in entries if entry.planes]
        self.states = [entry.state for entry in with_planes]
        self.names = [entry.layout.planes[0].name for entry in with_planes]
        self.planes = identities(entry.planes[0] for entry in with_planes)
        self.dtypes = [None] * len(params)  # of the last gradients
        self.strided = [i for i, entry in enumerate(entries) if entry.strided]
        self.kept = None  # the gradients, until the call has been queued

    def fill(self, gradients):
        """Writes the addresses of this step's gradients. False: a weight or state is in another place now."""
        weights = self.params
        if self.any_sharded:
            gradients, weights = [local(g) for g in gradients], [local(p) for p in weights]
        # Passes that run in C: with hundreds of small parameters the host is what a step waits for.
        moved = list(map(torch.Tensor.data_ptr, weights)) != self.addresses
        if moved or identities(map(dict.get, self.states, self.names)) != self.planes:
            return False
        try:
            known = library.borrow_gradients(self.rows, len(self.rows), identities(gradients), _exchange)
        except Exception:  # one that cannot be shown, such as a sparse one
            known = 0
        if known < len(self.rows):
            same = not _exchange and [g.dtype for g in gradients] == self.dtypes
            if not same or not all(map(torch.Tensor.is_contiguous, gradients)):
                gradients = [self._adopt(i, g, p) for i, (g, p) in enumerate(zip(gradients, weights))]
            self.words[_CODES::_WORDS] = array.array("q", list(map(torch.Tensor.data_ptr, gradients)))
        self.kept = gradients
        return True

    def _adopt(self, i, gradient, param):
        check_gradient(param, gradient)
        self.rows[i].arrays[_abi.GRADIENT].format = _abi.format_named(NAMES[gradient.dtype]).handle
        self.dtypes[i] = gradient.dtype
        return gradient.contiguous()

    def step(self, options, counted):
        """`counted`: whether the step takes place is known to the device alone."""
        # Weights that are not one run of memory are stepped in a copy.
        copies = [(local(self.params[i]), local(self.params[i]).contiguous()) for i in self.strided]
        for i, (_, copy) in zip(self.strided, copies):
            self.rows[i].arrays[_abi.WEIGHT].codes = copy.data_ptr()
        engine = engine_for(self.device)
        if counted and self.counter is None:
            self.counter = torch.zeros((), dtype=torch.int64, device=self.device)
        if self.counter is not None:
            options.steps = self.counter.data_ptr()
        library.step(engine, self.rows, len(self.rows), ctypes.byref(options))
        if counted:
            library.advance(engine, options.found_inf, None, self.counter.data_ptr())
        else:
            self.taken += 1
            steps = [self.first[0] + self.taken] if self.together else [x + self.taken for x in self.first]
            self.words[_STEP::_WORDS] = array.array("q", steps) * (len(self.first) // len(steps))
        for weight, copy in copies:
            weight.copy_(copy)
        increment_version(self.params)  # a graph that saved the old values is not run backward with the new
        self.kept = None

    def count(self, state):
        """Writes the steps taken into the states; waits for the device where it counts."""
        counted = 0 if self.counter is None else int(self.counter)
        if self.taken + counted != self.told:
            for p, step in zip(self.params, self.words[_STEP::_WORDS]):
                if state.get(p):
                    state[p]["step"] = step - 1 + counted
            self.told = self.taken + counted

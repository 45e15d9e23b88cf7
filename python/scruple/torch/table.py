"""The rows of one library call: the parameters of one device that have a gradient in this step.

They live as long as the same parameters come; then a step only writes addresses and step numbers into them.
"""

import array
import ctypes
import sys

import torch
from torch.autograd.graph import increment_version
from torch.optim.optimizer import _get_scalar_dtype

from .. import _abi
from .._abi import UsageError, library
from .coded import memory_of, with_codes
from .engines import engine_for
from .planes import NAMES, sized
from .shards import is_sharded, local

# Places in 8-byte words.
_WORDS, _STEP = ctypes.sizeof(_abi.Tensor) // 8, _abi.Tensor.step.offset // 8
_GRADIENT = (_abi.Tensor.arrays.offset + _abi.GRADIENT * ctypes.sizeof(_abi.Array)) // 8
_PIECE_WORDS, _PIECE_GRADIENT = ctypes.sizeof(_abi.Piece) // 8, _abi.Piece.gradient.offset // 8
_FORMAT, _CODES = _abi.Array.format.offset // 8, _abi.Array.codes.offset // 8
# sys.getrefcount() of a tensor that only its State, its Entry and Counts refer to; a higher count: a user has it too.
# As of an object with two references, plus one. Tried with CPython 3.11, 3.12. Too high hides a user's `x.data = ...`.
_OWNERS = next(map(sys.getrefcount, [_probe := object()])) + 1
# Torch's table of functions that show a tensor to C, which older versions have not; and what reads a tuple there.
_exchange, _item = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None), None
if _exchange is not None:
    _pointer_of = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)
    _exchange = _pointer_of(("PyCapsule_GetPointer", ctypes.pythonapi))(_exchange, b"dlpack_exchange_api")
    _item = ctypes.cast(ctypes.pythonapi.PyTuple_GetItem, ctypes.c_void_p)


def check_gradient(param, gradient):
    """Refuses a gradient that cannot be stepped with."""
    if gradient.layout is not torch.strided:
        what = f"a gradient of shape {tuple(gradient.shape)} is sparse ({gradient.layout})"
        raise UsageError(f"{what}, which is not supported; use sparse=False in the embedding, or to_dense()")
    if gradient.dtype not in NAMES:
        raise UsageError(f"a gradient has dtype {gradient.dtype}; it can be fp32, bf16 or fp16")
    if gradient.shape != param.shape:
        raise UsageError(f"a gradient of shape {tuple(gradient.shape)} came for {sized(param)}")


class Counts:
    """What states show as "step": views of one memory, into which users may write."""

    def __init__(self, states, rows):
        dtype, counts = _get_scalar_dtype(), [row.step - 1 for row in rows]
        self.states, self.memory = states, array.array("d" if dtype is torch.float64 else "f", counts)
        self.told = self.memory.tobytes()
        with torch.inference_mode(False):
            views = torch.frombuffer(self.memory, dtype=dtype).unbind()
        for state, count, view in zip(states, counts, views):
            state.show(count, view)
        self.tensors = [x for state in states for x in (state.shown, *state.entry.planes)]
        self.homes = list(map(torch.Tensor.data_ptr, self.tensors))
        self.looks, self.held, self.places = None, [], []

    def rewritten(self, looks):
        """Whether a user has written to a step count, or moved a tensor of the state (`x.data = ...`). Watched are those
        that somebody else has, found anew when opt.state was read (`looks`): all would double a step's time."""
        if looks != self.looks:
            self.looks, self.held = looks, []
            found = [i for i, n in enumerate(list(map(sys.getrefcount, self.tensors))) if n > _OWNERS]
            self.held, self.places = ([xs[i] for i in found] for xs in (self.tensors, self.homes))
        moved = list(map(torch.Tensor.data_ptr, self.held)) != self.places
        return moved or self.memory.tobytes() != self.told

    def advance(self, counts):
        """Shows one step more: a count for each, or one for all. Writes to memory: torch's add_ takes 14 us."""
        shown = array.array(self.memory.typecode, counts)
        self.memory[:] = shown * (len(self.memory) // len(counts))
        self.told = self.memory.tobytes()

    def tell(self, counts):
        """The exact counts. What a user has written stays, and counts in their place."""
        exact, told = (array.array(self.memory.typecode, x) for x in (counts, self.told))
        for i, state in enumerate(self.states):
            state.steps = counts[i]
            if self.memory[i] == told[i]:
                self.memory[i] = exact[i]
        self.told = exact.tobytes()


class Rows:
    """Rows of parameters of one device: over weights at `addresses`, and over gradients that are lent."""

    def __init__(self, params, rows, addresses):
        self.params, self.addresses = params, addresses
        self.written = with_codes(params)
        # By their 8-byte fields: one slice is a field of all of them.
        self.words = array.array("q", b"".join(map(bytes, rows)))
        self.rows = (_abi.Tensor * len(params)).from_buffer(self.words)
        self.any_sharded, self.memory = any(map(is_sharded, params)), list(map(memory_of, params))
        self.kinds = [None] * len(params)  # of the last gradients

    # list(map(...)) runs in C. With hundreds of small parameters a step is bound by the host.
    def moved(self):
        """The parameters that are in another place now."""
        now = list(map(torch.Tensor.data_ptr, map(memory_of, self.params) if self.any_sharded else self.memory))
        if now == self.addresses:
            return []
        return [p for p, here, before in zip(self.params, now, self.addresses) if here != before]

    def lend(self, gradients):
        """Writes the addresses of these gradients; what it returns must live until the call is queued."""
        if self.any_sharded:
            gradients = list(map(local, gradients))
        try:
            known = library.borrow_gradients(self.rows, len(self.rows), tuple(gradients), _item, _exchange)
        except Exception:  # one that cannot be shown, such as a sparse one
            known = 0
        if known < len(self.rows):
            same = not _exchange and [(g.dtype, g.shape) for g in gradients] == self.kinds
            if not same or not all(map(torch.Tensor.is_contiguous, gradients)):
                gradients = list(map(self._borrow, range(len(gradients)), gradients))
            addresses = list(map(torch.Tensor.data_ptr, gradients))
            self.words[_GRADIENT + _CODES :: _WORDS] = array.array("q", addresses)
        return gradients

    def _borrow(self, i, gradient):
        check_gradient(local(self.params[i]), gradient)
        self.rows[i].arrays[_abi.GRADIENT].format = _abi.format_named(NAMES[gradient.dtype]).handle
        self.kinds[i] = gradient.dtype, gradient.shape
        return gradient.contiguous()


class Pieces(Rows):
    """Whole gradients of some of a sink's parameters: of those in these places in it."""

    def __init__(self, places, *rows):
        super().__init__(*rows)
        self.places, self.piece_words = places, array.array("q", [0]) * (_PIECE_WORDS * len(places))
        self.pieces = (_abi.Piece * len(places)).from_buffer(self.piece_words)
        for piece, place, row in zip(self.pieces, places, self.rows):
            piece.tensor, piece.size = place, row.size

    def lend(self, gradients):
        kept = super().lend(gradients)
        for field in _FORMAT, _CODES:
            lent = self.words[_GRADIENT + field :: _WORDS]
            self.piece_words[_PIECE_GRADIENT + field :: _PIECE_WORDS] = lent
        return kept


class Table(Rows):
    """`entries` are in the order of `params`, which are all on one device."""

    def __init__(self, key, params, entries, states):
        super().__init__(params, [entry.row for entry in entries], [entry.address for entry in entries])
        self.counts = Counts(states, self.rows)
        self.key, self.device, self.entries = key, local(params[0]).device, entries
        self.first = self.words[_STEP::_WORDS]  # the steps that these begin with
        self.together = len(set(self.first)) == 1
        self.taken = 0  # steps since then
        self.counter = None  # of those that only the device knows to have been taken
        self.strided = [i for i, entry in enumerate(entries) if entry.strided]
        self.kept = None  # the gradients, until the call has been queued

    def fill(self, gradients, looks):
        """Lends it the gradients of this step. False: a weight is in another place now, or a count another."""
        if self.moved() or self.counts.rewritten(looks):
            return False
        self.kept = self.lend(gradients)
        return True

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
            self.counts.advance([step - 1 for step in steps])
            self.words[_STEP::_WORDS] = array.array("q", steps) * (len(self.first) // len(steps))
        for weight, copy in copies:
            weight.copy_(copy)
        increment_version(self.written)  # a graph that saved the old values is not run backward with the new
        self.kept = None

    def count(self):
        """Tells the states what was taken; waits for the device where it counts."""
        counted = 0 if self.counter is None else int(self.counter)
        self.counts.tell([step - 1 + counted for step in self.words[_STEP::_WORDS]])

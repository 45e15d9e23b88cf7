"""The arrays of one parameter: which formats they have, and their planes as torch tensors.

State names: "extra" is what completes a 16-bit weight. A moment in fp32 or bf16 has its slot's name, as in
torch.optim ("exp_avg"); codes have the name with "/codes" behind it, so that torch.optim cannot take them for
values, and their scales "/scale".
"""

import copy
import ctypes
import itertools
import math
import numbers
from ctypes import byref
from typing import NamedTuple

import torch

from .. import _abi
from .._abi import UsageError, library
from . import pinned
from .coded import form_of, memory_of, planes_of
from .engines import NAMES, engine_for
from .shards import local

CHUNK = 1 << 22  # values that are converted at a time: 16 MiB in fp32
_CODED = ("weight/codes", "weight/scale")
_FIXED = ("step", "extra", "adagc_norm")  # entries of every optimizer's state
_CODES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# What a recipe meant in older states, and means now: such a moment is converted when it is loaded.
_FORMER = {"scant": ("log4", "log5")}


def few_elements():
    """Weights of no more elements never become codes."""
    return _abi.recipes()["lpmm"].small


def kind_of(p):
    """What the parameter itself is stored in."""
    return form_of(p) or NAMES[p.dtype]


def sized(p):
    return f"a parameter of shape {tuple(p.shape)}"


def described(x):
    return f"{x.dtype} of shape {tuple(x.shape)} on {x.device}" if isinstance(x, torch.Tensor) else repr(x)


def weight_format(name, dtype, asked):
    """The weight format of a parameter of this dtype, which is the part that the model sees. `name` (such as
    "bf16+8") says what is kept beside it. `asked`: the user chose `name`, not a recipe."""
    own = NAMES[dtype]
    _abi.format_named(name)  # says what there is, where there is no such format
    base, plus, extra = name.partition("+")
    if base not in NAMES.values():  # codes: until compress_weights makes them, the parameter is plain
        return own
    if own == "fp32":
        return own
    if asked and base not in (own, "fp32"):
        hint = f"give its group weights='{own}{plus}{extra}', or cast the model to {base}"
        raise UsageError(f"weights='{name}' for a parameter in {own}, which it completes; {hint}")
    return own + "+fp32" if name == "fp32" else own + plus + extra


def _arrays(row):
    """(index, name, role) of the arrays in use."""
    found = []
    for a in range(_abi.GRADIENT):
        if not row.arrays[a].format:
            continue
        name, role, used = ctypes.c_char_p(), ctypes.c_int(), ctypes.c_int()
        library.tensor_array(byref(row), a, byref(name), byref(role), byref(used))
        if used.value:
            found.append((a, name.value.decode(), role.value))
        else:
            row.arrays[a] = _abi.Array()
    return found


def _set_moments(row, moments, arrays):
    """One format for all that it can hold, or each slot's own."""
    slots = [name for a, name, _ in arrays if a != _abi.WEIGHT]
    for name, form in (moments if isinstance(moments, dict) else {"moments": moments}).items():
        if isinstance(moments, dict) and name not in slots:
            raise UsageError(f"moments names slot {name!r}; this optimizer has {', '.join(slots) or 'none'}")
        library.tensor_set_format(byref(row), name.encode(), str(form).encode())


def _set_rounding(row, rounding):
    """A name is for every array that can round so; what a dict says of an array, that must be able to do."""
    texts = [*rounding, *rounding.values()] if isinstance(rounding, dict) else [rounding]
    if not all(isinstance(text, str) and text for text in texts):
        names = "a name such as 'stochastic', or a dict of names for 'weights', 'moments' or slots"
        raise UsageError(f"rounding is {rounding!r}; it can be {names}")
    if isinstance(rounding, str):  # moments have no second part that could be wide
        rounding = {"": rounding, **({"moments": "stochastic"} if rounding == "wide" else {})}
    for which in sorted(rounding, key=lambda which: which not in ("", "moments")):  # before the slots' own
        library.tensor_set_rounding(byref(row), which.encode(), rounding[which].encode())


def codes_name(slot, form):
    return slot if form.name in _CODES else slot + "/codes"


def meaning(described):
    """An array's name, and what its codes mean: the format, with the first rounding that is read alike."""
    (name, form, rounding), names = described, _abi.rounding_names()
    return name, f"{form} {names[_abi.format_named(form).reads_as(names.index(rounding))]}"


class Plane(NamedTuple):
    """A tensor in a parameter's state."""

    name: str
    array: int
    part: str  # of the array: "codes" or "aux"
    per: float  # values to an entry
    dtype: torch.dtype
    form: _abi.Format
    away: bool  # in pinned memory of the host

    @property
    def slot(self):
        return self.name.partition("/")[0]

    def shape(self, param):
        if self.per == 1:
            return tuple(param.shape)
        codes, aux = self.form.bytes(param.numel())
        return ((codes if self.part == "codes" else aux) // self.dtype.itemsize,)

    def bytes(self, param):
        return math.prod(self.shape(param)) * self.dtype.itemsize

    def zeros(self, param):
        if self.away:
            return pinned.zeros(self.shape(param), self.dtype, param.device)
        return torch.zeros(self.shape(param), dtype=self.dtype, device=param.device)

    def fits(self, param, held):
        """Whether a tensor can be this plane of the parameter."""
        return self._is_alike(param, held) and self._is_home(param, held)

    def is_elsewhere(self, param, held):
        """Whether it only has to come to or from pinned memory: what was pinned is not so in a copy of an optimizer."""
        alike = self._is_alike(param, held) and not self._is_home(param, held)
        return alike and (self.away or held.is_pinned())

    def _is_alike(self, param, held):
        if not isinstance(held, torch.Tensor) or not held.is_contiguous():
            return False
        return (held.dtype, tuple(held.shape)) == (self.dtype, self.shape(param))

    def _is_home(self, param, held):
        return held.is_pinned() if self.away else held.device == param.device


def _planes(row, arrays):
    """All that the parameter itself does not hold, and a coded weight's planes."""
    for a, name, form in arrays:
        codes, aux = (bool(library.tensor_on_host(byref(row), a, part)) for part in range(2))
        if a != _abi.WEIGHT or form.aux_is_scale:
            dtype = _CODES.get(form.name, torch.uint8)
            yield Plane(codes_name(name, form), a, "codes", dtype.itemsize * 8 / form.code_bits, dtype, form, codes)
        if form.aux_is_scale:
            dtype = torch.float16 if form.aux_bits == 16 else torch.float32
            yield Plane(name + "/scale", a, "aux", form.group_size, dtype, form, aux)
        elif form.aux_bits:
            dtype = {32: torch.float32, 16: torch.int16}.get(form.aux_bits, torch.uint8)
            yield Plane("extra", a, "aux", dtype.itemsize * 8 / form.aux_bits, dtype, form, aux)


class Layout:
    """The formats of one parameter under one rule, by recipe and by what the group says instead."""

    def __init__(self, rule, group, dtype, size, form=None, away=False):
        """`form`: that of a coded parameter. `away`: what a step alone reads lies in pinned memory of the host."""
        if dtype not in NAMES:
            hint = "train torch.view_as_real of it" if dtype.is_complex else "use fp32, bf16 or fp16"
            raise UsageError(f"a parameter has dtype {dtype}, for which there is no format; {hint}")
        row = _abi.Tensor(optimizer=rule.handle, size=size, step=1, host=_abi.HOST_STATE if away else 0)
        library.tensor_use(byref(row), str(group["recipe"]).encode())
        row.arrays[_abi.GRADIENT] = _abi.Array()
        arrays, small = _arrays(row), size <= _abi.recipes()[group["recipe"]].small
        asked = group["weights"] if not small else None
        meant = asked or _abi.format_at(row.arrays[_abi.WEIGHT].format).name
        codes = _abi.format_named(meant).aux_is_scale
        if codes and size <= few_elements():
            codes, meant = False, "fp32"
        # What compress_weights is to make of the parameter before it can be stepped.
        self.waits = meant if codes and not form else None
        if self.waits:  # refuses what no weight can be kept in
            library.tensor_set_format(byref(row), b"weights", meant.encode())
            library.tensor_check(byref(row))
        named = form or weight_format(meant, dtype, asked)
        library.tensor_set_format(byref(row), b"weights", named.encode())
        if group["moments"] and not small:
            _set_moments(row, group["moments"], arrays)
        if group["rounding"] is not None:
            _set_rounding(row, group["rounding"])
        library.tensor_check(byref(row))
        self.row, self.dtype, self.rule = row, dtype, rule  # which lives as long as a row points to it
        self.exact = {name for _, name, role in arrays if role == _abi.ROLE_EXACT}
        self._set_arrays([(a, name, _abi.format_at(row.arrays[a].format)) for a, name, _ in arrays])

    def check_ready(self, p):
        if self.waits:
            hint = "call compress_weights(model, opt), of a copied model with a new optimizer, or give weights='bf16+8'"
            raise UsageError(f"{sized(p)} is to be kept in {self.waits}, and is a plain one; {hint}")

    def _set_arrays(self, arrays):
        self.arrays, self.planes = arrays, list(_planes(self.row, arrays))
        self.formats = {name: form.name for _, name, form in arrays}
        self.slots = [name for a, name, _ in arrays if a != _abi.WEIGHT]
        # Moments that are not kept under torch's name for them.
        self.coded = [x.slot for x in self.planes if x.name.endswith("/codes") and x.array != _abi.WEIGHT]

    @property
    def described(self):
        """(name, format, rounding) of each array."""
        names = _abi.rounding_names()
        return [(name, form.name, names[self.row.arrays[a].rounding]) for a, name, form in self.arrays]

    def as_saved(self, formats, recipe):
        """This layout with the moments' formats of a saved state; None where it is not converted. Converted are states
        of older versions: a slot that must be fp32 now, or the former formats of a recipe."""
        if formats == self.formats:
            return self
        if formats.keys() != self.formats.keys():
            return None
        made = copy.copy(self)
        made.row = _abi.Tensor.from_buffer_copy(self.row)
        for a, name, form in self.arrays:
            if formats[name] != form.name:
                if name not in self.exact and (formats[name], form.name) != _FORMER.get(recipe):
                    return None
                made.row.arrays[a] = _abi.Array(_abi.format_named(formats[name]).handle)
        library.tensor_check(byref(made.row))
        made._set_arrays([(a, name, _abi.format_named(formats[name])) for a, name, _ in self.arrays])
        return made

    def read(self, p, state):
        """Reads a parameter's state: (planes, {moment: values}, steps). Values are a user's, still to be encoded."""
        weight, begun, steps, planes, values, lacks = local(p), is_begun(state), count_of(state), {}, {}, []
        had = () if state.entry is None else state.entry.layout.formats
        for plane in self.planes:  # values that a user has set under a moment's name are read below
            if plane.name not in self.slots and plane.is_elsewhere(weight, held := state.get(plane.name)):
                dict.update(state, {plane.name: plane.zeros(weight).copy_(held)})
        for slot, parts in itertools.groupby(self.planes, lambda plane: plane.slot):
            parts = list(parts)
            if parts[0].array == _abi.WEIGHT and slot != "extra":  # the parameter's own, with what was set in their place
                for plane, own in zip(parts, planes_of(p)):
                    if (held := state.get(plane.name, own)) is not own:
                        own.copy_(held)
                    planes[plane.name] = own
                continue
            fit = all(plane.fits(weight, state.get(plane.name)) for plane in parts)
            here = any(plane.name in state for plane in parts)
            given = state.has(slot) and (slot in self.coded or not fit and slot != "extra")
            gone = state[slot] is None if given else not here and slot in had
            if slot == "momentum_buffer" and gone:  # as torch.optim.SGD has it before its first step
                steps = 0
            elif given:
                values[slot] = _checked_values(p, slot, state[slot])
            elif begun and not here and (gone or not had) and slot not in ("extra", "momentum_buffer"):
                lacks.append(slot)  # else it is asked for only now
            if slot == "extra" and here and not fit:  # other elements: they begin at the visible weight
                here = parts[0].shape(weight) == tuple(getattr(state["extra"], "shape", ()))
            for plane in parts:
                fresh = given and gone or not fit and (given or not here)
                planes[plane.name] = plane.zeros(weight) if fresh else state.get(plane.name)
        if begun and steps is None:  # torch.optim.SGD counts none; what matters is that the first is over
            steps = 1
            lacks += ["step"] * any(x.array != _abi.WEIGHT and x.slot != "momentum_buffer" for x in self.planes)
        if lacks:
            found = f"opt.state of {sized(p)} lacks {', '.join(lacks)}; it has {', '.join(map(str, state))}"
            raise UsageError(f"{found}. Set what is missing, or opt.state[p] = {{}} to begin anew")
        return planes, values, steps or 0

    def place(self, param, planes, number, offset):
        """The table row of a parameter whose weight stands in `param` and whose other planes in `planes`."""
        row = _abi.Tensor.from_buffer_copy(self.row)
        row.size, row.id, row.offset = param.numel(), number, offset
        row.arrays[_abi.WEIGHT].codes = memory_of(param).data_ptr()
        for plane in self.planes:
            if not plane.fits(param, planes.get(plane.name)):
                what = f"{sized(param)} is {NAMES[self.dtype]} on {param.device}, and its state has no {plane.name!r}"
                hint = "Do that before its first step, or load state_dict(as_='torch') into a new optimizer"
                raise UsageError(f"{what} for that: it was cast or moved. {hint}")
            setattr(row.arrays[plane.array], plane.part, planes[plane.name].data_ptr())
        return row

    def stored(self, param, state):
        """((array, plane), tensor) of all that a checkpoint has of a parameter, in its order."""
        order = [a for a, *_ in self.arrays]
        if not form_of(param):
            yield (0, 0), param
        for plane in self.planes:
            yield (order.index(plane.array), int(plane.part == "aux")), state[plane.name]

    def index(self, name):
        return next(a for a, known, _ in self.arrays if known == name)


def is_ours(name, layout=None):
    """Whether an entry of a parameter's state means something to an optimizer, or to one of this layout; others
    are the user's own."""
    slot, *coded = str(name).replace("::", "/").split("/")
    known = slot in _FIXED or name in _CODED or any(slot in slots for _, slots, _ in _abi.rules().values())
    return known and (layout is None or bool(coded) or slot in {*_FIXED, *layout.formats})


def is_begun(state):
    return any(map(is_ours, state or ()))


def _checked_values(p, slot, found):
    what, like = described(found), isinstance(found, torch.Tensor) and found.shape == p.shape
    if like and found.is_floating_point() and found.layout is torch.strided:
        nonneg = any(slots.get(slot) == _abi.ROLE_NONNEG for _, slots, _ in _abi.rules().values())
        right = local(found).isfinite() & (local(found) >= (0.0 if nonneg else -math.inf))
        if bool(right.all()):
            return found
        what = f"{'negative or ' * nonneg}not finite somewhere"
    hint = "set floats of that shape, or opt.state[p] = {} to begin anew"
    raise UsageError(f"opt.state[p][{slot!r}] is {what}, for {sized(p)}; {hint}")


def count_of(state):
    """The steps that a state counts; where a float shows them, the exact number. None: it says nothing."""
    found = state.get("step")
    if found is None:
        return None
    one = found.item() if isinstance(found, torch.Tensor) and found.numel() == 1 else found
    if found is state.shown and one == torch.tensor(float(state.steps)).to(found).item():
        return state.steps
    if not isinstance(one, numbers.Real) or not 0 <= one < 2**32 or one != int(one):
        raise UsageError(f"opt.state[p]['step'] is {found!r}; it must be a whole number of steps, from 0")
    return int(one)


def start_extra(param, extra):
    """The wide weight is the visible one: zero extra bits mean that already, a master copy does not."""
    if param.dtype != torch.float32 and extra.dtype == torch.float32:
        extra.copy_(param)


def decode(row, array, shape, device, to=None):
    """An array's values in fp32, on its device or on another."""
    values = torch.empty(shape, dtype=torch.float32, device=to or device)
    if row.size:
        library.decode(engine_for(device), byref(row), array, values.data_ptr())
    return values


def decode_as(row, array, form, planes, shape, device):
    """The same of planes in another format than the row's."""
    held = [x if x is None else x.to(device).contiguous() for x in planes]  # alive until they are read
    source = _abi.Tensor.from_buffer_copy(row)
    source.size = math.prod(shape)
    source.arrays[array] = _abi.Array(form.handle, *(None if x is None else x.data_ptr() for x in held))
    return decode(source, array, shape, device)


def chunks(row):
    """(first, size, row) of pieces of a row that are converted one at a time."""
    for first in range(0, row.size, CHUNK):
        size, part = min(CHUNK, row.size - first), _abi.Tensor()
        library.tensor_view(byref(row), first, size, byref(part))
        yield first, size, part


def encode(row, array, values, device):
    """Writes values of any dtype from any device, a piece at a time."""
    values = values.reshape(-1)
    for first, size, part in chunks(row):
        # A copy: the values may be those of the very array that is written.
        chunk = values[first : first + size].to(device, torch.float32, copy=True).contiguous()
        # Not drawn, so that values which were codes before become the same codes.
        held = part.arrays[array]
        held.rounding = _abi.format_at(held.format).reads_as(held.rounding)
        library.encode(engine_for(device), byref(part), array, chunk.data_ptr())


def recode(row, array, form, codes, scales, device):
    """Writes the values that stand in planes of another format, a piece at a time."""
    planes = [None if plane is None else plane.reshape(-1).view(torch.uint8) for plane in (codes, scales)]
    for first, size, part in chunks(row):
        parts = zip(planes, form.bytes(first), form.bytes(size))
        held = [x if x is None else x[begin : begin + count] for x, begin, count in parts]
        encode(part, array, decode_as(part, array, form, held, (size,), device), device)

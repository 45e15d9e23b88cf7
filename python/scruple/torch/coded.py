"""Weights that live as integer codes with a scale for every 64: a tensor that is decoded where it is used.

Autograd sees an ordinary float tensor, and saves this one for backward; below it every operation gets decoded values,
which are freed after it. So no decoded weight outlives its use, whatever the layer.
"""

import functools
import math
import typing
from ctypes import byref

import torch

from .. import _abi
from .._abi import UsageError, library
from .engines import NAMES, engine_for
from .shards import local

_aten = torch.ops.aten


@torch.library.custom_op("scruple::decode_weight", mutates_args=())  # torch 2.6 knows no list[int]
def _decode_traced(
    codes: torch.Tensor, scale: torch.Tensor, form: str, shape: typing.Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    """Store.decode, for torch.compile."""
    return Store(codes, scale, _abi.format_named(form), shape, dtype).decode()


@_decode_traced.register_fake
def _(codes, scale, form, shape, dtype):
    return codes.new_empty(shape, dtype=dtype)


_any_rule = functools.cache(lambda: _abi.Rule("sgd"))  # a row of the library has one; decoding asks for none


class Store:
    """The planes of a weight, and what they mean."""

    def __init__(self, codes, scale, form, shape, dtype):
        self.codes, self.scale, self.form, self.shape, self.dtype = codes, scale, form, shape, dtype
        self.device, self.row, self.hook = codes.device, None, None  # hook: what release_gradients does with a gradient

    def _row(self):
        """The library's view of it. Made late: torch.compile makes stores that have no memory."""
        if self.row is None:
            row = _abi.Tensor(optimizer=_any_rule().handle, size=math.prod(self.shape), step=1)
            planes = self.codes.data_ptr(), self.scale.data_ptr()
            row.arrays[_abi.WEIGHT] = _abi.Array(self.form.handle, *planes, _abi.NEAREST)
            self.row = byref(row)
        return self.row

    def decode(self, dtype=None):
        dtype = dtype or self.dtype
        if dtype is not self.dtype is not torch.float32:  # rounded to its own type first
            return self.decode().to(dtype)
        if type(self.codes) is not torch.Tensor:
            return _decode_traced(self.codes, self.scale, self.form.name, list(self.shape), dtype)
        values, to = torch.empty(self.shape, dtype=dtype, device=self.device), _abi.format_named(NAMES[dtype])
        library.decode_as(engine_for(self.device), self._row(), _abi.WEIGHT, to.handle, values.data_ptr())
        return values

    def encode(self, values):
        """To nearest: values that were decoded become the codes that they were."""
        values = values.to(self.codes.device, torch.float32).contiguous()
        assert values.shape == self.shape, (values.shape, self.shape)
        library.encode(engine_for(values.device), self._row(), _abi.WEIGHT, values.data_ptr())


class Coded(torch.Tensor):
    """A weight; or, with `source`, what an operation on another such tensor gives, computed where it is used: a view, or
    autocast's cast. `op`: the operation, its other arguments, and which of its results this is (None: it has one).
    `like`: shape, strides and dtype. `read_at`: of a cast, the version of the weight."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, store, like=None, source=None, op=None, read_at=None):
        shape, strides, dtype = like or _form(torch.empty(store.shape, dtype=store.dtype, device="meta"))
        # No storage: who looks for the floats of a weight finds none, instead of nothing but zeros.
        x = cls._make_wrapper_subclass(cls, shape, strides=strides, dtype=dtype, device=store.device, storage_size=0)
        x.store, x.source, x.op, x.read_at = store, source, op, read_at
        return x

    def requires_grad_(self, requires_grad=True):
        """torch's. model.to() makes a new parameter over the same codes even where it moves nothing: it needs the hook."""
        super().requires_grad_(requires_grad)
        if requires_grad and self.store.hook is not None and not self._post_accumulate_grad_hooks:
            self.register_post_accumulate_grad_hook(self.store.hook)
        return self

    @property
    def data(self):
        return self.detach()

    @data.setter
    def data(self, values):  # torch would take the new type, shape and place, and keep the old codes
        if (values.shape, values.dtype, values.device) != (self.shape, self.dtype, self.device):
            found = f"{values.dtype} of shape {tuple(values.shape)} on {values.device}"
            hint = "move or cast a model before compress_weights (layers before it may have been changed: load it again)"
            raise UsageError(f"a coded weight in {self.dtype} on {self.device} cannot become {found}; {hint}")
        with torch.no_grad():
            self.copy_(values)

    def decode(self, dtype=None, version=None):
        if version not in (None, self._version):
            hint = "put autocast around one forward pass alone, and cast a weight anew after a step"
            raise RuntimeError(f"a weight was stepped after the forward pass that reads it, or its cast; {hint}")
        if self.source is None:
            return self.store.decode(dtype)
        if self.read_at is not None and self.source.source is None:
            return self.source.decode(self.dtype, self.read_at)  # at once
        return self._run_op(self.source.decode(version=self.read_at))

    def _run_op(self, values):
        func, rest, named, which = self.op
        return func(values, *rest, **named) if which is None else func(values, *rest, **named)[which]

    def _view_of(self, values):
        """What this is of the weight's values."""
        return values if self.source is None else self._run_op(self.source._view_of(values))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return _handler_of(func)(func, args, kwargs or {})

    # ---- Copies, files and arrays are plain ----

    def _plain(self):
        values = self.decode()
        return torch.nn.Parameter(values, self.requires_grad) if isinstance(self, torch.nn.Parameter) else values

    def __deepcopy__(self, memo):
        return memo.setdefault(id(self), self._plain())

    def __reduce_ex__(self, protocol):
        return self._plain().__reduce_ex__(protocol)

    def __repr__(self, **_):
        return f"{self.decode()!r} in {self.store.form.name}"

    def tolist(self):
        return self.decode().tolist()

    def numpy(self, *, force=False):
        """A copy, which cannot be written to: that would be lost."""
        array = self.decode().requires_grad_(self.requires_grad).numpy(force=force)
        array.flags.writeable = False
        return array

    def _has_no_memory(self, *_, **__):
        raise UsageError("a coded weight has no memory of floats to share; take weight.detach().clone()")

    share_memory_ = __dlpack__ = _has_no_memory

    # ---- For torch.compile ----

    def __tensor_flatten__(self):
        if self.source is not None:
            raise RuntimeError("a view of a coded weight goes into a compiled function; pass the weight")
        self.codes, self.scale = self.store.codes, self.store.scale
        return ["codes", "scale"], (self.store.form.name, tuple(self.shape), self.dtype)

    def _stable_hash_for_caching(self):
        """What of it a compiled graph depends on."""
        return repr((self.store.form.name, self.shape, self.dtype, self.device, self.requires_grad))

    @staticmethod
    def __tensor_unflatten__(planes, meant, shape, strides):
        name, shape, dtype = meant
        return Coded(Store(planes["codes"], planes["scale"], _abi.format_named(name), shape, dtype))


# ---- What a coded weight does with an operation ----


@functools.cache
def _handler_of(func):
    if func in (_aten.detach.default, _aten.alias.default):
        return _alias
    if func.is_view or func is _aten._unsafe_view.default:
        return _defer
    if func is _aten._to_copy.default:
        return _cast
    return _write if func._schema.is_mutable else _run_decoded


def _alias(func, args, named):
    x = args[0]  # of a cast: a copy, which later steps do not change
    return Coded(x.store, _form(x), x.source, x.op) if x.read_at is None else x.decode()


def _form(x, dtype=None):
    return x.shape, x.stride(), dtype or x.dtype


def _defer(func, args, named):
    """The results of an operation that is run where they are used."""
    x, rest = args[0], args[1:]
    if func is _aten.t.default:  # often
        return Coded(x.store, (x.shape[::-1], x.stride()[::-1], x.dtype), x, (func, rest, named, None))
    results = func(torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta"), *rest, **named)
    if isinstance(results, torch.Tensor):
        return Coded(x.store, _form(results), x, (func, rest, named, None))
    return [Coded(x.store, _form(result), x, (func, rest, named, i)) for i, result in enumerate(results)]


def _cast(func, args, named):
    """Of autocast's casts autograd saves the result: those of what needs a gradient, to 16 bits. Other casts are copies."""
    x, dtype = args[0], named.get("dtype")
    if x.source is None and dtype in NAMES and named == {"dtype": dtype, "memory_format": torch.contiguous_format}:
        return x.store.decode(dtype)
    autocast = x.requires_grad and torch.is_grad_enabled() and named.get("device", x.device) == x.device
    if not autocast or dtype not in (torch.bfloat16, torch.float16) or named.get("memory_format"):
        return _run_decoded(func, args, named)
    return Coded(x.store, _form(x, dtype), x, (func, args[1:], named, None), x._version)


def _run_decoded(func, args, named):
    return func(*map(_decoded, args), **{name: _decoded(x) for name, x in named.items()} if named else named)


def _decoded(x):
    if type(x) is Coded:
        return x.decode()
    if type(x) is list and x and type(x[0]) not in (int, bool):  # many operations take lists of numbers
        return list(map(_decoded, x))
    return x


def _write(func, args, named):
    """An operation in place. What it writes into coded weights is encoded to nearest, unless nothing was changed."""
    written, stands_for = {}, {}  # by its store: the values of a weight; by its own: a view of them

    def opened(x, into):
        if type(x) is list:
            return [opened(one, into) for one in x]
        if type(x) is not Coded or not into:
            return _decoded(x)
        source = x
        while source is not None:
            if source.read_at is not None:
                raise UsageError("writing into a cast of a coded weight; write into the weight")
            source = source.source
        if x.store not in written:
            written[x.store] = x.store.decode()
        view = x._view_of(written[x.store])
        stands_for[id(view)] = x
        return view

    known = {argument.name: argument for argument in func._schema.arguments}
    wanted = [bool(x.alias_info and x.alias_info.is_write) for x in func._schema.arguments]
    views = [opened(x, into) for x, into in zip(args, wanted)]
    more = {name: opened(x, bool(known[name].alias_info)) for name, x in named.items()}
    before = {store: (values.clone(), values.shape, values.stride()) for store, values in written.items()}
    result = func(*views, **more)
    for store, values in written.items():
        if (values.shape, values.stride()) != before[store][1:]:
            raise UsageError(f"{func} gives a coded weight another shape or other strides; make a new layer")
        if not values.isfinite().all():
            raise UsageError(f"{func} writes values that are not finite into a coded weight, and no code holds them")
    for store, values in written.items():
        if not torch.equal(values, before[store][0]):
            store.encode(values)
    return stands_for.get(id(result), result)


def form_of(p):
    """The format of a coded parameter; None: it is a plain one."""
    return p.store.form.name if type(p) is Coded else None


def planes_of(p):
    """Its codes and scales; nothing where it is plain."""
    return (p.store.codes, p.store.scale) if type(p) is Coded else ()


def memory_of(p):
    """What a step writes: of a sharded parameter what is here, of a coded one its codes."""
    return p.store.codes if type(p) is Coded else local(p)


def with_codes(params):
    """`params`, and the codes of those that have them: what a step writes, for autograd's count of versions."""
    return [*params, *(p.store.codes for p in params if type(p) is Coded)]

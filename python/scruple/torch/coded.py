"""Weights that live as integer codes with a scale for every 64: a tensor that is decoded where it is used.

Autograd sees an ordinary float tensor, and saves this one for backward; below it every operation gets decoded values,
which are freed after it. So no decoded weight outlives its use, whatever the layer.
"""

import functools
from ctypes import byref

import torch

from .. import _abi
from .._abi import UsageError, library
from .engines import NAMES, engine_for
from .shards import local

_aten = torch.ops.aten
_SAME = {_aten.detach.default, _aten.alias.default}
# Views. They are taken of the decoded values, when these are used.
_VIEWS = {_aten.t.default, _aten.transpose.int, _aten.permute.default, _aten.view.default}
_VIEWS |= {_aten._unsafe_view.default, _aten.unsqueeze.default, _aten.squeeze.dim, _aten.slice.Tensor}
_VIEWS |= {_aten.select.int, _aten.expand.default}


@torch.library.custom_op("scruple::decode_weight", mutates_args=())
def _decode_traced(codes: torch.Tensor, scale: torch.Tensor, form: str, shape: list[int], dtype: torch.dtype) -> torch.Tensor:
    """Store.decode, for torch.compile."""
    return Store(codes, scale, _abi.format_named(form), shape, dtype).decode()


@_decode_traced.register_fake
def _(codes, scale, form, shape, dtype):
    return codes.new_empty(shape, dtype=dtype)


class Store:
    """The planes of a weight, and what they mean."""

    def __init__(self, codes, scale, form, shape, dtype):
        self.codes, self.scale, self.form, self.shape, self.dtype = codes, scale, form, shape, dtype
        self.row = None
        self.hook = None  # what release_gradients does when a gradient has come

    def _row(self):
        """The library's view of it. Made late: torch.compile makes stores that have no memory."""
        if self.row is None:
            size = 1
            for length in self.shape:
                size *= length
            self.rule = _abi.Rule("sgd")  # any: decoding asks for none
            self.row = _abi.Tensor(optimizer=self.rule.handle, size=size, step=1)
            planes = self.codes.data_ptr(), self.scale.data_ptr()
            self.row.arrays[_abi.WEIGHT] = _abi.Array(self.form.handle, *planes, _abi.NEAREST)
        return byref(self.row)

    def decode(self, dtype=None):
        dtype = dtype or self.dtype
        if type(self.codes) is not torch.Tensor:
            return _decode_traced(self.codes, self.scale, self.form.name, list(self.shape), dtype)
        values = torch.empty(self.shape, dtype=dtype, device=self.codes.device)
        engine, form = engine_for(values.device), _abi.format_named(NAMES[dtype])
        library.decode_as(engine, self._row(), _abi.WEIGHT, form.handle, values.data_ptr())
        return values

    def encode(self, values):
        """To nearest: values that were decoded become the codes that they were."""
        values = values.to(self.codes.device, torch.float32).contiguous()
        library.encode(engine_for(values.device), self._row(), _abi.WEIGHT, values.data_ptr())


class Coded(torch.Tensor):
    """`store`, or what an operation of _VIEWS or a cast makes of another such tensor: `source`, `made_by`."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, store, source=None, made_by=None, like=None, read_at=None):
        like = like if like is not None else torch.empty(store.shape, dtype=store.dtype, device="meta")
        options = dict(strides=like.stride(), dtype=like.dtype, device=store.codes.device)
        return torch.Tensor._make_wrapper_subclass(cls, like.shape, **options)

    def __init__(self, store, source=None, made_by=None, like=None, read_at=None):
        self.store, self.source, self.made_by = store, source, made_by
        self.read_at = read_at  # of a cast: the version of the weight

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
    def data(self, values):  # torch would take the new shape and keep the old codes
        hint = "Move or cast a model before compress_weights; write by weight.copy_(values) under torch.no_grad()"
        raise UsageError(f"a coded weight cannot be moved or cast, nor its .data be set. {hint}")

    def decode(self):
        if self.source is None:
            return self.store.decode()
        if self.read_at is not None and self.source._version != self.read_at:
            raise RuntimeError("a weight was stepped after the forward pass that a backward pass goes through")
        if self.read_at is not None and self.source.source is None:  # a cast of the weight itself
            return self.store.decode(self.dtype)
        return self._of_source(self.source.decode())

    def _of_source(self, values):
        func, rest, named = self.made_by
        return func(values, *rest, **named)

    def _of_weight(self, values):
        return values if self.source is None else self._of_source(self.source._of_weight(values))

    def _later(self, func, rest, named):
        """The same tensor, of which `func` is computed when it is used."""
        if func is _aten.t.default:
            like = _Like(self.shape[::-1], self.stride()[::-1], self.dtype)
        elif func is _aten._to_copy.default:
            like = _Like(self.shape, self.stride(), named["dtype"])
        else:
            like = func(torch.empty_strided(self.shape, self.stride(), dtype=self.dtype, device="meta"), *rest, **named)
        read_at = self._version if func is _aten._to_copy.default else None
        return Coded(self.store, self, (func, rest, named), like, read_at)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return _answer_to(func)(func, args, kwargs or {})

    # ---- Copies and files are plain tensors ----

    def _plain(self):
        values = self.decode()
        return torch.nn.Parameter(values, self.requires_grad) if isinstance(self, torch.nn.Parameter) else values

    def __deepcopy__(self, memo):
        return memo.setdefault(id(self), self._plain())

    def __reduce_ex__(self, protocol):
        return self._plain().__reduce_ex__(protocol)

    def __repr__(self, **_):
        return f"{self.decode()!r} in {self.store.form.name}"

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


class _Like:
    """Shape, strides and dtype of a tensor."""

    def __init__(self, shape, strides, dtype):
        self.shape, self.strides, self.dtype = shape, strides, dtype

    def stride(self):
        return self.strides


# ---- What a coded weight does with an operation ----


@functools.cache
def _answer_to(func):
    if func in _SAME:
        return _same
    if func in _VIEWS:
        return _later
    if func is _aten._to_copy.default:
        return _cast
    return _write if func._schema.is_mutable else _use


def _same(func, args, named):
    x = args[0]
    return Coded(x.store, x.source, x.made_by, x, x.read_at)


def _later(func, args, named):
    return args[0]._later(func, args[1:], named)


def _cast(func, args, named):
    return (_later if _is_autocast(*args, **named) else _use)(func, args, named)


def _use(func, args, named):
    return func(*map(_decoded, args), **{name: _decoded(x) for name, x in named.items()} if named else named)


def _is_autocast(x, dtype=None, layout=None, device=None, pin_memory=None, non_blocking=False, memory_format=None):
    """Whether a cast is one of autocast's, whose result autograd saves: of what needs a gradient, to 16 bits. Other casts
    are copies, which later steps do not change."""
    same = device in (None, x.device) and memory_format in (None, torch.preserve_format)
    return same and x.requires_grad and torch.is_grad_enabled() and dtype in (torch.bfloat16, torch.float16)


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
        values = written.setdefault(x.store, x.store.decode())
        view = x._of_weight(values)
        stands_for[id(view)] = x
        return view

    known = {argument.name: argument for argument in func._schema.arguments}
    wanted = [bool(x.alias_info and x.alias_info.is_write) for x in func._schema.arguments]
    views = [opened(x, into) for x, into in zip(args, wanted)]
    more = {name: opened(x, bool(known[name].alias_info)) for name, x in named.items()}
    before = {store: values.clone() for store, values in written.items()}
    result = func(*views, **more)
    for store, values in written.items():
        if not torch.equal(values, before[store]):
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

"""scruple.h through ctypes: the structs, the functions, and errors as exceptions. Nothing here knows torch.

The library is the one that SCRUPLE_LIBRARY names, or the one inside this package, or the one that `make
build` left in the source tree.
"""

import contextlib
import ctypes
import os
import pathlib
import threading
import types
from ctypes import (
    CFUNCTYPE,
    POINTER,
    byref,
    c_char_p,
    c_double,
    c_float,
    c_int,
    c_int32,
    c_int64,
    c_size_t,
    c_uint32,
    c_uint64,
    c_void_p,
)

ABI_VERSION = 2
NEAREST, TRUNCATE, STOCHASTIC, DITHER, WIDE = range(5)
ROUNDING_NAMES = ("nearest", "truncate", "stochastic", "dither", "wide")  # by number
ROUNDINGS = {name: i for i, name in enumerate(ROUNDING_NAMES) if i != DITHER}  # of weights and moments
ROLE_WEIGHT, ROLE_NONNEG, ROLE_EXACT = 1, 4, 32
WEIGHT, GRADIENT, ARRAYS = 0, 4, 5
RELEASED, COMPRESSED = 1, 2
ACCUMULATE = {"gradients": 0, "momentum": 1, "adama": 2}
INVALID, UNSUPPORTED, OUT_OF_MEMORY = 1, 2, 3


class Error(RuntimeError):
    """What the library says: what was asked, what was found, what to do."""


class UsageError(Error, ValueError):
    """An argument is wrong, or a combination does not exist."""


def _struct(kind, /, **fields):
    return type(kind, (ctypes.Structure,), {"_fields_": list(fields.items())})


Array = _struct("Array", format=c_void_p, codes=c_void_p, aux=c_void_p, rounding=c_int32, owned=c_int32)
Tensor = _struct(
    "Tensor",
    optimizer=c_void_p,
    size=c_int64,
    step=c_int64,
    offset=c_int64,
    folds=c_int64,
    id=c_uint32,
    reserved=c_uint32,
    arrays=Array * ARRAYS,
)
Bound = _struct("Bound", relative=c_double, group=c_double, absolute=c_double)
FormatInfo = _struct(
    "FormatInfo",
    name=c_char_p,
    doc=c_char_p,
    roles=c_uint32,
    roundings=c_uint32,
    group_size=c_int32,
    code_bits=c_int32,
    aux_bits=c_int32,
    aux_is_scale=c_int32,
    bits_per_value=c_double,
    bound=Bound,
    bound_nonneg=Bound,
)
RecipeInfo = _struct(
    "RecipeInfo",
    name=c_char_p,
    doc=c_char_p,
    weight=c_char_p,
    moment=c_char_p,
    nonneg=c_char_p,
    gradient=c_char_p,
    weight_rounding=c_int,
    moment_rounding=c_int,
    nonneg_rounding=c_int,
    gradient_rounding=c_int,
    small=c_int64,
)
RuleInfo = _struct("RuleInfo", name=c_char_p, doc=c_char_p, slots=c_int32, hypers=c_int32)
SlotInfo = _struct("SlotInfo", name=c_char_p, role=c_int32, optional=c_int32)
HyperInfo = _struct("HyperInfo", name=c_char_p, doc=c_char_p, value=c_double, flag=c_int32)
EngineInfo = _struct("EngineInfo", name=c_char_p, doc=c_char_p, available=c_int32, reason=c_char_p)
StepOptions = _struct(
    "StepOptions",
    struct_size=c_size_t,
    multiplier=c_float,
    found_inf=c_void_p,
    clip=c_void_p,
    loss_scale=c_void_p,
    steps=c_void_p,
    part=c_int32,
    parts=c_int32,
)
MeasureOptions = _struct(
    "MeasureOptions",
    struct_size=c_size_t,
    max_norm=c_double,
    loss_scale=c_void_p,
    steps=c_void_p,
    norm=c_void_p,
    found_inf=c_void_p,
    clip=c_void_p,
    sum_before=c_void_p,
    sum=c_void_p,
    adagc=c_double,
    gamma=c_void_p,
)
Scaler = _struct("Scaler", scale=c_float, growth=c_float, backoff=c_float, interval=c_int32, clean=c_int32)
ALLOC = CFUNCTYPE(c_void_p, c_void_p, c_int64)
FREE = CFUNCTYPE(None, c_void_p, c_void_p, c_int64)
REDUCE = CFUNCTYPE(c_int, c_void_p, c_void_p)
SinkOptions = _struct(
    "SinkOptions",
    struct_size=c_size_t,
    policy=c_int,
    accumulation=c_int,
    micro_batches=c_int32,
    max_norm=c_double,
    tensor_norm=c_double,
    adagc=c_double,
    scaler=c_void_p,
    adagc_norms=c_void_p,
    memory_context=c_void_p,
    alloc=ALLOC,
    free=FREE,
    loss_scale=c_void_p,
    reduce_context=c_void_p,
    reduce=REDUCE,
)
Piece = _struct("Piece", tensor=c_int64, first=c_int64, size=c_int64, gradient=Array)
SinkReport = _struct(
    "SinkReport",
    norm=c_double,
    found_inf=c_float,
    clip=c_float,
    steps=c_int64,
    skipped=c_int64,
    scaler=Scaler,
)
Plane = _struct(
    "Plane", kind=c_char_p, dtype=c_char_p, shape=POINTER(c_int64), dimensions=c_int64, bytes=c_int64
)
StoredArray = _struct(
    "StoredArray",
    name=c_char_p,
    format=c_char_p,
    rounding=c_char_p,
    fits=c_int64,
    planes=POINTER(Plane),
    plane_count=c_int64,
)
StoredTensor = _struct(
    "StoredTensor",
    name=c_char_p,
    shape=POINTER(c_int64),
    dimensions=c_int64,
    group=c_int64,
    step=c_int64,
    id=c_int64,
    adagc_norm=c_double,
    arrays=POINTER(StoredArray),
    array_count=c_int64,
)
Hyper = _struct("Hyper", name=c_char_p, value=c_double)
Group = _struct("Group", optimizer=c_char_p, seed=c_uint64, hypers=POINTER(Hyper), hyper_count=c_int64)
Scale = _struct("Scale", scale=c_double, growth=c_double, backoff=c_double, interval=c_int64, clean=c_int64)
Note = _struct("Note", name=c_char_p, text=c_void_p, bytes=c_int64)
Contents = _struct(
    "Contents",
    folder=c_char_p,
    library=c_char_p,
    recipe=c_char_p,
    step=c_int64,
    groups=POINTER(Group),
    group_count=c_int64,
    loss_scale=POINTER(Scale),
    notes=POINTER(Note),
    note_count=c_int64,
    tensors=POINTER(StoredTensor),
    tensor_count=c_int64,
)

# Those that return a status; the others are below.
_CALLS = {
    "get_format_info": [c_void_p, POINTER(FormatInfo)],
    "format_bytes": [c_void_p, c_int64, POINTER(c_int64), POINTER(c_int64)],
    "recipe_at": [c_int, POINTER(RecipeInfo)],
    "rule_at": [c_int, POINTER(RuleInfo)],
    "rule_slot": [c_int, c_int, POINTER(SlotInfo)],
    "rule_hyper": [c_int, c_int, POINTER(HyperInfo)],
    "engine_at": [c_int, POINTER(EngineInfo)],
    "engine_create": [c_char_p, c_int, POINTER(c_void_p)],
    "engine_set_stream": [c_void_p, c_void_p],
    "optimizer_create": [c_char_p, POINTER(c_void_p)],
    "optimizer_set": [c_void_p, c_char_p, c_double],
    "optimizer_read_lr": [c_void_p, c_void_p],
    "optimizer_set_seed": [c_void_p, c_uint64],
    "tensor_use": [POINTER(Tensor), c_char_p],
    "tensor_array": [POINTER(Tensor), c_int, POINTER(c_char_p), POINTER(c_int), POINTER(c_int)],
    "tensor_alloc": [c_void_p, POINTER(Tensor), c_uint32],
    "tensor_reset": [c_void_p, POINTER(Tensor)],
    "tensor_view": [POINTER(Tensor), c_int64, c_int64, POINTER(Tensor)],
    "encode": [c_void_p, POINTER(Tensor), c_int, c_void_p],
    "decode": [c_void_p, POINTER(Tensor), c_int, c_void_p],
    "step": [c_void_p, c_void_p, c_int64, POINTER(StepOptions)],
    "measure": [c_void_p, c_void_p, c_int64, POINTER(MeasureOptions)],
    "advance": [c_void_p, c_void_p, c_void_p, c_void_p],
    "sink_create": [c_void_p, c_void_p, c_int64, POINTER(SinkOptions), POINTER(c_void_p)],
    "sink_add": [c_void_p, c_void_p, c_int64],
    "sink_end": [c_void_p],
    "sink_read": [c_void_p, POINTER(SinkReport)],
    "sink_read_tensors": [c_void_p, c_void_p, c_void_p],
    "checkpoint_open": [c_char_p, POINTER(c_void_p)],
    "checkpoint_verify": [c_void_p, c_int64],
    "checkpoint_read": [c_void_p, c_int64, c_int64, c_int64, c_int64, c_void_p, c_int64],
    "checkpoint_begin": [c_char_p, POINTER(Contents), c_int64, POINTER(c_void_p)],
    "checkpoint_write": [c_void_p, c_int64, c_int64, c_int64, c_void_p, c_int64],
    "checkpoint_commit": [c_void_p],
}
_OTHERS = {
    "version": (c_char_p, []),
    "abi_version": (c_int, []),
    "last_error": (c_char_p, []),
    "format_count": (c_int, []),
    "format_at": (c_void_p, [c_int]),
    "format_find": (c_void_p, [c_char_p]),
    "recipe_count": (c_int, []),
    "rule_count": (c_int, []),
    "engine_count": (c_int, []),
    "engine_destroy": (None, [c_void_p]),
    "engine_name": (c_char_p, [c_void_p]),
    "optimizer_destroy": (None, [c_void_p]),
    "sink_destroy": (None, [c_void_p]),
    "sink_found_inf": (c_void_p, [c_void_p]),
    "checkpoint_manifest": (POINTER(Contents), [c_void_p]),
    "checkpoint_close": (None, [c_void_p]),
    "checkpoint_abandon": (None, [c_void_p]),
}


def _find():
    named = os.environ.get("SCRUPLE_LIBRARY")
    if named:
        return named
    here = pathlib.Path(__file__).resolve().parent
    places = [here / "libscruple.so", here.parents[1] / "build" / "libscruple.so"]
    for place in places:
        if place.exists():
            return str(place)
    raise Error(
        f"libscruple.so was not found in {places[0].parent} or {places[1].parent}; install the package "
        "with 'pip install .', or run 'make build', or set SCRUPLE_LIBRARY to the file"
    )


def last_error():
    return library.last_error().decode()


def _checked(function):
    def call(*arguments):
        status = function(*arguments)
        if status:
            kind = UsageError if status in (INVALID, UNSUPPORTED) else Error
            if status == OUT_OF_MEMORY:
                raise MemoryError(last_error())
            raise kind(last_error())

    return call


class _Library:
    """Loaded when first asked for something, so that importing this module cannot fail."""

    def __init__(self):
        self._lock = threading.Lock()

    def __getattr__(self, name):  # only for what is not there yet
        if name.startswith("_"):
            raise AttributeError(name)
        with self._lock:
            if "path" not in self.__dict__:
                self._load()
        return self.__dict__[name]

    def _load(self):
        path = _find()
        try:
            c = ctypes.CDLL(path)
            found = c.scruple_abi_version()
        except (OSError, AttributeError) as problem:
            raise Error(f"{path} cannot be used as libscruple: {problem}") from None
        if found != ABI_VERSION:
            raise Error(
                f"{path} speaks version {found} of the ABI and this package version {ABI_VERSION}; "
                "install both from one source"
            )
        for name, types in _CALLS.items():
            function = getattr(c, "scruple_" + name)
            function.argtypes, function.restype = types, c_int
            setattr(self, name, _checked(function))
        for name, (result, types) in _OTHERS.items():
            function = getattr(c, "scruple_" + name)
            function.argtypes, function.restype = types, result
            setattr(self, name, function)
        self.path = path


library = _Library()


class Format:
    """One entry of the registry; `handle` is what the library knows it by."""

    def __init__(self, handle):
        info = FormatInfo()
        library.get_format_info(handle, byref(info))
        self.handle, self.name, self.doc = handle, info.name.decode(), info.doc.decode()
        self.roles, self.roundings = info.roles, info.roundings
        self.group, self.code_bits, self.aux_bits = info.group_size, info.code_bits, info.aux_bits
        self.has_scales, self.bits_per_value = bool(info.aux_is_scale), info.bits_per_value

    def rounds(self, rounding):
        return bool(self.roundings >> rounding & 1)

    def reads_as(self, rounding):
        """The first rounding whose codes mean the same: of a weight in two parts, which alone can round wide,
        truncate and stochastic have a meaning of their own; of all others what rounded them is forgotten."""
        return rounding if self.rounds(WIDE) and rounding in (TRUNCATE, STOCHASTIC) else NEAREST

    def bytes(self, size):
        codes, aux = c_int64(), c_int64()
        library.format_bytes(self.handle, size, byref(codes), byref(aux))
        return codes.value, aux.value

    def __repr__(self):
        return f"<format {self.name}: {self.doc}>"


_formats = {}


def format_named(name):
    if name not in _formats:
        handle = library.format_find(str(name).encode())
        if not handle:
            raise UsageError(last_error())
        _formats[name] = Format(handle)
    return _formats[name]


def format_at(handle):
    """The entry behind a handle that the library has filled in."""
    info = FormatInfo()
    library.get_format_info(handle, byref(info))
    return format_named(info.name.decode())


def formats():
    return [format_at(library.format_at(i)) for i in range(library.format_count())]


def _all(count, read, kind):
    for i in range(count):
        info = kind()
        read(i, byref(info))
        yield i, info


def recipes():
    """{name: RecipeInfo} in the library's order."""
    return {
        info.name.decode(): info for _, info in _all(library.recipe_count(), library.recipe_at, RecipeInfo)
    }


def rules():
    """{name: (doc, {slot: role}, {hyperparameter: default})} in the library's order."""
    found = {}
    for i, info in _all(library.rule_count(), library.rule_at, RuleInfo):
        slots, hypers = {}, {}
        for s in range(info.slots):
            slot = SlotInfo()
            library.rule_slot(i, s, byref(slot))
            slots[slot.name.decode()] = slot.role
        for h in range(info.hypers):
            hyper = HyperInfo()
            library.rule_hyper(i, h, byref(hyper))
            hypers[hyper.name.decode()] = bool(hyper.value) if hyper.flag else hyper.value
        found[info.name.decode()] = (info.doc.decode(), slots, hypers)
    return found


def engines():
    """{name: None, or why this machine cannot run it}."""
    return {
        info.name.decode(): None if info.available else info.reason.decode()
        for _, info in _all(library.engine_count(), library.engine_at, EngineInfo)
    }


class Engine:
    def __init__(self, name, threads=0):
        self.handle = c_void_p()
        library.engine_create(name.encode(), threads, byref(self.handle))
        self.name = library.engine_name(self.handle).decode()

    def __del__(self):
        if getattr(self, "handle", None):
            library.engine_destroy(self.handle)


class Rule:
    """A scruple_optimizer: an update rule with hyperparameters. Setting what is set already costs nothing."""

    def __init__(self, name):
        self.handle, self._set, self._seed, self._lr = c_void_p(), {}, None, None
        library.optimizer_create(name.encode(), byref(self.handle))

    def set(self, name, value):
        if self._set.get(name) != value:
            library.optimizer_set(self.handle, name.encode(), float(value))
            self._set[name] = value

    def seed(self, value):
        if self._seed != value:
            library.optimizer_set_seed(self.handle, value)
            self._seed = value

    def read_lr(self, address):
        if self._lr != address:
            library.optimizer_read_lr(self.handle, address)
            self._lr = address

    def __del__(self):
        if getattr(self, "handle", None):
            library.optimizer_destroy(self.handle)


# ---- Checkpoints ----


def _utf8(text, what, zeros=False):
    try:
        made = text.encode()
    except UnicodeEncodeError:
        raise UsageError(f"{what} {text!r} is not valid Unicode; no file can hold it") from None
    if b"\0" in made and not zeros:
        raise UsageError(f"{what} {text!r} has a zero in it, which no name may have")
    return made


def _path(path):
    path = os.fsencode(path)
    if b"\0" in path:
        raise UsageError(f"the path {os.fsdecode(path)!r} has a zero in it, which no name may have")
    return path


class Checkpoint:
    """An open checkpoint: folder, recipe, groups, loss_scale, notes and tensors, with names for keys. A plane is
    (number of the tensor, of the array, of the plane)."""

    def __init__(self, path):
        self.handle = c_void_p()
        library.checkpoint_open(_path(path), byref(self.handle))
        found = library.checkpoint_manifest(self.handle).contents
        self.folder, self.recipe = os.fsdecode(found.folder), found.recipe.decode()
        self.groups = [
            types.SimpleNamespace(
                optimizer=group.optimizer.decode(),
                seed=group.seed,
                hypers={x.name.decode(): x.value for x in group.hypers[: group.hyper_count]},
            )
            for group in found.groups[: found.group_count]
        ]
        scale = found.loss_scale.contents if found.loss_scale else None
        self.loss_scale = scale and {name: getattr(scale, name) for name, _ in Scale._fields_}
        self.notes = {
            note.name.decode(): ctypes.string_at(note.text, note.bytes).decode()
            for note in found.notes[: found.note_count]
        }
        self.tensors = {
            tensor.name.decode(): types.SimpleNamespace(
                number=t,
                name=tensor.name.decode(),
                shape=tuple(tensor.shape[: tensor.dimensions]),
                group=tensor.group,
                step=tensor.step,
                id=tensor.id,
                adagc_norm=tensor.adagc_norm,
                arrays=[self._array(array, (t, a)) for a, array in enumerate(tensor.arrays[: tensor.array_count])],
            )
            for t, tensor in enumerate(found.tensors[: found.tensor_count])
        }

    def _array(self, array, place):
        return types.SimpleNamespace(
            name=array.name.decode(),
            format=array.format.decode(),
            rounding=array.rounding.decode(),
            fits=bool(array.fits),  # the planes are those of the format
            planes=[(*place, p) for p in range(array.plane_count)],
            bytes=[plane.bytes for plane in array.planes[: array.plane_count]],
        )

    def verify(self):
        for tensor in self.tensors.values():
            library.checkpoint_verify(self.handle, tensor.number)

    def read(self, plane, address, size, first=0):
        library.checkpoint_read(self.handle, *plane, first, address, size)

    def close(self):
        library.checkpoint_close(self.handle)
        self.handle = c_void_p()

    __del__ = close


def _list(kind, items):
    """For a struct's two fields: the items, and how many."""
    items = [kind(*item) for item in items]
    return (kind * len(items))(*items), len(items)


def _arrays(arrays):
    made = (
        (_utf8(name, "array"), form.encode(), ROUNDING_NAMES[rounding].encode())
        for name, form, rounding in arrays
    )
    return _list(StoredArray, made)


def _tensor(name, shape, group, step, number, norm, arrays):
    shape = (c_int64 * len(shape))(*shape)
    return _utf8(name, "tensor"), shape, len(shape), group, step, number, norm, *_arrays(arrays)


@contextlib.contextmanager
def new_checkpoint(path, *, recipe, step, groups, loss_scale, notes, tensors):
    """A checkpoint that is there when the block ends well: completely, or not at all. The block is given
    write(number of the tensor, of the array, of the plane, address, bytes).

    groups      of (optimizer, seed, {hyperparameter: value})
    loss_scale  {field of Scale: value} or None
    tensors     of (name, shape, group, step, id, adagc_norm, [(array, format, rounding)])
    """
    groups = [
        (name.encode(), seed, *_list(Hyper, ((_utf8(x, "hyperparameter"), value) for x, value in hypers.items())))
        for name, seed, hypers in groups
    ]
    texts = {_utf8(name, "note"): _utf8(text, "note", zeros=True) for name, text in notes.items()}
    notes = [(name, ctypes.cast(text, c_void_p), len(text)) for name, text in texts.items()]
    contents = Contents(
        None,
        None,
        _utf8(recipe, "recipe"),
        step,
        *_list(Group, groups),
        ctypes.pointer(Scale(**loss_scale)) if loss_scale else None,
        *_list(Note, notes),
        *_list(StoredTensor, (_tensor(*tensor) for tensor in tensors)),
    )
    writer = c_void_p()
    library.checkpoint_begin(_path(path), byref(contents), 1, byref(writer))
    try:
        yield lambda *plane: library.checkpoint_write(writer, *plane)
        library.checkpoint_commit(writer)
    finally:
        library.checkpoint_abandon(writer)

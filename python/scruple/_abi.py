"""scruple.h through ctypes: the structs, the functions, and errors as exceptions. Nothing here knows torch.

The library is the one that SCRUPLE_LIBRARY names, or the one inside this package, or the one that `make
build` left in the source tree.
"""

import contextlib
import ctypes
import functools
import itertools
import os
import pathlib
import threading
import types
import weakref
from ctypes import CFUNCTYPE, POINTER, byref, c_char_p, c_double, c_int, c_int64, c_uint32, c_uint64, c_void_p

ABI_VERSION = 2
NEAREST, TRUNCATE, STOCHASTIC, DITHER, WIDE = range(5)
ROLE_WEIGHT, ROLE_NONNEG, ROLE_EXACT = 1, 4, 32
WEIGHT, GRADIENT = 0, 4
HOST_STATE = 1  # of Tensor.host
RELEASED, COMPRESSED = 1, 2
ACCUMULATE = {"gradients": 0, "momentum": 1, "adama": 2}


class Error(RuntimeError):
    """What the library says: what was asked, what was found, what to do."""


class UsageError(Error, ValueError):
    """An argument is wrong, or a combination does not exist."""


_KINDS = {1: UsageError, 2: UsageError, 3: MemoryError}  # invalid, unsupported, out of memory

ALLOC = CFUNCTYPE(c_void_p, c_void_p, c_int64)
FREE = CFUNCTYPE(None, c_void_p, c_void_p, c_int64)
REDUCE = CFUNCTYPE(c_int, c_void_p, c_void_p)
_types = {
    **{"status": c_int, "void": None, "char*": c_char_p, "void*": c_void_p, "bytes": ctypes.c_char},
    **{"float": ctypes.c_float, "double": c_double, "size_t": ctypes.c_size_t, "int": c_int},
    **{"int32": ctypes.c_int32, "int64": c_int64, "uint32": c_uint32, "uint64": c_uint64},
    **{"alloc": ALLOC, "free": FREE, "reduce": REDUCE, "object": ctypes.py_object},
}


def _type(name):
    """C's, by its name there: "int64", "Tensor*", "Array[5]"."""
    if name not in _types:
        of, many, count = name[:-1].partition("[")
        _types[name] = _type(of) * int(count) if many else POINTER(_type(of))
    return _types[name]


def _structs(text):
    """Structs of scruple.h, with their fields as they stand there."""
    for line in text.replace("\n  ", " ").strip().splitlines():
        kind, _, fields = line.partition(": ")
        made = []
        for declaration in fields.split(";"):
            of, _, names = declaration.strip().partition(" ")
            made += [(name, _type(of)) for name in names.split(", ")]
        _types[kind] = type(kind, (ctypes.Structure,), {"_fields_": made})
        yield _types[kind]


Array, Tensor, Bound, FormatInfo, RecipeInfo, RuleInfo, SlotInfo, HyperInfo, EngineInfo = _structs("""
Array: void* format, codes, aux; int32 rounding, owned
Tensor: void* optimizer; int64 size, step, offset, folds; uint32 id, host; Array[5] arrays
Bound: double relative, group, absolute
FormatInfo: char* name, doc; uint32 roles, roundings; int32 group_size, code_bits, aux_bits, aux_is_scale;
  double bits_per_value; Bound bound, bound_nonneg
RecipeInfo: char* name, doc, weight, moment, nonneg, gradient;
  int weight_rounding, moment_rounding, nonneg_rounding, gradient_rounding; int64 small
RuleInfo: char* name, doc; int32 slots, hypers
SlotInfo: char* name; int32 role, optional
HyperInfo: char* name, doc; double value; int32 flag
EngineInfo: char* name, doc; int32 available; char* reason
""")
StepOptions, MeasureOptions, Scaler, SinkOptions, Piece, SinkReport = _structs("""
StepOptions: size_t struct_size; float multiplier; void* found_inf, clip, loss_scale, steps; int32 part, parts
MeasureOptions: size_t struct_size; double max_norm;
  void* loss_scale, steps, norm, found_inf, clip, sum_before, sum; double adagc; void* gamma, skip
Scaler: float scale, growth, backoff; int32 interval, clean
SinkOptions: size_t struct_size; int policy, accumulation; int32 micro_batches;
  double max_norm, tensor_norm, adagc; void* scaler, adagc_norms, memory_context; alloc alloc; free free;
  void* loss_scale, reduce_context; reduce reduce; void* skip
Piece: int64 tensor, first, size; Array gradient
SinkReport: double norm; float found_inf, clip; int64 steps, skipped; Scaler scaler
""")
Plane, StoredArray, StoredTensor, Hyper, Group, Scale, Note, Contents = _structs("""
Plane: char* kind, dtype; int64* shape; int64 dimensions, bytes
StoredArray: char* name, format, rounding; int64 fits; Plane* planes; int64 plane_count
StoredTensor: char* name; int64* shape; int64 dimensions, group, step, id; double adagc_norm;
  StoredArray* arrays; int64 array_count
Hyper: char* name; double value
Group: char* optimizer; uint64 seed; Hyper* hypers; int64 hyper_count
Scale: double scale, growth, backoff; int64 interval, clean
Note: char* name; bytes* text; int64 bytes
Contents: char* folder, library, recipe; int64 step; Group* groups; int64 group_count; Scale loss_scale;
  Note* notes; int64 note_count; StoredTensor* tensors; int64 tensor_count
""")

# As in scruple.h: what they return, their names, what they take. A status becomes an exception.
_FUNCTIONS = """
status get_format_info: void* FormatInfo*
status format_bytes: void* int64 int64* int64*
status recipe_at: int RecipeInfo*
status rule_at: int RuleInfo*
status rule_slot: int int SlotInfo*
status rule_hyper: int int HyperInfo*
status engine_at: int EngineInfo*
status engine_create: char* int void**
status engine_set_stream, optimizer_read_lr: void* void*
status optimizer_create, checkpoint_open: char* void**
status optimizer_set: void* char* double
status optimizer_set_seed: void* uint64
status tensor_use: Tensor* char*
status tensor_array: Tensor* int char** int* int*
status tensor_set_format, tensor_set_rounding: Tensor* char* char*
status tensor_check: Tensor*
int tensor_on_host: Tensor* int int
status tensor_alloc: void* Tensor* uint32
void tensor_free: void* Tensor*
status tensor_reset: void* Tensor*
status tensor_view: Tensor* int64 int64 Tensor*
status encode, decode: void* Tensor* int void*
status decode_as: void* Tensor* int void* void*
status step: void* void* int64 StepOptions*
status measure: void* void* int64 MeasureOptions*
status advance: void* void* void* void*
status sink_create: void* void* int64 SinkOptions* void**
status sink_add: void* void* int64
status engine_synchronize, sink_end, checkpoint_commit: void*
status sink_read: void* SinkReport*
status sink_read_tensors: void* void* void*
status checkpoint_verify: void* int64
status checkpoint_read: void* int64 int64 int64 int64 void* int64
status checkpoint_begin: char* Contents* int64 void**
status checkpoint_write: void* int64 int64 int64 void* int64
char* version, last_error:
int abi_version, format_count, recipe_count, rule_count, engine_count:
void* format_at: int
void* format_find: char*
int format_reads_as: void* int
char* rounding_name: int
char* engine_name: void*
void* sink_found_inf: void*
Contents* checkpoint_manifest: void*
int64 borrow_gradients: void* int64 object void* void*
void engine_destroy, optimizer_destroy, sink_destroy, checkpoint_close, checkpoint_abandon: void*
"""


def few(names):
    names = list(names)
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def said(*pairs):
    """An error message from (sentence, names) pairs: those with names, which replace "{}"."""
    return "; ".join(sentence.format(few(names)) for sentence, names in pairs if names)


def _find():
    if named := os.environ.get("SCRUPLE_LIBRARY"):
        return named
    here = pathlib.Path(__file__).resolve().parent
    build = here.parents[1] / "build"
    for folder in (here, build):
        if (folder / "libscruple.so").exists():
            return str(folder / "libscruple.so")
    hint = "run 'pip install .' or 'make build', or set SCRUPLE_LIBRARY to the file"
    raise Error(f"libscruple.so was not found in {here} or {build}; {hint}")


def last_error():
    return library.last_error().decode(errors="replace")


def _check(status, function, arguments):
    if status:
        raise _KINDS.get(status, Error)(last_error())


class _Library:
    """Loaded when first asked for something, so that importing this module cannot fail."""

    _lock = threading.Lock()

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
            c, with_gil = ctypes.CDLL(path), ctypes.PyDLL(path)
            found = c.scruple_abi_version()
        except (OSError, AttributeError) as problem:
            raise Error(f"{path} cannot be used as libscruple: {problem}") from None
        if found != ABI_VERSION:
            raise Error(f"{path} has ABI {found}, and this package {ABI_VERSION}; install both together")
        for line in _FUNCTIONS.strip().splitlines():
            result, _, rest = line.partition(" ")
            names, _, taken = rest.partition(":")
            for name in names.split(", "):
                function = getattr(with_gil if name == "borrow_gradients" else c, "scruple_" + name)
                function.restype, function.argtypes = _type(result), list(map(_type, taken.split()))
                if result == "status":
                    function.errcheck = _check
                setattr(self, name, function)
        self.path = path


library = _Library()


@functools.cache
def rounding_names():
    """By number."""
    return tuple(x.decode() for x in itertools.takewhile(bool, map(library.rounding_name, itertools.count())))


def options(kind, **fields):
    """A struct that says how long it is."""
    return kind(struct_size=ctypes.sizeof(kind), **fields)


class Format:
    """One entry of the registry: the fields of FormatInfo, and the handle that the library knows it by."""

    def __init__(self, handle):
        info = FormatInfo()
        library.get_format_info(handle, byref(info))
        self.__dict__.update(vars(_unpacked(info)), handle=handle)

    def rounds(self, rounding):
        return bool(self.roundings >> rounding & 1)

    def reads_as(self, rounding):
        """The first rounding whose codes mean the same."""
        return library.format_reads_as(self.handle, rounding)

    def bytes(self, size):
        codes, aux = c_int64(), c_int64()
        library.format_bytes(self.handle, size, byref(codes), byref(aux))
        return codes.value, aux.value

    def __repr__(self):
        return f"<format {self.name}: {self.doc}>"


format_at = functools.cache(Format)


@functools.cache
def format_named(name):
    handle = library.format_find(str(name).encode())
    if not handle:
        raise UsageError(last_error())
    return format_at(handle)


def formats():
    return [format_at(library.format_at(i)) for i in range(library.format_count())]


def _all(count, read, kind):
    """{name: its entry} in the library's order."""
    found = [kind() for _ in range(count)]
    for i, info in enumerate(found):
        read(i, byref(info))
    return {info.name.decode(): _unpacked(info) for info in found}


@functools.cache
def recipes():
    """{name: its formats, roundings and doc} in the library's order."""
    return _all(library.recipe_count(), library.recipe_at, RecipeInfo)


@functools.cache
def rules():
    """{name: (doc, {slot: role}, {hyperparameter: default})} in the library's order."""
    found = {}
    for i, (name, info) in enumerate(_all(library.rule_count(), library.rule_at, RuleInfo).items()):
        slots = _all(info.slots, functools.partial(library.rule_slot, i), SlotInfo)
        hypers = _all(info.hypers, functools.partial(library.rule_hyper, i), HyperInfo)
        values = {name: bool(h.value) if h.flag else h.value for name, h in hypers.items()}
        found[name] = info.doc, {name: slot.role for name, slot in slots.items()}, values
    return found


def engines():
    """{name: None, or why this machine cannot run it}."""
    found = _all(library.engine_count(), library.engine_at, EngineInfo)
    return {name: None if info.available else info.reason for name, info in found.items()}


class Engine:
    def __init__(self, name, threads=0):
        self.handle, self.stream = c_void_p(), None  # torch's, that its calls are queued on
        library.engine_create(name.encode(), threads, byref(self.handle))
        weakref.finalize(self, library.engine_destroy, self.handle).atexit = False
        self.name = library.engine_name(self.handle).decode()


class Rule:
    """A scruple_optimizer: an update rule with hyperparameters."""

    def __init__(self, name):
        self.handle, self._told = c_void_p(), ({}, None, None)
        library.optimizer_create(name.encode(), byref(self.handle))
        weakref.finalize(self, library.optimizer_destroy, self.handle).atexit = False

    def tell(self, values, seed, lr_address):
        """Passes hyperparameters to the library, and lr's address if a device has it; at every step, so only news."""
        values = {name: float(value) for name, value in values.items()}  # tensors may be written in place
        if (values, seed, lr_address) == self._told:
            return
        told, self._told = self._told[0], ({}, None, None)  # if one is refused, all are passed again
        for name, value in values.items():
            if told.get(name) != value:
                library.optimizer_set(self.handle, name.encode(), value)
        library.optimizer_set_seed(self.handle, seed)
        library.optimizer_read_lr(self.handle, lr_address)
        self._told = values, seed, lr_address


# ---- Checkpoints ----


def _encoded(text, zeros=False):
    try:
        made = os.fsencode(text) if isinstance(text, os.PathLike) else text.encode()
    except UnicodeEncodeError:
        raise UsageError(f"{text!r} is not valid Unicode; no file can hold it") from None
    if b"\0" in made and not zeros:
        raise UsageError(f"{str(text)!r} has a zero in it, which no name may have")
    return made


def _packed(kind, values):
    """A struct of {field: value}; a list or a long text is for a pointer and the count behind it."""
    made, fields = kind(), iter(kind._fields_)
    for name, of in fields:
        value = values.get(name)
        if issubclass(of, ctypes._Pointer):
            if isinstance(value, str):
                value = _encoded(value, zeros=True)
                value = (of._type_ * len(value)).from_buffer_copy(value)
            else:
                value = [_packed(of._type_, x) if isinstance(x, dict) else x for x in value or ()]
                value = (of._type_ * len(value))(*value)
            setattr(made, next(fields)[0], len(value))
        elif isinstance(value, str):
            value = _encoded(value)
        elif isinstance(value, dict):
            value = _packed(of, value)
        if value is not None:
            setattr(made, name, value)
    return made


def _unpacked(value):
    """The same back, as objects with these fields."""
    if isinstance(value, bytes):
        return value.decode(errors="surrogateescape")  # a folder need not be UTF-8
    if not isinstance(value, ctypes.Structure):
        return value
    made, fields = types.SimpleNamespace(), iter(value._fields_)
    for name, of in fields:
        found = getattr(value, name)
        if issubclass(of, ctypes._Pointer):
            found = found[: getattr(value, next(fields)[0])]
        setattr(made, name, list(map(_unpacked, found)) if isinstance(found, list) else _unpacked(found))
    return made


@contextlib.contextmanager
def open_checkpoint(path):
    """A handle and what is in the checkpoint, while the block runs."""
    handle = c_void_p()
    library.checkpoint_open(_encoded(pathlib.Path(path)), byref(handle))
    try:
        yield handle, _unpacked(library.checkpoint_manifest(handle).contents)
    finally:
        library.checkpoint_close(handle)


@contextlib.contextmanager
def new_checkpoint(path, contents):
    """A writer of a checkpoint that is there when the block ends well: completely, or not at all."""
    writer, packed = c_void_p(), _packed(Contents, contents)
    library.checkpoint_begin(_encoded(pathlib.Path(path)), byref(packed), 1, byref(writer))
    try:
        yield writer
        library.checkpoint_commit(writer)
    finally:
        library.checkpoint_abandon(writer)

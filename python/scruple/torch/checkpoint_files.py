"""The files of a checkpoint: a folder that is written completely or not at all, and a reader that believes
nothing. docs/checkpoint.md is the specification. Of models and optimizers this knows nothing."""

import contextlib
import ctypes
import errno
import itertools
import json
import math
import os
import re
import shutil
import stat
import struct
import zlib

import torch

from .._abi import Error, UsageError, library

VERSION = 1
BLOCK = 128  # elements: where a plane may be cut into files
CHUNK = 1 << 24  # bytes that are copied at a time
MAX_ENTRIES = 1024  # of groups, hyperparameters and a trainer's own
_MAX_TEXT = 100_000_000  # of a manifest, and of a safetensors header
_MAX_FILES, _MAX_DIMENSIONS, _MAX_INTEGER = 256, 64, (1 << 63) - 1
_KINDS = ("codes", "scale", "extra")
SIZES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 1),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 2),
    **dict.fromkeys(("I32", "U32", "F32"), 4),
    **dict.fromkeys(("C64", "F64", "I64", "U64"), 8),
}


def plane_name(tensor, array, kind):
    return tensor + ("" if array == "weight" else "/" + array) + ("" if kind == "codes" else "/" + kind)


def bytes_of(plane):
    return math.prod(plane["shape"]) * SIZES[plane["dtype"]]


def flat_bytes(tensor):
    """A tensor's memory as bytes; it must be one run."""
    return tensor.detach().view(-1).view(torch.uint8)


def memory_of(tensor):
    """The same of a tensor in host memory, for what reads or writes buffers. It must outlive them."""
    return memoryview((ctypes.c_ubyte * tensor.numel()).from_address(tensor.data_ptr()))


# ---- Writing ----


def check_replaced(path):
    """What a save would remove must be a checkpoint and nothing else."""
    if ".partial-" in os.path.basename(path):
        raise UsageError(f"{path} has '.partial-' in its name, which readers ignore; choose another name")
    if not os.path.lexists(path):
        return
    if not os.path.isdir(path):
        raise UsageError(f"{path} is there and is not a folder; a checkpoint is one: choose another name")
    known = re.compile(r"manifest\.json|model(-\d{5}-of-\d{5})?\.safetensors")
    others = sorted(name for name in os.listdir(path) if not known.fullmatch(name))
    if others:
        raise UsageError(
            f"{path} is there and has {others[0]!r} in it, which a save would remove with the rest; choose "
            "another name, such as a folder inside it"
        )


def write_into(folder, manifest, sources):
    """The files, with the checksums that come out put into the manifest."""
    planes = {
        plane_name(tensor["name"], array["name"], plane["kind"]): plane
        for tensor in manifest["tensors"]
        for array in tensor["arrays"]
        for plane in array["planes"]
    }
    header, begins, end = _header(manifest, planes)
    with _new_file(os.path.join(folder, "model.safetensors")) as file:
        _write_all(file, header, 0)
        for tensor in manifest["tensors"]:
            with sources(tensor["name"]) as source:
                for array in tensor["arrays"]:
                    for plane in array["planes"]:
                        name = plane_name(tensor["name"], array["name"], plane["kind"])
                        crc = _write_plane(file, begins[name], source(array["name"], plane["kind"]), plane)
                        plane["pieces"] = [[0, 0, math.prod(tensor["shape"]), f"{crc:08x}"]]
    manifest["files"] = [
        {"name": "model.safetensors", "bytes": end, "header_crc32": f"{zlib.crc32(header):08x}"}
    ]
    text = _manifest_text(manifest)
    with _new_file(os.path.join(folder, "manifest.json")) as file:
        _write_all(file, text, 0)


def _json(value):
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except ValueError as problem:
        raise UsageError(f"a checkpoint holds finite numbers: {problem}") from None


def _encoded(text, what):
    try:
        made = text.encode()
    except UnicodeEncodeError:
        raise UsageError(f"{what}: a name or a note is not valid Unicode; no file can hold it") from None
    if len(made) > _MAX_TEXT:
        raise UsageError(f"{what} would take {len(made)} bytes, and the limit is {_MAX_TEXT}; shorten notes")
    return made


def _header(manifest, planes):
    """The first 8 + N bytes, where each tensor begins in the file, and where the last ends."""
    run = {key: manifest[key] for key in ("recipe", "step", "groups", "loss_scale", "trainer")}
    metadata = {
        "format": "pt",
        "scruple_checkpoint": str(VERSION),
        "library": library.version().decode(),
        "run": _json(run),
    }
    entries, begins, at = {"__metadata__": metadata}, {}, 0
    # The largest elements first: so each tensor begins at a multiple of its own.
    for name, plane in sorted(planes.items(), key=lambda item: -SIZES[item[1]["dtype"]]):
        end = at + bytes_of(plane)
        entries[name] = {"dtype": plane["dtype"], "shape": plane["shape"], "data_offsets": [at, end]}
        begins[name], at = at, end
    text = _encoded(_json(entries), "the header of model.safetensors")
    text += b" " * (-(8 + len(text)) % 64)
    header = struct.pack("<Q", len(text)) + text
    return header, {name: len(header) + begin for name, begin in begins.items()}, len(header) + at


def _write_plane(file, at, tensor, plane):
    flat, crc = flat_bytes(tensor.detach().contiguous()), 0
    if flat.numel() != bytes_of(plane):
        raise Error(f"a plane has {flat.numel()} bytes where {bytes_of(plane)} belong")
    for first in range(0, flat.numel(), CHUNK):
        part = flat[first : first + CHUNK].cpu()
        crc = zlib.crc32(memory_of(part), crc)
        _write_all(file, memory_of(part), at + first)
    return crc


def _manifest_text(manifest):
    tensors = ",\n".join(map(_json, manifest["tensors"]))
    fields = [f'"{key}":{_json(value)}' for key, value in manifest.items() if key != "tensors"]
    line = f'{{"scruple_checkpoint":{VERSION},"library":{_json(library.version().decode())},"crc32":"%s",\n'
    rest = _encoded(",\n".join(fields) + ',\n"tensors":[' + tensors + "]}\n", "the manifest")
    crc = zlib.crc32(rest, zlib.crc32((line % "00000000").encode()))
    return (line % f"{crc:08x}").encode() + rest


# ---- Files that are there completely or not at all ----

_count = itertools.count()


@contextlib.contextmanager
def _new_file(path):
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        yield file
        os.fsync(file)  # disks may report what they could not store only here
    finally:
        os.close(file)


def _write_all(file, data, at):
    data = memoryview(data)
    while data.nbytes:
        done = os.pwrite(file, data, at)
        data, at = data[done:], at + done


def _store_names(folder):
    """Makes the names in a folder last. Some file systems cannot; what they name is safe all the same."""
    try:
        opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except PermissionError:
        return
    try:
        os.fsync(opened)
    except OSError as problem:
        if problem.errno != errno.EINVAL:
            raise
    finally:
        os.close(opened)


@contextlib.contextmanager
def new_folder(path):
    """A folder beside `path` that takes its name in one step when the block ends well."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    while True:
        partial = f"{path}.partial-{os.getpid()}-{next(_count)}"
        try:
            os.mkdir(partial)
            break
        except FileExistsError:
            continue
    try:
        yield partial
        _store_names(partial)
        try:
            os.rename(partial, path)
            replaces = False
        except OSError as problem:
            if problem.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
            _exchange(partial, path)
            replaces = True
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    try:
        _store_names(os.path.dirname(path))
    except OSError as problem:
        kept = f"; the one before is in {partial}" if replaces else ""
        raise Error(f"wrote {path}, but its folder could not be stored: {problem}{kept}") from problem
    if replaces:  # what was there goes only when the new name is known to last
        shutil.rmtree(partial, ignore_errors=True)


def _exchange(a, b):
    """The names of two folders, in one step: at no moment is there none."""
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    number = errno.ENOSYS
    if call is not None:
        if call(here, os.fsencode(a), here, os.fsencode(b), ctypes.c_uint(exchange)) == 0:
            return
        number = ctypes.get_errno()
    raise OSError(
        number,
        f"{b} cannot be replaced in one step ({os.strerror(number)}): choose another name, or remove it",
    )


# ---- Reading files ----


def find(path):
    """The checkpoint that a user means by a folder: itself, or the last one of a run."""
    path = os.fspath(path)
    above, name = os.path.split(os.path.abspath(path))
    if ".partial-" in name:
        raise UsageError(f"{path} has the name of a save that did not end; it can be removed")
    if os.path.exists(os.path.join(path, "manifest.json")):
        return path
    folder, steps = os.path.join(path, "checkpoints"), []
    if os.path.isdir(folder):
        steps = [int(x[5:]) for x in os.listdir(folder) if re.fullmatch(r"step-\d{8,18}", x)]
    if steps:
        return os.path.join(folder, f"step-{max(steps):08d}")
    begun = [x for x in os.listdir(above) if x.startswith(name + ".partial-")] if os.path.isdir(above) else []
    raise UsageError(
        f"{path} is no checkpoint (it has no manifest.json), and no run that has a complete one"
        + (f"; {begun[0]} beside it is a save that did not end, and can be removed" if begun else "")
    )


class _Refuse:
    """Checks of values from a file; what is wrong is an Error that names the file."""

    def __init__(self, path):
        self.path = path

    def __call__(self, *words):
        raise Error(f"{self.path}: {''.join(map(str, words))}")

    def fields(self, value, what, *names):
        if type(value) is not dict or set(value) != set(names):
            found = ", ".join(map(repr, value)) if type(value) is dict else repr(value)[:40]
            self(what, " has ", found, " and must have the fields ", ", ".join(names))
        return [value[name] for name in names]

    def list(self, value, what, most=None):
        if type(value) is not list or most is not None and len(value) > most:
            self(what, " must be a list", "" if most is None else f" of at most {most}")
        return value

    def text(self, value, what):
        if type(value) is not str:
            self(what, " must be a string")
        return value

    def integer(self, value, what, most=_MAX_INTEGER):
        if type(value) is not int or not 0 <= value <= most:
            self(what, f" is {value!r:.40}; it must be a whole number from 0 to {most}")
        return value

    def number(self, value, what):
        try:
            if type(value) in (int, float) and math.isfinite(float(value)):
                return value
        except OverflowError:
            pass
        self(what, f" is {value!r:.40}; it must be a finite number")

    def crc(self, value, what):
        if type(value) is not str or not re.fullmatch("[0-9a-f]{8}", value):
            self(what, f" is {value!r:.40}; it must be eight digits of 0-9a-f")
        return value

    def shape(self, value, what):
        return [self.integer(n, what) for n in self.list(value, what, _MAX_DIMENSIONS)]

    def dtype(self, value, what):
        if value not in SIZES:
            self(what, f": dtype {value!r:.40} is not known")
        return value

    def parsed(self, text, what):
        def once(pairs):
            made = dict(pairs)
            if len(made) != len(pairs):
                raise ValueError("a key stands twice")
            return made

        def constant(name):
            raise ValueError(f"{name} is no JSON")

        try:
            return json.loads(text.decode(), object_pairs_hook=once, parse_constant=constant)
        except (ValueError, RecursionError) as problem:
            self(what, f" is no JSON that makes sense: {problem}")


def _read_all(file, view, at):
    while view.nbytes:
        done = os.preadv(file, [view], at)
        if done == 0:
            raise OSError(errno.EIO, "the file was shortened while it was read")
        view, at = view[done:], at + done


def _opened(path, keep):
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as problem:
        raise Error(f"cannot open {path}: {problem.strerror}; the checkpoint is not complete") from problem
    keep.callback(os.close, file)
    status = os.fstat(file)
    if not stat.S_ISREG(status.st_mode):
        raise Error(f"{path} is not a regular file; the checkpoint is damaged or something else")
    return file, status.st_size


def _read_bytes(file, size, at=0):
    made = bytearray(size)
    _read_all(file, memoryview(made), at)
    return made


class Checkpoint:
    """An open checkpoint: its manifest, checked by all rules of the specification, and its planes."""

    def __init__(self, folder, keep):
        self.folder, self.files = folder, []
        path = os.path.join(folder, "manifest.json")
        file, size = _opened(path, keep)
        refuse = _Refuse(path)
        if size > _MAX_TEXT:
            refuse("it has ", size, " bytes, where at most ", _MAX_TEXT, " make sense")
        self._read_manifest(_read_bytes(file, size), refuse)
        _check_manifest(self.manifest, refuse)
        for entry in self.manifest["files"]:
            self._open_file(entry, keep)
        self._check_pieces()

    def _read_manifest(self, text, refuse):
        first = re.match(rb'\{"scruple_checkpoint":(\d{1,18}),"library":"([^"\n]*)"', text)
        if not first or int(first[1]) == 0:
            refuse("its first line is not that of a Scruple checkpoint; it is damaged or something else")
        if int(first[1]) > VERSION:
            raise UsageError(
                f"{refuse.path} is of version {int(first[1])} of the checkpoint format, written by Scruple "
                f"{first[2].decode(errors='replace')}; this one reads versions up to {VERSION}: use that "
                "Scruple or a newer one"
            )
        rest = re.compile(rb',"crc32":"([0-9a-f]{8})",\n').match(text, first.end())
        if not rest:
            refuse("its first line is not that of a Scruple checkpoint; it is damaged or something else")
        text[rest.start(1) : rest.end(1)], said = b"00000000", rest[1].decode()
        crc = f"{zlib.crc32(text):08x}"
        if crc != said:
            refuse("its checksum is ", crc, " and should be ", said, "; the manifest is damaged")
        self.manifest = refuse.parsed(bytes(text), "the manifest")

    def _open_file(self, entry, keep):
        path = os.path.join(self.folder, entry["name"])
        refuse = _Refuse(path)
        file, size = _opened(path, keep)
        if size != entry["bytes"]:
            refuse(
                size, " bytes, and the manifest says ", entry["bytes"], "; damaged, or of another checkpoint"
            )
        length = struct.unpack("<Q", _read_bytes(file, 8))[0] if size >= 8 else 0
        if not 2 <= length <= min(size - 8, _MAX_TEXT):
            refuse("its first 8 bytes announce a header of ", length, " bytes; this is no safetensors file")
        header = _read_bytes(file, 8 + length)
        if f"{zlib.crc32(header):08x}" != entry["header_crc32"]:
            refuse("the checksum of its header is not the manifest's; damaged, or of another checkpoint")
        tensors = refuse.parsed(bytes(header[8:]), "the header")
        if type(tensors) is not dict:
            refuse("the header must be an object")
        tensors.pop("__metadata__", None)
        _check_header(tensors, size - 8 - length, refuse)
        self.files.append((file, path, 8 + length, tensors))

    def _check_pieces(self):
        """Every tensor of every file is one piece of the manifest, and every piece is there."""
        left = [set(tensors) for _, _, _, tensors in self.files]
        for tensor, name, plane in self.planes():
            size, whole = math.prod(tensor["shape"]), bytes_of(plane)
            for number, first, end, _ in plane["pieces"]:
                _, path, _, tensors = self.files[number]
                begin, stop = _range(plane, first, end, size, whole)
                shape = plane["shape"]
                if (first, end) != (0, size):
                    shape = [(stop - begin) // SIZES[plane["dtype"]]]
                found = tensors.get(name)
                if found is None or found["dtype"] != plane["dtype"] or found["shape"] != shape:
                    said = f"{found['dtype']} {found['shape']}" if found else "missing"
                    raise Error(
                        f"{path}: tensor {name!r} is {said}, and the manifest says {plane['dtype']} {shape}"
                    )
                left[number].discard(name)
        for (_, path, _, _), unknown in zip(self.files, left):
            if unknown:
                raise Error(f"{path} has a tensor {min(unknown)!r} that the manifest does not know")

    def planes(self):
        """(tensor, name of the plane, plane) of all."""
        for tensor in self.manifest["tensors"]:
            for array in tensor["arrays"]:
                for plane in array["planes"]:
                    yield tensor, plane_name(tensor["name"], array["name"], plane["kind"]), plane

    def chunks(self, name, plane):
        """(where it begins in the plane, bytes) of a plane, in one tensor that is used again; checksums are
        compared at each piece's end."""
        at = 0
        for number, _, _, crc in plane["pieces"]:
            file, path, start, tensors = self.files[number]
            begin, end = tensors[name]["data_offsets"]
            memory = torch.empty(min(CHUNK, end - begin), dtype=torch.uint8, device="cpu")
            found = 0
            while begin < end:
                part = memory[: min(CHUNK, end - begin)]
                _read_all(file, memory_of(part), start + begin)
                found = zlib.crc32(memory_of(part), found)
                yield at, part
                at, begin = at + part.numel(), begin + part.numel()
            if f"{found:08x}" != crc:
                raise Error(
                    f"{path}: tensor {name!r}: its checksum is {found:08x} and should be {crc}; its data is "
                    "damaged: take another checkpoint, or another copy of this one"
                )

    def verify(self):
        for _, name, plane in self.planes():
            for _ in self.chunks(name, plane):
                pass

    def read(self, name, plane, to):
        """A plane into a tensor of as many bytes that is one run of memory."""
        flat = flat_bytes(to)
        for at, part in self.chunks(name, plane):
            flat[at : at + part.numel()].copy_(part)

    def read_host(self, name, plane):
        made = torch.empty(bytes_of(plane), dtype=torch.uint8, device="cpu")
        self.read(name, plane, made)
        return made


def _range(plane, first, end, size, whole):
    """The bytes of a plane that elements first to end take."""
    before = lambda n: whole if n == size else n // BLOCK * plane["block_bytes"]  # noqa: E731
    return before(first) if first else 0, before(end)


def _check_header(tensors, size, refuse):
    """No holes, no overlaps, and each tensor as long as its shape says."""
    at, spans = 0, []
    for name, entry in tensors.items():
        what = f"tensor {name!r:.80}"
        dtype, shape, offsets = refuse.fields(entry, what, "dtype", "shape", "data_offsets")
        refuse.dtype(dtype, what)
        refuse.shape(shape, what)
        if len(refuse.list(offsets, what + ": data_offsets")) != 2:
            refuse(what, ": data_offsets must be [begin, end]")
        begin, end = (refuse.integer(x, what) for x in offsets)
        if end - begin != math.prod(shape) * SIZES[dtype]:
            refuse(what, ": ", dtype, " ", shape, " does not take ", end - begin, " bytes")
        spans.append((begin, end))
    for begin, end in sorted(spans):
        if begin != at:
            refuse("the data has a hole or an overlap at byte ", min(at, begin))
        at = end
    if at != size:
        refuse("its tensors take ", at, " bytes of data, and it has ", size)


def _check_manifest(manifest, refuse):
    """The rules of docs/checkpoint.md that need no other file."""
    names = ("scruple_checkpoint", "library", "crc32", "recipe", "step", "groups", "loss_scale", "trainer")
    _, _, _, recipe, step, groups, scale, trainer, files, tensors = refuse.fields(
        manifest, "the manifest", *names, "files", "tensors"
    )
    refuse.text(recipe, "recipe")
    refuse.integer(step, "step")
    for group in refuse.list(groups, "groups", MAX_ENTRIES):
        rule, seed, hypers = refuse.fields(group, "a group", "optimizer", "seed", "hyperparameters")
        refuse.text(rule, "optimizer")
        refuse.integer(seed, "seed", (1 << 64) - 1)
        if type(hypers) is not dict or len(hypers) > MAX_ENTRIES:
            refuse("hyperparameters must be an object of at most ", MAX_ENTRIES)
        for name, value in hypers.items():
            refuse.number(value, f"hyperparameter {name!r:.80}")
    if scale is not None:
        scale_, growth, backoff, interval, clean = refuse.fields(
            scale, "loss_scale", "scale", "growth", "backoff", "interval", "clean"
        )
        for value in (scale_, growth, backoff):
            refuse.number(value, "a number of loss_scale")
        for value in (interval, clean):
            refuse.integer(value, "a count of loss_scale")
    if type(trainer) is not dict or len(trainer) > MAX_ENTRIES:
        refuse("trainer must be an object of at most ", MAX_ENTRIES)
    for value in trainer.values():
        refuse.text(value, "a value of trainer")
    if not refuse.list(files, "files", _MAX_FILES):
        refuse("it names no file; there must be at least one")
    for i, file in enumerate(files):
        name, size, crc = refuse.fields(file, "a file", "name", "bytes", "header_crc32")
        wanted = "model.safetensors"
        if len(files) > 1:
            wanted = f"model-{i + 1:05d}-of-{len(files):05d}.safetensors"
        if name != wanted:  # no other: a name could lead out of the folder
            refuse(f"file {i} is called {name!r:.80} and must be called ", wanted)
        refuse.integer(size, "bytes")
        refuse.crc(crc, "header_crc32")
    for tensor in refuse.list(tensors, "tensors"):
        _check_tensor(tensor, len(groups), len(files), refuse)
    check_names(tensors, Error, refuse.path)


def _check_tensor(tensor, groups, files, refuse):
    name, shape, group, number, step, norm, arrays = refuse.fields(
        tensor, "a tensor", "name", "shape", "group", "id", "step", "adagc_norm", "arrays"
    )
    what = f"tensor {refuse.text(name, 'the name of a tensor')!r:.80}"
    refuse.shape(shape, what)
    if refuse.integer(group, what + ": group") >= groups:
        refuse(what, ": it is of group ", group, ", and there are ", groups)
    refuse.integer(number, what + ": id", (1 << 32) - 1)
    if refuse.integer(step, what + ": step") < 1:
        refuse(what, ": its next step is 0; the first is 1")
    if norm is not None:
        refuse.number(norm, what + ": adagc_norm")
    known = set(_KINDS)
    for i, array in enumerate(refuse.list(arrays, what + ": arrays")):
        label, form, rounding, planes = refuse.fields(array, what, "name", "format", "rounding", "planes")
        for text in (label, form, rounding):
            refuse.text(text, what)
        if label in known or label == "" or "/" in label or (label == "weight") != (i == 0):
            refuse(what, f": an array {label!r:.80}: the weight comes first, and names stand once")
        known.add(label)
        for plane in refuse.list(planes, what + ": planes", 2):
            refuse.fields(plane, what, "kind", "dtype", "shape", "block_bytes", "pieces")
        kinds = [plane["kind"] for plane in planes]
        if kinds not in (["codes"], ["codes", "scale"], ["codes", "extra"]):
            refuse(what, f": {label!r:.80} has planes {kinds}; codes come first, then a scale or extra bits")
        for plane in planes:
            _check_plane(plane, math.prod(shape), files, f"{what}, {label}, {plane['kind']}", refuse)
    if not arrays:
        refuse(what, ": its first array must be its weight")


def _check_plane(plane, size, files, what, refuse):
    dtype = refuse.dtype(plane["dtype"], what)
    refuse.shape(plane["shape"], what)
    block, whole = refuse.integer(plane["block_bytes"], what + ": block_bytes"), bytes_of(plane)
    if block < 1 or block % SIZES[dtype] or size > _MAX_INTEGER or whole > _MAX_INTEGER:
        refuse(what, ": 128 elements take ", block, " bytes, which is no whole number of ", dtype)
    full, odd = divmod(size, BLOCK)
    if not (full * block < whole <= (full + 1) * block if odd else whole == full * block):
        refuse(what, ": ", whole, " bytes do not fit ", size, " elements at ", block, " for each 128")
    covered, used = 0, set()
    for piece in refuse.list(plane["pieces"], what + ": pieces"):
        if len(refuse.list(piece, what + ": a piece")) != 4:
            refuse(what, ": a piece must be [file, first, end, crc32]")
        file, first, end, crc = piece
        if refuse.integer(file, what + ": file") >= files or file in used:
            refuse(what, ": a piece is in file ", file, ", which is not there or has another piece")
        used.add(file)
        refuse.crc(crc, what + ": crc32")
        refuse.integer(first, what + ": first")
        refuse.integer(end, what + ": end")
        if first != covered or end > size or end <= first and size > 0 or end != size and end % BLOCK:
            refuse(what, f": a piece [{first}, {end}) after {covered} of {size} elements is not possible")
        covered = end
    if not used or covered != size:
        refuse(what, ": its pieces end at element ", covered, " of ", size)


def check_names(tensors, kind, where):
    """No tensor has the name of another, or of another's plane."""
    names = set()
    for tensor in tensors:
        if tensor["name"] in names or tensor["name"] in ("", "__metadata__"):
            raise kind(f"{where}: a tensor is called {tensor['name']!r}; each needs a name of its own")
        names.add(tensor["name"])
    for tensor in tensors:
        for array in tensor["arrays"]:
            for plane in array["planes"]:
                name = plane_name(tensor["name"], array["name"], plane["kind"])
                if name != tensor["name"] and name in names:
                    raise kind(
                        f"{where}: a tensor is called {name!r}, which is the name of a plane of "
                        f"{tensor['name']!r}; give it another name"
                    )

"""Checkpoints as folders of safetensors files: what `scruple.save` and `scruple.load` do.

The library reads and writes the files (docs/checkpoint.md); this knows torch: what of a model and an
optimizer goes into them, and where it belongs when it comes back. Neither function holds more than one plane
beside the state itself, and of a plane on a GPU only a chunk.

What the optimizer does not hold (frozen parameters, statistics) is stored too: fp32, bf16 and fp16 as
tensors of a last group, whose rule has no moments and whose lr is 0; other dtypes as text in `trainer`.
"""

import base64
import ctypes
import functools
import itertools
import json
import math
import warnings
import zlib
from ctypes import byref

import torch
from torch.autograd.graph import increment_version

from .. import _abi
from .._abi import Error, UsageError, few, library, said
from .engines import engine_for
from .optimizer import Optimizer
from .planes import NAMES, is_ours, meaning, recode
from .shards import is_sharded
from .state import make_state, unchanged_on_error

CHUNK = 1 << 24  # bytes of a plane on a GPU that pass through the host's memory at a time
_MAX_OTHERS = 8_000_000  # of the text that holds what has no format: the files repeat it
_DRAWN = ("stochastic", "dither", "wide")  # with random numbers
_WRITER = "scruple.torch"
_NOTE = "note."
# Formats are the optimizer's own, and compared with the file's: `scruple checkpoint convert` changes those.
_FORMATS = ("recipe", "weights", "moments", "rounding")
_NOT_SAVED = ("params", "formats", "version")
# torch's names for the fields of loss_scale
_SCALER = dict(scale="scale", growth="growth_factor", backoff="backoff_factor")
_SCALER.update(interval="growth_interval", clean="_growth_tracker")


# ---- The model and the optimizer ----


def _check_arguments(opt, model, scaler):
    if not isinstance(opt, Optimizer):
        raise UsageError(
            f"the optimizer is a {type(opt).__name__}; save and load work with those of scruple.torch"
        )
    if not isinstance(model, torch.nn.Module):
        raise UsageError(f"the model is a {type(model).__name__}; it must be a torch.nn.Module")
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise UsageError(f"scaler is a {type(scaler).__name__}; it must be a torch.amp.GradScaler")


def _contents(opt, model):
    """{name: parameter} that the optimizer holds, and {name: tensor} of the rest of the model."""
    mine, held, rest = set(opt._own_params()), {}, {}
    for name, p in model.named_parameters():
        (held if p in mine else rest)[name] = p
    seen = set()
    for path, module in model.named_modules():
        if type(module).get_extra_state is not torch.nn.Module.get_extra_state:
            raise UsageError(
                f"module {path or 'model'!r} ({type(module).__name__}) keeps state of its own form "
                "(get_extra_state), which a checkpoint has no place for; keep such a model with torch.save, "
                "by model.state_dict() and opt.state_dict()"
            )
        for name, buffer in module._buffers.items():
            # Those that are not saved with the model are not saved here; a shared one is saved once.
            if buffer is None or name in module._non_persistent_buffers_set or id(buffer) in seen:
                continue
            seen.add(id(buffer))
            rest[f"{path}.{name}" if path else name] = buffer
    for name, tensor in itertools.chain(held.items(), rest.items()):
        if is_sharded(tensor):
            raise UsageError(
                f"{name} is a DTensor (FSDP2): no rank holds all of it; use torch.distributed.checkpoint "
                "with get_optimizer_state_dict and set_optimizer_state_dict"
            )
        if tensor.layout is not torch.strided:
            raise UsageError(f"{name} is sparse ({tensor.layout}); a checkpoint holds dense tensors")
    strangers = len(mine) - len(held)
    if strangers:
        raise UsageError(
            f"{strangers} of the optimizer's {len(mine)} parameters are not in the model; pass the model "
            "that the optimizer was made from"
        )
    return held, rest


# ---- Between the library's files and the memory of tensors ----


def _on_host(tensor):
    return tensor.device.type == "cpu"


def _new_chunk():
    """The one place in the host's memory that planes on a GPU pass through."""
    return torch.empty(CHUNK, dtype=torch.uint8, device="cpu", pin_memory=torch.cuda.is_available())


def _parts(tensor):
    """(first byte, bytes) of a tensor that is one run of memory, chunk by chunk."""
    flat = tensor.detach().view(-1).view(torch.uint8)
    return ((first, flat[first : first + CHUNK]) for first in range(0, flat.numel(), CHUNK))


def _write(writer, plane, tensor, chunk):
    """A tensor as a plane; `chunk` gives memory for what the host cannot read."""
    source = tensor.detach().contiguous()  # by a name: the library reads its memory
    if _on_host(source):
        library.checkpoint_write(writer, *plane, source.data_ptr(), source.nbytes)
        return
    for _, part in _parts(source):
        chunk()[: part.numel()].copy_(part)
        library.checkpoint_write(writer, *plane, chunk().data_ptr(), part.numel())


def _read(handle, plane, tensor, chunk):
    """A plane into a tensor of as many bytes."""
    to = tensor if tensor.is_contiguous() else torch.empty_like(tensor, memory_format=torch.contiguous_format)
    if _on_host(to):
        library.checkpoint_read(handle, *plane, 0, to.data_ptr(), to.nbytes)
        increment_version(to)
    else:
        for first, part in _parts(to):
            library.checkpoint_read(handle, *plane, first, chunk().data_ptr(), part.numel())
            part.copy_(chunk()[: part.numel()])
    if to is not tensor:
        tensor.copy_(to)


def _read_host(handle, place, array):
    """An array's planes as bytes in the host's memory, and None where it has one."""
    planes = [torch.empty(plane.bytes, dtype=torch.uint8, device="cpu") for plane in array.planes]
    for i, to in enumerate(planes):
        library.checkpoint_read(handle, *place, i, 0, to.data_ptr(), to.nbytes)
    return [*planes, None][:2]


# ---- Saving ----


@torch.no_grad()
def save(opt, model, path, *, scaler=None, notes=None):
    _check_arguments(opt, model, scaler)
    if opt._handle is not None and getattr(opt._handle._path, "batches", 0):
        raise UsageError(
            "save in the middle of a step: gradients of earlier micro-batches wait in the accumulators, and "
            "a checkpoint has none; save after the last micro-batch"
        )
    held, rest = _contents(opt, model)
    opt._settle()
    opt._update_rules()
    own = [key for key in opt.state if not isinstance(key, torch.Tensor)]
    own += [name for p in held.values() for name in opt.state.get(p, ()) if not is_ours(name)]
    if own:
        raise UsageError(
            f"opt.state has {few(map(repr, own))}, of your own, for which a checkpoint has no place; keep it "
            "beside the checkpoint (or as text in notes=), or save opt.state_dict() by torch.save"
        )
    notes = {} if notes is None else notes
    if not isinstance(notes, dict) or not all(isinstance(x, str) for pair in notes.items() for x in pair):
        raise UsageError("notes must be a dict of strings; json.dumps makes a string of most things")
    saved = [{key: x for key, x in group.items() if key not in _NOT_SAVED} for group in opt.param_groups]
    param_groups = [{key: _plain(x, key) for key, x in group.items()} for group in saved]
    entries = {
        "writer": _WRITER,
        "param_groups": json.dumps(param_groups),
        "others": _others_text({name: x for name, x in rest.items() if x.dtype not in NAMES}),
        **{_NOTE + name: text for name, text in notes.items()},
    }
    plain = {name: x for name, x in rest.items() if x.dtype in NAMES}
    groups = [_group_entry(opt._rule_of(x), x["seed"], opt._hypers(x), x["lr"]) for x in opt.param_groups]
    tensors = [_held_entry(opt, name, p) for name, p in held.items()]
    for number, (name, x) in enumerate(plain.items(), len(opt._number)):
        arrays = [dict(name="weight", format=NAMES[x.dtype], rounding="nearest")]
        tensors.append(dict(name=name, shape=x.shape, group=len(groups), id=number, step=1, arrays=arrays))
    scale = {} if scaler is None else scaler.state_dict()  # empty also of one that is not enabled
    contents = {
        "recipe": opt.param_groups[0]["recipe"],
        "step": max((tensor["step"] - 1 for tensor in tensors), default=0),
        "groups": groups + [_group_entry("sgd", 0, {}, 0)] * bool(plain),
        "loss_scale": {field: scale[name] for field, name in _SCALER.items() if scale},
        "notes": [{"name": name, "text": text} for name, text in entries.items()],
        "tensors": tensors,
    }
    chunk = functools.cache(_new_chunk)
    with _abi.new_checkpoint(path, contents) as writer:
        for t, p in enumerate(held.values()):
            with opt._tried(p) as entry:  # refuses planes that do not fit the parameter any more
                for place, tensor in entry.layout.stored(p, opt.state[p]):
                    _write(writer, (t, *place), tensor, chunk)
        for t, x in enumerate(plain.values(), len(held)):
            _write(writer, (t, 0, 0), x, chunk)


def _plain(value, key):
    """As JSON knows it; what it does not know is an object of one field that says what it is."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, torch.Tensor):
        kind = str(value.dtype).removeprefix("torch.")
        return {"tensor": [value.tolist(), kind, value.device.type]}
    if isinstance(value, (list, tuple)):
        made = [_plain(x, key) for x in value]
        return made if isinstance(value, list) else {"tuple": made}
    if isinstance(value, dict) and all(isinstance(x, str) for x in value):
        return {"dict": {name: _plain(x, key) for name, x in value.items()}}
    raise UsageError(
        f"{key} in a parameter group is a {type(value).__name__}, which a checkpoint has no form for; it can "
        "be a number, a string, a tensor, or lists and dicts of these"
    )


def _others_text(others):
    """Dtypes that no format has: integers (num_batches_tracked), booleans, doubles. Small ones only."""
    made = {}
    for name, x in others.items():
        host = x.detach().cpu().contiguous()  # by a name: its memory is read below
        data = base64.b64encode(zlib.compress(ctypes.string_at(host.data_ptr(), host.nbytes)))
        kind = str(x.dtype).removeprefix("torch.")
        made[name] = {"dtype": kind, "shape": list(x.shape), "data": data.decode()}
    text = json.dumps(made)
    if len(text) > _MAX_OTHERS:
        largest = max(made, key=lambda name: len(made[name]["data"]))
        raise UsageError(
            f"tensors that are neither fp32, bf16 nor fp16 take {len(text)} bytes of text, and the limit is "
            f"{_MAX_OTHERS}; the largest is {largest} ({made[largest]['dtype']}): cast it, or register the "
            "buffer with persistent=False"
        )
    return text


def _group_entry(rule, seed, hypers, lr):
    hypers = {**_abi.rules()[rule][2], **hypers, "lr": lr}
    hypers = [{"name": name, "value": float(value)} for name, value in hypers.items()]
    return {"optimizer": rule, "seed": int(seed) % (1 << 64), "hypers": hypers}


def _held_entry(opt, name, p):
    state, (number, group) = opt.state.get(p) or {}, opt._number[p]
    norm, arrays = state.get("adagc_norm", 0.0), opt._layout(p).described
    return {
        **dict(name=name, shape=p.shape, group=group, id=number, step=getattr(state, "steps", 0) + 1),
        "adagc_norm": norm if norm > 0 and math.isfinite(norm) else 0.0,
        "arrays": [dict(name=name, format=form, rounding=by) for name, form, by in arrays],
    }


# ---- Loading ----


@torch.no_grad()
def load(opt, model, path, *, scaler=None):
    _check_arguments(opt, model, scaler)
    if opt._handle is not None:
        raise UsageError(
            "loading while release_gradients is at work; handle.remove() first, load, and call it again"
        )
    held, rest = _contents(opt, model)
    with _abi.open_checkpoint(path) as (handle, contents):
        folder, ours = contents.folder, _Trainer(contents)
        for number, tensor in enumerate(contents.tensors):
            tensor.number = number
        stored = {tensor.name: tensor for tensor in contents.tensors}
        scale = contents.loss_scale
        if scaler is not None and scaler.is_enabled() and not scale.scale:
            raise UsageError(f"{folder} has no loss scale: it was saved without scaler=; load it without")
        if scaler is None and scale.scale:
            warnings.warn(f"{folder} has a loss scale; give scaler= to restore it", stacklevel=4)
        _check_present(held, rest, stored, ours, folder)
        others = {name: ours.other(name, x) for name, x in rest.items() if name not in stored}
        opt._settle()
        with unchanged_on_error(opt):
            _load_groups(opt, held, stored, contents.groups, ours, folder)
            opt._forget_tables()
            opt._update_rules()
            for tensor, array in ((tensor, array) for tensor in contents.tensors for array in tensor.arrays):
                if not array.fits:  # the library reads planes by what it knows by that name
                    raise UsageError(
                        f"{tensor.name}: {folder} has its {array.name} in {array.format!r} "
                        f"({array.rounding!r}), which this library has not, or has with other planes; use "
                        "the Scruple that wrote it"
                    )
            for name, p in held.items():
                _check_fits(opt, name, p, stored[name], contents)
                draws = any(array.rounding in _DRAWN for array in stored[name].arrays)
                # A run goes on with its own random numbers. One of another program cannot: its parameters
                # are in another order where groups part them, and its gradients are not torch's.
                if ours.groups is not None and draws and stored[name].id != opt._number[p][0]:
                    raise UsageError(
                        f"{name} is parameter {opt._number[p][0]} of the optimizer, and {stored[name].id} in "
                        f"{folder}: with stochastic rounding the random numbers follow it; make the "
                        "optimizer from the parameters in the same order"
                    )
            for tensor in contents.tensors:
                library.checkpoint_verify(handle, tensor.number)
            for p in held.values():
                make_state(opt, p)
        try:
            chunk = functools.cache(_new_chunk)
            for name, p in held.items():
                _read_held(handle, opt, p, stored[name], chunk)
            for name, x in rest.items():
                if name in stored:
                    _read_weight(handle, x, stored[name], chunk)
                else:
                    x.copy_(others[name])
        except Error as problem:  # every checksum was right a moment ago
            raise Error(
                f"{folder} changed or could not be read while it was loaded ({problem}); model and optimizer "
                "are part old, part new: load again before going on"
            ) from problem
        if scale.scale and scaler is not None:
            scaler.load_state_dict({name: getattr(scale, field) for field, name in _SCALER.items()})
        return ours.notes


class _Trainer:
    """What the writer has put into `trainer`: one of ours, or another program's."""

    def __init__(self, contents):
        entries = {note.name: note.text for note in contents.notes}
        self.folder, self.groups, self.others = contents.folder, None, {}
        self.notes = dict(entries)
        if entries.get("writer") != _WRITER:
            return
        self.notes = {k[len(_NOTE) :]: v for k, v in entries.items() if k.startswith(_NOTE)}
        try:
            self.groups = [dict(group) for group in json.loads(entries["param_groups"])]
            self.others = dict(json.loads(entries["others"]))
        except (KeyError, TypeError, ValueError, RecursionError) as problem:
            raise Error(f"{self.folder}: what {_WRITER} wrote cannot be read: {problem}") from None

    def holds(self, tensor):
        """Whether an optimizer stepped it."""
        return self.groups is None or tensor.group < len(self.groups)

    def group(self, number, now):
        """A group's values by torch's names. Formats are not among them: they must be the optimizer's."""
        try:
            saved = {key: _restored(value, now) for key, value in self.groups[number].items()}
        except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as problem:
            raise Error(f"{self.folder}: parameter group {number} cannot be read: {problem}") from None
        return {key: value for key, value in saved.items() if key not in (*_FORMATS, *_NOT_SAVED)}

    def other(self, name, x):
        """The saved values of a tensor that has no format."""
        entry = self.others[name]
        try:
            kind, shape, data = entry["dtype"], tuple(entry["shape"]), base64.b64decode(entry["data"])
            if kind == str(x.dtype).removeprefix("torch.") and shape == tuple(x.shape):
                size = x.numel() * x.element_size()
                data = zlib.decompressobj().decompress(data, size + 1)
                if len(data) != size:
                    raise ValueError(f"{len(data)} bytes where {size} belong")
                made = torch.empty(x.shape, dtype=x.dtype, device="cpu")
                ctypes.memmove(made.data_ptr(), data, size)
                return made
        except (KeyError, TypeError, ValueError, zlib.error) as problem:
            raise Error(f"{self.folder}: the text of {name!r} cannot be read: {problem}") from None
        raise UsageError(
            f"{name} is {x.dtype} of shape {tuple(x.shape)} in the model, and torch.{kind} of shape {shape} "
            f"in {self.folder}; load into the model that it was saved from"
        )


def _restored(value, now):
    """What _plain wrote; a tensor goes to the device of the group that it is for, or stays with the host."""
    if isinstance(value, list):
        return [_restored(x, now) for x in value]
    if not isinstance(value, dict):
        return value
    ((kind, inner),) = value.items()
    if kind == "tuple":
        return tuple(_restored(x, now) for x in inner)
    if kind == "dict":
        return {name: _restored(x, now) for name, x in inner.items()}
    values, dtype, device = inner
    device = "cpu" if device == "cpu" else now["params"][0].device
    return torch.tensor(values, dtype=getattr(torch, dtype), device=device)


def _check_present(held, rest, stored, trainer, folder):
    known = set(stored) | set(trainer.others)
    missing = [name for name in (*held, *rest) if name not in known]
    unknown = [name for name in (*stored, *trainer.others) if name not in held and name not in rest]
    if missing or unknown:
        found = said(("it lacks {}", missing), ("it has {}, which the model has not", unknown))
        raise UsageError(
            f"{folder} is not of this model: {found}. Names are those of model.named_parameters(); of a "
            "wrapped model pass the one inside (model.module, model._orig_mod), as when it was saved"
        )
    frozen = [name for name in rest if name in stored and trainer.holds(stored[name])]
    thawed = [name for name in held if name not in stored or not trainer.holds(stored[name])]
    if frozen or thawed:
        had, has = "{} had an optimizer's state and is in none now", "{} had none and is in the optimizer now"
        raise UsageError(
            f"{folder} was saved with another choice of parameters: {said((had, frozen), (has, thawed))}. "
            "Make the optimizer from the same parameters"
        )
    for name, x in (*held.items(), *rest.items()):
        if name in stored and stored[name].shape != list(x.shape):
            raise UsageError(
                f"{name} has shape {tuple(x.shape)} in the model and {tuple(stored[name].shape)} in "
                f"{folder}; load into the model that it was saved from"
            )
        if name in stored and x.dtype not in NAMES:
            raise UsageError(
                f"{name} is {x.dtype} in the model, and a number of 16 or 32 bits in {folder}; cast it back"
            )


def _load_groups(opt, held, stored, groups, trainer, folder):
    """Seeds, hyperparameters and what schedulers keep, as torch brings lr; formats stay."""
    names = {p: name for name, p in held.items()}
    for index, group in enumerate(opt.param_groups):
        firsts = {stored[names[p]].group: names[p] for p in reversed(group["params"])}
        if len(firsts) > 1:
            raise UsageError(
                f"parameter group {index} of the optimizer has parameters of {len(firsts)} groups of "
                f"{folder} (such as {few(firsts.values())}), whose hyperparameters may differ; make the "
                "optimizer with the same groups"
            )
        for number in firsts:
            source = groups[number]
            if source.optimizer != opt._rule_of(group):
                raise UsageError(
                    f"{folder} is of optimizer {source.optimizer!r}, and this is {opt._rule_of(group)!r}; load it "
                    "into one of the same kind"
                )
            saved = _from_hypers(group, source, folder)
            if trainer.groups is not None:
                saved.update(trainer.group(number, group))
            group.update(saved)
        try:
            opt._new_rule(group)  # the library looks at the values
        except (ArithmeticError, LookupError, TypeError, ValueError, ctypes.ArgumentError) as problem:
            raise Error(f"{folder}: a group has values that no optimizer takes: {problem}") from None


def _from_hypers(group, source, folder):
    """The library's names and numbers as this optimizer spells them."""
    hypers, made = {x.name: x.value for x in source.hypers}, {"seed": source.seed}
    if "betas" in group:
        made["betas"] = tuple(hypers.pop(name, was) for name, was in zip(("beta1", "beta2"), group["betas"]))
    for name, value in hypers.items():
        if name not in group:
            raise UsageError(f"{folder} has a hyperparameter {name!r}, which this optimizer has not")
        made[name] = bool(value) if isinstance(group[name], bool) else value
    return made


def _check_fits(opt, name, p, tensor, contents):
    """The arrays in the file are those that the optimizer keeps of this parameter, or are converted."""
    group, folder, layout = opt.param_groups[opt._number[p][1]], contents.folder, opt._layout(p)
    arrays = [(array.name, array.format, array.rounding) for array in tensor.arrays]
    formats = {array: form for array, form, _ in arrays}
    if p.dtype is torch.float32:  # it takes a weight of any format: all their values are fp32 numbers
        formats["weight"], arrays[0] = layout.formats["weight"], layout.described[0]
    stored = layout.as_saved(formats, group["recipe"])
    if stored is None or list(map(meaning, arrays)) != list(map(meaning, stored.described)):
        said = ", ".join(f"{a.name} in {a.format} ({a.rounding})" for a in tensor.arrays)
        asked = ", ".join(f"{array} in {form} ({by})" for array, form, by in layout.described)
        raise UsageError(
            f"{name}: {folder} has {said}, and the optimizer keeps {asked}; the checkpoint is of recipe "
            f"{contents.recipe!r} and the optimizer of {group['recipe']!r}: make the optimizer (and cast "
            "the model) as it was saved, or change the file with "
            f"'scruple checkpoint convert {folder} --recipe {group['recipe']} --out NEW'"
        )


def _read_held(handle, opt, p, tensor, chunk):
    state = opt._state.of(p)
    state.show(tensor.step - 1)
    state.pop("adagc_norm", None)
    if tensor.adagc_norm:
        state["adagc_norm"] = tensor.adagc_norm
    layout = opt._layout(p)
    for (a, plane), held in layout.stored(p, state):
        array, place = tensor.arrays[a], (tensor.number, a)
        if array.format == layout.arrays[a][2].name:
            _read(handle, (*place, plane), held, chunk)
        elif a == 0:
            _read_weight(handle, p, tensor, chunk)
        elif plane == 0:
            form, planes = _abi.format_named(array.format), _read_host(handle, place, array)
            recode(opt._entry(p).row, layout.arrays[a][0], form, *planes, p.device)


def _read_weight(handle, x, tensor, chunk):
    """The weight alone, of any format, into a tensor of any dtype that has its values."""
    array, place = tensor.arrays[0], (tensor.number, 0)
    if array.format == NAMES.get(x.dtype):
        _read(handle, (*place, 0), x, chunk)
        return
    codes, aux = _read_host(handle, place, array)
    rule, values = _abi.Rule("sgd"), torch.empty(x.shape, dtype=torch.float32, device="cpu")
    row = _abi.Tensor(optimizer=rule.handle, size=x.numel(), step=1)
    row.arrays[_abi.WEIGHT] = _abi.Array(
        _abi.format_named(array.format).handle,
        codes.data_ptr(),
        None if aux is None else aux.data_ptr(),
        _abi.rounding_names().index(array.rounding),  # a split is read by it
    )
    if x.numel():
        library.decode(engine_for(values.device), byref(row), _abi.WEIGHT, values.data_ptr())
    x.copy_(values)

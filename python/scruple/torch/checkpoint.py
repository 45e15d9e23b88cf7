"""Checkpoints as folders of safetensors files: what `scruple.save` and `scruple.load` do.

The library reads and writes the files (docs/checkpoint.md); this knows torch: what of a model and an
optimizer goes into them, and where it belongs when it comes back. Neither function holds more than one plane
beside the state itself, and of a plane on a GPU only a chunk.

What the optimizer does not hold (frozen parameters, statistics) is stored too: fp32, bf16 and fp16 as
tensors of a last group, whose rule has no moments and whose lr is 0; other dtypes as text in `trainer`.
"""

import base64
import ctypes
import json
import math
import warnings
import zlib

import torch
from torch.autograd.graph import increment_version

from .. import _abi
from .._abi import Error, UsageError, few, library, said
from .optimizer import Optimizer
from .planes import NAMES, decode, is_begun, is_ours, kind_of, meaning, recode
from .shards import is_sharded
from .state import make_state, unchanged_on_error

CHUNK = 1 << 24  # bytes of a plane that are written or read at a time, by way of the host's memory
_MAX_OTHERS = 8_000_000  # of the text that holds what has no format: the files repeat it
_DRAWN = ("stochastic", "dither", "wide")  # with random numbers
_WRITER = "scruple.torch"
_NOTE = "note."
# Formats are the optimizer's own, and compared with the file's: `scruple checkpoint convert` changes those.
_FORMATS = ("recipe", "weights", "moments", "rounding")
_NOT_SAVED = ("params", "formats", "version", "offload")
# torch's names for the fields of loss_scale
_SCALER = dict(scale="scale", growth="growth_factor", backoff="backoff_factor")
_SCALER.update(interval="growth_interval", clean="_growth_tracker")
# What reading a file's text raises where it is not what save wrote
_UNREADABLE = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
_UNREADABLE += (ctypes.ArgumentError, zlib.error)


def _contents(opt, model, scaler):
    """{name: parameter} that the optimizer holds, and {name: tensor} of the rest of the model."""
    if not isinstance(opt, Optimizer):
        raise UsageError(f"the optimizer is a {type(opt).__name__}; it must be one of those of scruple.torch")
    if not isinstance(model, torch.nn.Module):
        raise UsageError(f"the model is a {type(model).__name__}; it must be a torch.nn.Module")
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise UsageError(f"scaler is a {type(scaler).__name__}; it must be a torch.amp.GradScaler")
    mine, held, rest, buffers = set(opt._own_params()), {}, {}, {}
    for name, p in model.named_parameters():
        (held if p in mine else rest)[name] = p
    for path, module in model.named_modules():
        if type(module).get_extra_state is not torch.nn.Module.get_extra_state:
            what = f"{path or 'model'!r} ({type(module).__name__}) has get_extra_state, which cannot be saved"
            raise UsageError(f"{what}; use torch.save of model.state_dict() and opt.state_dict()")
        for name, buffer in module._buffers.items():
            # Those that are not saved with the model are not saved here; a shared one is saved once.
            if buffer is not None and name not in module._non_persistent_buffers_set:
                buffers.setdefault(buffer, f"{path}.{name}".lstrip("."))
    rest.update({name: buffer for buffer, name in buffers.items()})
    for name, tensor in (held | rest).items():
        if is_sharded(tensor):
            hint = "torch.distributed.checkpoint with get_optimizer_state_dict and set_optimizer_state_dict"
            raise UsageError(f"{name} is a DTensor (FSDP2): no rank holds all of it; use {hint}")
        if tensor.layout is not torch.strided:
            raise UsageError(f"{name} is sparse ({tensor.layout}); a checkpoint holds dense tensors")
    if len(held) < len(mine):
        count = f"{len(mine) - len(held)} of the optimizer's {len(mine)} parameters"
        raise UsageError(f"{count} are not in the model; pass the model that it was made from")
    return held, rest


# ---- Between the library's files and the memory of tensors ----


def _on_host(tensor):
    return tensor.device.type == "cpu"


def _parts(tensor):
    """(first byte, bytes, the same or room for them on the host) of a contiguous tensor, chunk by chunk."""
    flat, chunk = tensor.detach().view(-1).view(torch.uint8), None
    if not _on_host(tensor):
        chunk = torch.empty(CHUNK, dtype=torch.uint8, device="cpu", pin_memory=torch.cuda.is_available())
    for first in range(0, flat.numel(), CHUNK):
        part = flat[first : first + CHUNK]
        yield first, part, part if chunk is None else chunk[: part.numel()]


def _write(writer, plane, tensor):
    """A tensor as a plane."""
    for _, part, host in _parts(tensor.detach().contiguous()):
        if host is not part:
            host.copy_(part)
        library.checkpoint_write(writer, *plane, host.data_ptr(), host.numel())


def _read(handle, plane, tensor):
    """A plane into a tensor of as many bytes."""
    to = tensor.contiguous()
    for first, part, host in _parts(to):
        library.checkpoint_read(handle, *plane, first, host.data_ptr(), host.numel())
        if host is part:
            increment_version(to)
        else:
            part.copy_(host)
    if to is not tensor:
        tensor.copy_(to)


# ---- Saving ----


@torch.no_grad()
def save(opt, model, path, *, scaler=None, notes=None):
    held, rest = _contents(opt, model, scaler)
    if opt._handle is not None and opt._handle._path.batches:
        raise UsageError("save in the middle of a step loses gradients; save after its last micro-batch")
    opt._settle()
    opt._update_rules()
    own = [key for key in opt.state if not isinstance(key, torch.Tensor)]
    own += [name for p in held.values() for name in opt.state.get(p, ()) if not is_ours(name)]
    if own:
        what = f"opt.state has {few(map(repr, own))} of your own, for which files have no place"
        raise UsageError(f"{what}; keep it as text in notes=, or use torch.save of opt.state_dict()")
    notes = {} if notes is None else notes
    if not isinstance(notes, dict) or not all(isinstance(x, str) for pair in notes.items() for x in pair):
        raise UsageError("notes must be a dict of strings; json.dumps makes a string of most things")
    saved = [{key: x for key, x in group.items() if key not in _NOT_SAVED} for group in opt.param_groups]
    param_groups = [{key: _plain(x, key) for key, x in group.items()} for group in saved]
    plain = {name: x for name, x in rest.items() if x.dtype in NAMES}
    others = {name: x for name, x in rest.items() if x.dtype not in NAMES}
    entries = {"writer": _WRITER, "param_groups": json.dumps(param_groups), "others": _others_text(others)}
    entries.update({_NOTE + name: text for name, text in notes.items()})
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
    with _abi.new_checkpoint(path, contents) as writer:
        for t, p in enumerate(held.values()):
            with opt._tried(p) as entry:  # refuses planes that do not fit the parameter any more
                for place, tensor in entry.layout.stored(p, opt.state[p]):
                    _write(writer, (t, *place), tensor)
        for t, x in enumerate(plain.values(), len(held)):
            _write(writer, (t, 0, 0), x)


def _plain(value, key):
    """As JSON knows it; what it does not know is an object of one field that says what it is."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, torch.Tensor):
        return {"tensor": [value.tolist(), str(value.dtype).removeprefix("torch."), value.device.type]}
    if isinstance(value, (list, tuple)):
        made = [_plain(x, key) for x in value]
        return made if isinstance(value, list) else {"tuple": made}
    if isinstance(value, dict) and all(isinstance(x, str) for x in value):
        return {"dict": {name: _plain(x, key) for name, x in value.items()}}
    kind = type(value).__name__
    raise UsageError(f"{key} of a group is a {kind}; saved are numbers, strings, tensors, lists and dicts")


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
        size = f"{len(text)} bytes of text, above {_MAX_OTHERS}, hold {largest} ({made[largest]['dtype']})"
        raise UsageError(f"{size} and others without a format; cast it or register it with persistent=False")
    return text


def _group_entry(rule, seed, hypers, lr):
    hypers = {**_abi.rules()[rule][2], **hypers, "lr": lr}
    hypers = [{"name": name, "value": float(value)} for name, value in hypers.items()]
    return {"optimizer": rule, "seed": int(seed) % (1 << 64), "hypers": hypers}


def _held_entry(opt, name, p):
    state, (number, group) = opt.state.get(p) or {}, opt._number[p]
    made = dict(name=name, shape=p.shape, group=group, id=number, step=getattr(state, "steps", 0) + 1)
    norm, arrays = state.get("adagc_norm", 0.0), opt._layout(p).described
    made["adagc_norm"] = norm if 0 < norm < math.inf else 0.0
    made["arrays"] = [dict(name=name, format=form, rounding=by) for name, form, by in arrays]
    return made


# ---- Loading ----


@torch.no_grad()
def load(opt, model, path, *, scaler=None):
    held, rest = _contents(opt, model, scaler)
    if opt._handle is not None:
        opt._handle.before_load()
    with _abi.open_checkpoint(path) as (handle, contents):
        folder, scale, (groups, texts, notes) = contents.folder, contents.loss_scale, _trainer(contents)
        stored = {tensor.name: tensor for tensor in contents.tensors}
        for number, tensor in enumerate(contents.tensors):
            tensor.number = number
        if scaler is not None and scaler.is_enabled() and not scale.scale:
            raise UsageError(f"{folder} has no loss scale: it was saved without scaler=; load it without")
        if scaler is None and scale.scale:
            warnings.warn(f"{folder} has a loss scale; give scaler= to restore it", stacklevel=4)
        _check_present(held, rest, stored, texts, groups, folder)
        others = {name: _from_text(name, x, texts, folder) for name, x in rest.items() if name not in stored}
        opt._settle()
        with unchanged_on_error(opt):
            _load_groups(opt, held, stored, contents, groups)
            opt._forget_tables()
            opt._update_rules()
            for name, p in held.items():
                _check_fits(opt, name, p, stored[name], contents, groups is not None)
            for tensor in contents.tensors:
                library.checkpoint_verify(handle, tensor.number)
            opt._refuse_short([p for p in held.values() if not is_begun(opt.state.get(p))])
            for p in held.values():
                make_state(opt, p)
        try:
            for name, p in held.items():
                _read_held(handle, opt, p, stored[name])
            for name, x in rest.items():
                if name in others:
                    x.copy_(others[name])
                else:
                    _read_weight(handle, x, stored[name])
        except Error as problem:  # every checksum was right a moment ago
            found = f"{folder} changed or could not be read while it was loaded ({problem})"
            raise Error(f"{found}; model and optimizer are part old, part new: load again") from problem
        if scale.scale and scaler is not None:
            scaler.load_state_dict({name: getattr(scale, field) for field, name in _SCALER.items()})
        return notes


def _trainer(contents):
    """(groups, {name: tensor as text}, notes) that save put into `trainer`; others put notes alone."""
    entries = {note.name: note.text for note in contents.notes}
    if entries.get("writer") != _WRITER:
        return None, {}, entries
    notes = {name.removeprefix(_NOTE): text for name, text in entries.items() if name.startswith(_NOTE)}
    try:
        groups = [dict(group) for group in json.loads(entries["param_groups"])]
        return groups, dict(json.loads(entries["others"])), notes
    except _UNREADABLE as problem:
        raise Error(f"{contents.folder}: what {_WRITER} wrote cannot be read: {problem}") from None


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


def _other_model(name, x, kind, shape, folder):
    ours, theirs = f"{x.dtype} of shape {tuple(x.shape)}", f"{kind} of shape {tuple(shape)} in {folder}"
    return UsageError(f"{name} is {ours} in the model, and {theirs}; load into the model that was saved")


def _from_text(name, x, texts, folder):
    """The saved values of a tensor that has no format."""
    try:
        entry = texts[name]
        kind, shape = f"torch.{entry['dtype']}", tuple(entry["shape"])
        data = zlib.decompressobj().decompress(base64.b64decode(entry["data"]), x.nbytes + 1)
    except _UNREADABLE as problem:
        raise Error(f"{folder}: the text of {name!r} cannot be read: {problem}") from None
    if (kind, shape) != (str(x.dtype), tuple(x.shape)):
        raise _other_model(name, x, kind, shape, folder)
    if len(data) != x.nbytes:
        raise Error(f"{folder}: the text of {name!r} has {len(data)} bytes where {x.nbytes} belong")
    made = torch.empty(x.shape, dtype=x.dtype, device="cpu")
    ctypes.memmove(made.data_ptr(), data, len(data))
    return made


def _check_present(held, rest, stored, texts, groups, folder):
    model, saved = held | rest, stored | texts
    stepped = {name for name, x in stored.items() if groups is None or x.group < len(groups)}
    idle = saved.keys() - stepped
    found = said(
        ("it lacks {}", [name for name in model if name not in saved]),
        ("it has {}, which the model has not", [name for name in saved if name not in model]),
        ("{} had an optimizer's state and is in none now", [name for name in rest if name in stepped]),
        ("{} had none and is in the optimizer now", [name for name in held if name in idle]),
    )
    if found:
        hint = "of a wrapped model pass the one inside (model.module, model._orig_mod)"
        raise UsageError(f"{folder} does not fit: {found}. Make the optimizer of the same parameters; {hint}")
    for name, tensor in stored.items():
        x = model[name]
        if tensor.shape != list(x.shape) or x.dtype not in NAMES:
            raise _other_model(name, x, tensor.arrays[0].format, tensor.shape, folder)
        for array in tensor.arrays:
            if not array.fits:  # the library reads planes by what it knows by that name
                has = f"{array.name} in {array.format!r} ({array.rounding!r}), which this library lacks"
                raise UsageError(f"{name}: {folder} has {has}; use the Scruple that wrote it")


def _load_groups(opt, held, stored, contents, saved):
    """Seeds, hyperparameters and what schedulers keep, as torch brings lr; formats stay."""
    names, folder = {p: name for name, p in held.items()}, contents.folder
    for index, group in enumerate(opt.param_groups):
        firsts = {stored[names[p]].group: names[p] for p in reversed(group["params"]) if p in names}
        if len(firsts) > 1:
            found = f"parameters of {len(firsts)} groups of {folder} ({few(firsts.values())})"
            raise UsageError(f"group {index} has {found}; make the optimizer with the same groups")
        for number in firsts:
            rule, source = opt._rule_of(group), contents.groups[number]
            if source.optimizer != rule:
                kinds = f"is of optimizer {source.optimizer!r}, and this is {rule!r}"
                raise UsageError(f"{folder} {kinds}; load it into one of the same kind")
            group.update(_from_hypers(group, source, folder))
            try:
                values = {key: _restored(x, group) for key, x in (saved[number] if saved else {}).items()}
                group.update({key: x for key, x in values.items() if key not in (*_FORMATS, *_NOT_SAVED)})
                opt._new_rule(group)  # the library looks at the values
            except _UNREADABLE as problem:
                raise Error(f"{folder}: no optimizer takes the values of group {number}: {problem}") from None


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


def _check_fits(opt, name, p, tensor, contents, ours):
    """The arrays in the file are those that the optimizer keeps of this parameter, or are converted."""
    (number, index), layout, folder = opt._number[p], opt._layout(p), contents.folder
    recipe = opt.param_groups[index]["recipe"]
    found = [(array.name, array.format, array.rounding) for array in tensor.arrays]
    # fp32 takes a weight of any format: all their values are fp32 numbers.
    taken = [layout.described[0], *found[1:]] if kind_of(p) == "fp32" else found
    stored = layout.as_saved({array: form for array, form, _ in taken}, recipe)
    if stored is None or list(map(meaning, taken)) != list(map(meaning, stored.described)):
        has = ", ".join(f"{array} in {form} ({by})" for array, form, by in found)
        keeps = ", ".join(f"{array} in {form} ({by})" for array, form, by in layout.described)
        found = f"{name}: {folder} (recipe {contents.recipe!r}) has {has}, and the optimizer ({recipe!r}) keeps {keeps}"
        convert = f"change the file with 'scruple checkpoint convert {folder} --recipe {recipe} --out NEW'"
        raise UsageError(f"{found}; make the optimizer (and cast the model) as it was saved, or {convert}")
    # Random numbers follow a parameter's number, so a run of scruple.save needs the same order to go on to the bit.
    # A checkpoint of `scruple train` may have another order: its gradients differ from torch's anyway.
    if ours and tensor.id != number and any(rounding in _DRAWN for *_, rounding in found):
        numbers = f"{number} of the optimizer and {tensor.id} in {folder}, which random numbers follow"
        raise UsageError(f"{name} is parameter {numbers}; give the optimizer parameters in the same order")


def _read_held(handle, opt, p, tensor):
    state, layout = opt._state.of(p), opt._layout(p)
    state.show(tensor.step - 1)
    state.pop("adagc_norm", None)
    if tensor.adagc_norm:
        state["adagc_norm"] = tensor.adagc_norm
    for (a, plane), held in layout.stored(p, state):
        index, _, form = layout.arrays[a]
        if tensor.arrays[a].format == form.name:
            _read(handle, (tensor.number, a, plane), held)
        elif a == 0:
            _read_weight(handle, p, tensor)
        elif plane == 0:
            form, planes = _read_array(handle, tensor, a)
            codes, scales = [*planes, None][:2]
            recode(opt._entry(p).row, index, form, codes, scales, p.device)


def _read_array(handle, tensor, a):
    """An array's format, and its planes as bytes in the host's memory."""
    array = tensor.arrays[a]
    planes = [torch.empty(plane.bytes, dtype=torch.uint8, device="cpu") for plane in array.planes]
    for i, plane in enumerate(planes):
        _read(handle, (tensor.number, a, i), plane)
    return _abi.format_named(array.format), planes


def _read_weight(handle, x, tensor):
    """The weight alone, of any format, into a tensor of any dtype that has its values."""
    if tensor.arrays[0].format == NAMES[x.dtype]:
        _read(handle, (tensor.number, 0, 0), x)
        return
    form, planes = _read_array(handle, tensor, 0)
    rounding = _abi.rounding_names().index(tensor.arrays[0].rounding)  # a split is read by it
    rule = _abi.Rule("sgd")
    row = _abi.Tensor(optimizer=rule.handle, size=x.numel(), step=1)
    row.arrays[_abi.WEIGHT] = _abi.Array(form.handle, *(x.data_ptr() for x in planes), rounding=rounding)
    x.copy_(decode(row, _abi.WEIGHT, x.shape, torch.device("cpu")))

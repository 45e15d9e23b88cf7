"""Checkpoints as folders of safetensors files: what `scruple.save` and `scruple.load` do.

docs/checkpoint.md is the specification; `scruple checkpoint` reads the same files. Neither function holds
more than one plane beside the state itself, and of a plane on a GPU only a chunk.

What the optimizer does not hold (frozen parameters, statistics) is stored too: fp32, bf16 and fp16 as
tensors of a last group, whose rule has no moments and whose lr is 0; other dtypes as text in `trainer`.
"""

import base64
import contextlib
import ctypes
import functools
import itertools
import json
import math
import os
import warnings
import zlib
from ctypes import byref

import torch

from .. import _abi
from .._abi import Error, UsageError, library
from .checkpoint_files import (
    BLOCK,
    MAX_ENTRIES,
    SIZES,
    Checkpoint,
    check_names,
    check_replaced,
    find,
    flat_bytes,
    memory_of,
    new_folder,
    plane_name,
    write_into,
)
from .engines import engine_for
from .optimizer import Optimizer
from .planes import NAMES, recode
from .shards import is_sharded
from .state import make_state, unchanged_on_error

_MAX_OTHERS = 8_000_000  # of the text that holds what has no format: the manifest repeats it in the header
_ROUNDINGS = _abi.ROUNDING_NAMES
_DRAWN = ("stochastic", "dither", "wide")  # with random numbers
# Codes that are plain numbers; all others are bytes.
_VISIBLE = {"fp32": "F32", "bf16": "BF16", "fp16": "F16"}
_WRITER = "scruple.torch"
_NOTE = "note."
# Formats are the optimizer's own, and compared with the file's: `scruple checkpoint convert` changes those.
_FORMATS = ("recipe", "weights", "moments", "rounding")
_NOT_SAVED = ("params", "formats", "version")
_SCALER = {  # torch's names for the fields of loss_scale
    "scale": "scale",
    "growth": "growth_factor",
    "backoff": "backoff_factor",
    "interval": "growth_interval",
    "clean": "_growth_tracker",
}


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
    mine, held, rest = set(opt._all_params()), {}, {}
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


def _check_between_steps(opt):
    if opt._handle is not None and getattr(opt._handle._path, "batches", 0):
        raise UsageError(
            "save in the middle of a step: gradients of earlier micro-batches wait in the accumulators, and "
            "a checkpoint has none; save after the last micro-batch"
        )


def _planes_of(form, rounding, name, shape):
    """An array as the manifest describes it, without its pieces."""
    size, planes = math.prod(shape), []
    parts = [("codes", _VISIBLE.get(form.name.partition("+")[0], "U8"))]
    if form.aux_bits:
        wide = "F32" if form.aux_bits == 32 else "F16" if form.has_scales and form.aux_bits == 16 else "U8"
        parts.append(("scale" if form.has_scales else "extra", wide))
    for (kind, dtype), whole, block in zip(parts, form.bytes(size), form.bytes(BLOCK)):
        count = whole // SIZES[dtype]
        planes.append(
            {
                "kind": kind,
                "dtype": dtype,
                "shape": list(shape) if dtype != "U8" and count == size else [count],
                "block_bytes": block,
            }
        )
    return {"name": name, "format": form.name, "rounding": _ROUNDINGS[rounding], "planes": planes}


def _arrays_of(layout, shape):
    return [_planes_of(form, layout.row.arrays[a].rounding, name, shape) for a, name, form in layout.arrays]


def _plain_array(dtype, shape):
    """Of a tensor that no optimizer holds."""
    return _planes_of(_abi.format_named(NAMES[dtype]), _abi.NEAREST, "weight", shape)


def _state_name(state, array, kind):
    """Where a state has a plane; None: it is the parameter itself."""
    if kind == "codes":
        return None if array == "weight" else array if array in state else array + "/codes"
    return "extra" if array == "weight" else array + "/scale"


# ---- Saving ----


@torch.no_grad()
def save(opt, model, path, *, scaler=None, notes=None):
    _check_arguments(opt, model, scaler)
    _check_between_steps(opt)
    held, rest = _contents(opt, model)
    opt._settle()
    opt._update_rules()
    trainer = {
        "writer": _WRITER,
        "param_groups": json.dumps([_plain_group(group) for group in opt.param_groups]),
        "others": _others_text({name: x for name, x in rest.items() if x.dtype not in NAMES}),
        **_checked_notes(notes),
    }
    plain = {name: x for name, x in rest.items() if x.dtype in NAMES}
    tensors = [_held_entry(opt, name, p) for name, p in held.items()]
    tensors += [
        _rest_entry(name, x, len(opt.param_groups), len(opt._number) + i)
        for i, (name, x) in enumerate(plain.items())
    ]
    manifest = {
        "recipe": opt.param_groups[0]["recipe"],
        "step": max((tensor["step"] - 1 for tensor in tensors), default=0),
        "groups": [_group_entry(opt, group) for group in opt.param_groups] + [_rest_group()] * bool(plain),
        "loss_scale": _loss_scale(scaler),
        "trainer": trainer,
        "files": [{"name": "model.safetensors", "bytes": 0, "header_crc32": "00000000"}],
        "tensors": tensors,
    }
    if len(manifest["groups"]) > MAX_ENTRIES or len(trainer) > MAX_ENTRIES:
        raise UsageError(
            f"{len(manifest['groups'])} groups and {len(trainer)} notes; a checkpoint has at most "
            f"{MAX_ENTRIES} of each"
        )
    check_names(tensors, UsageError, "the model")
    path = os.path.realpath(os.fspath(path))
    check_replaced(path)
    try:
        with new_folder(path) as folder:
            write_into(folder, manifest, lambda name: _sources(opt, held.get(name), rest.get(name)))
    except OSError as problem:
        raise Error(
            f"the checkpoint {path} was not saved, and what was there is as it was: {problem}"
        ) from problem


def _checked_notes(notes):
    notes = {} if notes is None else notes
    if not isinstance(notes, dict) or not all(isinstance(x, str) for pair in notes.items() for x in pair):
        raise UsageError("notes must be a dict of strings; json.dumps makes a string of most things")
    return {_NOTE + name: text for name, text in notes.items()}


def _plain_group(group):
    """What a group has beside its parameters; the formats are in the tensors."""
    return {key: _plain(value, key) for key, value in group.items() if key not in _NOT_SAVED}


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
        host = flat_bytes(x.detach().cpu().contiguous())  # kept alive while its memory is read
        data = zlib.compress(bytes(memory_of(host)))
        made[name] = {
            "dtype": str(x.dtype).removeprefix("torch."),
            "shape": list(x.shape),
            "data": base64.b64encode(data).decode(),
        }
    text = json.dumps(made)
    if len(text) > _MAX_OTHERS:
        largest = max(made, key=lambda name: len(made[name]["data"]))
        raise UsageError(
            f"tensors that are neither fp32, bf16 nor fp16 take {len(text)} bytes of text, and the limit is "
            f"{_MAX_OTHERS}; the largest is {largest} ({made[largest]['dtype']}): cast it, or register the "
            "buffer with persistent=False"
        )
    return text


def _group_entry(opt, group):
    hypers = {**_abi.rules()[opt.rule][2], **opt._hypers(group), "lr": group["lr"]}
    hypers = {name: _number(float(value), name) for name, value in hypers.items()}
    return {"optimizer": opt.rule, "seed": int(group["seed"]) % (1 << 64), "hyperparameters": hypers}


def _rest_group():
    hypers = {name: _number(float(value), name) for name, value in _abi.rules()["sgd"][2].items()}
    return {"optimizer": "sgd", "seed": 0, "hyperparameters": {**hypers, "lr": 0}}


def _number(value, what):
    if not math.isfinite(value):
        raise UsageError(f"{what} is {value}; a checkpoint holds finite numbers")
    return int(value) if value.is_integer() and abs(value) < 1e15 else value  # 1 rather than 1.0


def _loss_scale(scaler):
    found = {} if scaler is None else scaler.state_dict()
    if not found:  # none, or one that is not enabled
        return None
    return {
        field: int(found[name]) if field in ("interval", "clean") else _number(float(found[name]), field)
        for field, name in _SCALER.items()
    }


def _held_entry(opt, name, p):
    state, (number, index) = opt.state.get(p) or {}, opt._number[p]
    norm = state.get("adagc_norm", 0.0)
    return {
        "name": name,
        "shape": list(p.shape),
        "group": index,
        "id": number,
        "step": state.get("step", 0) + 1,
        "adagc_norm": norm if norm > 0 and math.isfinite(norm) else None,
        "arrays": _arrays_of(opt._layout(p), p.shape),
    }


def _rest_entry(name, x, group, number):
    return {
        "name": name,
        "shape": list(x.shape),
        "group": group,
        "id": number,
        "step": 1,
        "adagc_norm": None,
        "arrays": [_plain_array(x.dtype, x.shape)],
    }


@contextlib.contextmanager
def _sources(opt, p, other):
    """A function from an array's name and a kind to the tensor that has this plane."""
    if p is None:
        yield lambda array, kind: other
        return
    fresh = not opt.state.get(p)
    if fresh or p not in opt._entries:
        opt._entry(p)  # refuses planes that do not fit the parameter any more
    try:
        state = opt.state[p]
        yield lambda array, kind: state.get(_state_name(state, array, kind), p)
    finally:
        if fresh:
            # One that was never stepped gets its first values for the file alone: to keep them would fix its
            # master copy now, and weights may yet be loaded into it.
            del opt.state[p]
            opt._entries.pop(p, None)


# ---- Loading ----


@torch.no_grad()
def load(opt, model, path, *, scaler=None):
    _check_arguments(opt, model, scaler)
    if opt._handle is not None:
        raise UsageError(
            "loading while release_gradients is at work; handle.remove() first, load, and call it again"
        )
    held, rest = _contents(opt, model)
    folder = find(path)
    with contextlib.ExitStack() as keep:
        checkpoint = Checkpoint(folder, keep)
        manifest, ours = checkpoint.manifest, _Trainer(checkpoint)
        _check_scaler(manifest["loss_scale"], scaler, folder)
        stored = {tensor["name"]: tensor for tensor in manifest["tensors"]}
        _check_present(held, rest, stored, ours, folder)
        others = {name: ours.other(name, x) for name, x in rest.items() if name not in stored}
        opt._settle()
        with unchanged_on_error(opt):
            _load_groups(opt, held, stored, manifest["groups"], ours, folder)
            opt._forget_tables()
            opt._update_rules()
            for name, p in held.items():
                _check_fits(opt, name, p, stored[name], manifest, folder)
                if ours.groups is not None:
                    _check_order(opt, name, p, stored[name], folder)
            for name in rest:
                if name in stored:
                    _check_weight(stored[name], folder)
            checkpoint.verify()
            for p in held.values():
                make_state(opt, p)
        try:
            for name, p in held.items():
                _read_held(checkpoint, opt, p, stored[name])
            for name, x in rest.items():
                if name in stored:
                    _read_weight(checkpoint, x, stored[name])
                else:
                    x.copy_(others[name])
        except (OSError, Error) as problem:  # every checksum was right a moment ago
            raise Error(
                f"{folder} changed or could not be read while it was loaded ({problem}); model and optimizer "
                "are part old, part new: load again before going on"
            ) from problem
        _load_scaler(manifest["loss_scale"], scaler)
        return ours.notes


class _Trainer:
    """What the writer has put into `trainer`: one of ours, or another program's."""

    def __init__(self, checkpoint):
        entries = checkpoint.manifest["trainer"]
        self.folder, self.groups, self.others = checkpoint.folder, None, {}
        self.notes = dict(entries)
        if entries.get("writer") != _WRITER:
            return
        self.notes = {k[len(_NOTE) :]: v for k, v in entries.items() if k.startswith(_NOTE)}
        try:
            self.groups = [dict(group) for group in json.loads(entries["param_groups"])]
            self.others = dict(json.loads(entries["others"]))
        except (KeyError, TypeError, ValueError, RecursionError) as problem:
            raise Error(
                f"{self.folder}: what {_WRITER} wrote into trainer cannot be read: {problem}"
            ) from None

    def holds(self, tensor):
        """Whether an optimizer stepped it."""
        return self.groups is None or tensor["group"] < len(self.groups)

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


def _few(names):
    names = list(names)
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _check_present(held, rest, stored, trainer, folder):
    known = set(stored) | set(trainer.others)
    missing = [name for name in (*held, *rest) if name not in known]
    unknown = [name for name in (*stored, *trainer.others) if name not in held and name not in rest]
    if missing or unknown:
        raise UsageError(
            f"{folder} is not of this model: "
            + "; ".join(
                [f"it lacks {_few(missing)}"] * bool(missing)
                + [f"it has {_few(unknown)}, which the model has not"] * bool(unknown)
            )
            + ". Names are those of model.named_parameters(); of a wrapped model pass the one inside "
            "(model.module, model._orig_mod), as when it was saved"
        )
    frozen = [name for name in rest if name in stored and trainer.holds(stored[name])]
    thawed = [name for name in held if name not in stored or not trainer.holds(stored[name])]
    if frozen or thawed:
        raise UsageError(
            f"{folder} was saved with another choice of parameters: "
            + "; ".join(
                [f"{_few(frozen)} had an optimizer's state and is in none now"] * bool(frozen)
                + [f"{_few(thawed)} had none and is in the optimizer now"] * bool(thawed)
            )
            + ". Make the optimizer from the same parameters"
        )
    for name, x in (*held.items(), *rest.items()):
        if name in stored and stored[name]["shape"] != list(x.shape):
            raise UsageError(
                f"{name} has shape {tuple(x.shape)} in the model and {tuple(stored[name]['shape'])} in "
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
        firsts = {stored[names[p]]["group"]: names[p] for p in reversed(group["params"])}
        if len(firsts) > 1:
            raise UsageError(
                f"parameter group {index} of the optimizer has parameters of {len(firsts)} groups of "
                f"{folder} (such as {_few(firsts.values())}), whose hyperparameters may differ; make the "
                "optimizer with the same groups"
            )
        for number in firsts:
            if groups[number]["optimizer"] != opt.rule:
                raise UsageError(
                    f"{folder} is of optimizer {groups[number]['optimizer']!r}, and this is {opt.rule!r}; "
                    "load it into one of the same kind"
                )
            saved = _from_hypers(group, groups[number], folder)
            if trainer.groups is not None:
                saved.update(trainer.group(number, group))
            group.update(saved)
        if firsts:
            _check_values(opt, group, folder)


def _check_values(opt, group, folder):
    try:
        opt._new_rule(group)  # the library looks at them
    except (ArithmeticError, LookupError, TypeError, ValueError, ctypes.ArgumentError) as problem:
        raise Error(f"{folder}: a parameter group has values that no optimizer takes: {problem}") from None


def _from_hypers(group, source, folder):
    """The library's names and numbers as this optimizer spells them."""
    hypers, made = dict(source["hyperparameters"]), {"seed": source["seed"]}
    if "betas" in group:
        made["betas"] = tuple(hypers.pop(name, was) for name, was in zip(("beta1", "beta2"), group["betas"]))
    decay_lr = hypers.pop("max_lr", 0.0)
    if decay_lr or "decay_lr" in group:  # which Adam has not, also where it is AdamW
        hypers["decay_lr"] = decay_lr
    for name, value in hypers.items():
        if name not in group:
            raise UsageError(f"{folder} has a hyperparameter {name!r}, which this optimizer has not")
        made[name] = bool(value) if isinstance(group[name], bool) else value
    return made


def _check_fits(opt, name, p, tensor, manifest, folder):
    """The planes in the file are those that the optimizer keeps of this parameter, or are converted."""
    group = opt.param_groups[opt._number[p][1]]
    layout, found = opt._layout(p), [_without_pieces(a) for a in tensor["arrays"]]
    stored = _stored(opt, p, tensor)
    wanted = None if stored is None else _arrays_of(stored, p.shape)
    # An fp32 parameter takes a weight of any format: all their values are fp32 numbers.
    first = 1 if p.dtype is torch.float32 else 0
    if wanted is None or list(map(_as_read, found[first:])) != list(map(_as_read, wanted[first:])):
        said, asked = (
            ", ".join(f"{a['name']} in {a['format']} ({a['rounding']})" for a in arrays)
            for arrays in (found, _arrays_of(layout, p.shape))
        )
        raise UsageError(
            f"{name}: {folder} has {said}, and the optimizer keeps {asked}; the checkpoint is of recipe "
            f"{manifest['recipe']!r} and the optimizer of {group['recipe']!r}: make the optimizer (and cast "
            "the model) as it was saved, or change the file with "
            f"'scruple checkpoint convert {folder} --recipe {group['recipe']} --out NEW'"
        )
    _check_weight(tensor, folder)


def _check_order(opt, name, p, tensor, folder):
    """A run goes on with its own random numbers. One of another program cannot: its parameters are in another
    order where groups part them, and its gradients are not torch's."""
    draws = any(array["rounding"] in _DRAWN for array in tensor["arrays"])
    if draws and tensor["id"] != opt._number[p][0]:
        raise UsageError(
            f"{name} is parameter {opt._number[p][0]} of the optimizer, and {tensor['id']} in {folder}: with "
            "stochastic rounding the random numbers follow it; make the optimizer from the parameters in the "
            "same order"
        )


def _stored(opt, p, tensor):
    """The layout of the planes in the file where it is the optimizer's, or one that is converted; else
    None."""
    layout = opt._layout(p)
    formats = {array["name"]: array["format"] for array in tensor["arrays"]}
    if p.dtype is torch.float32:
        formats["weight"] = layout.formats["weight"]
    try:
        return layout.as_saved(formats, opt.param_groups[opt._number[p][1]]["recipe"])
    except ValueError:  # a format that there is not, or not for this
        return None


def _as_read(array):
    """An array without what its values do not depend on."""
    form, number = _format_of(array), _rounding_of(array)
    if form is None or number is None or not form.rounds(number):
        return array
    return {**array, "rounding": _ROUNDINGS[form.reads_as(number)]}


@functools.lru_cache(maxsize=1)
def _known_formats():
    return {form.name: form for form in _abi.formats()}


def _format_of(array):
    return _known_formats().get(array["format"])


def _rounding_of(array):
    return _ROUNDINGS.index(array["rounding"]) if array["rounding"] in _ROUNDINGS else None


def _without_pieces(array):
    planes = [{key: plane[key] for key in plane if key != "pieces"} for plane in array["planes"]]
    return {**array, "planes": planes}


def _check_weight(tensor, folder):
    """The library reads the planes of a weight by its format's rules, so they must be long enough."""
    array = tensor["arrays"][0]
    form, rounding = _format_of(array), _rounding_of(array)
    if form is None or not form.roles & _abi.ROLE_WEIGHT or rounding is None or not form.rounds(rounding):
        raise UsageError(
            f"{tensor['name']}: {folder} has its weight in {array['format']!r} ({array['rounding']!r}), "
            "which this library has not; use the Scruple that wrote it, or a newer one"
        )
    if _without_pieces(array) != _planes_of(form, rounding, "weight", tensor["shape"]):
        raise Error(f"{folder}: tensor {tensor['name']!r}: its planes are not those of {array['format']}")


def _read_held(checkpoint, opt, p, tensor):
    state, stored = opt.state[p], _stored(opt, p, tensor)
    state["step"] = tensor["step"] - 1
    state.pop("adagc_norm", None)
    if tensor["adagc_norm"] is not None:
        state["adagc_norm"] = float(tensor["adagc_norm"])
    formats = opt._layout(p).formats
    for (a, name, form), array in zip(stored.arrays, tensor["arrays"]):
        if array["format"] == formats[name]:
            _read_planes(checkpoint, state, p, tensor["name"], array)
        elif a == _abi.WEIGHT:
            _read_weight(checkpoint, p, tensor)
        else:
            planes = [*_host_planes(checkpoint, tensor["name"], array), None][:2]
            recode(engine_for(p.device), opt._entry(p).row, a, form, *planes, p.device)


def _read_planes(checkpoint, state, p, tensor, array):
    """An array as it is, into the optimizer's planes."""
    for plane in array["planes"]:
        to = state.get(_state_name(state, array["name"], plane["kind"]), p)
        name = plane_name(tensor, array["name"], plane["kind"])
        if to.is_contiguous():
            checkpoint.read(name, plane, to)
        else:
            made = torch.empty(to.shape, dtype=to.dtype, device=to.device)
            checkpoint.read(name, plane, made)
            to.copy_(made)


def _host_planes(checkpoint, tensor, array):
    return [
        checkpoint.read_host(plane_name(tensor, array["name"], plane["kind"]), plane)
        for plane in array["planes"]
    ]


def _read_weight(checkpoint, x, tensor):
    """The weight alone, of any format, into a tensor of any dtype that has its values."""
    array = tensor["arrays"][0]
    planes = _host_planes(checkpoint, tensor["name"], array)
    if array["format"] == NAMES.get(x.dtype):
        x.copy_(planes[0].view(x.dtype).view(x.shape))
        return
    rule, values = _abi.Rule("sgd"), torch.empty(x.shape, dtype=torch.float32, device="cpu")
    row = _abi.Tensor(optimizer=rule.handle, size=x.numel(), step=1)
    addresses = [plane.data_ptr() for plane in planes] + [None]
    row.arrays[_abi.WEIGHT] = _abi.Array(
        _abi.format_named(array["format"]).handle,
        *addresses[:2],
        _ROUNDINGS.index(array["rounding"]),  # a split is read by it
    )
    if x.numel():
        library.decode(engine_for(values.device), byref(row), _abi.WEIGHT, values.data_ptr())
    x.copy_(values)


def _load_scaler(found, scaler):
    if found is not None and scaler is not None:
        scaler.load_state_dict({name: found[field] for field, name in _SCALER.items()})


def _check_scaler(found, scaler, folder):
    if scaler is not None and scaler.is_enabled() and found is None:
        raise UsageError(f"{folder} has no loss scale: it was saved without scaler=; load it without")
    if scaler is None and found is not None:
        warnings.warn(f"{folder} has a loss scale; give scaler= to restore it", stacklevel=5)

"""State dicts: planes exactly as stored, and the state of other optimizers.

    {"state": {0: {"step": 12, "extra": ..., "exp_avg/codes": ..., "exp_avg/scale": ..., ...}},
     "param_groups": [{"lr": ..., "recipe": "scruple", "version": 2, "params": [0],
                       "formats": {"bf16": {"weight": "bf16+8", "exp_avg": "companded8", ...}}}]}

Under FSDP2 a plane is a DTensor where its entries follow the parameter's rows, so that
torch.distributed.checkpoint can cut it anew for another number of ranks. Where groups of a format lie across
rows (rows that are not a multiple of 128 elements), the moment is saved as fp32 values instead, and 0 for its
scales: exact for the same shards, and within the format's error for others. A weight's extra bits, where
bytes lie across rows, are saved as a byte or two per element. torch.distributed.checkpoint gets the same from
a parameter that is not sharded, so that one process can read shards, and the other way round. Names are
always those of opt.state, which it relies on. Version 1 had codes under the slot's name alone. Entries of the
user's own, of the optimizer or of a parameter, are kept as torch.optim keeps them.
"""

import contextlib
import copy
import math
import numbers
import sys
import traceback

import torch
from torch.utils._pytree import tree_map_only

from .. import _abi
from .._abi import UsageError, few
from .planes import NAMES, chunks, codes_name, decode_as, described, encode, is_begun, is_ours, kind_of, recode
from .shards import is_run, is_sharded, like, local, offset_of, part_of
from .watched import copy_of

VERSION = 2
_HIDDEN = "dampening of momentum"  # what a saved group calls "dampening"
_SHOWN = {_HIDDEN: "dampening"}
_BITS_CHUNK = 1 << 18  # elements whose extra bits are repacked at a time
_OURS = ("recipe", "weights", "moments", "rounding", "seed", "decay_lr", "version", "formats")
_LOCAL = "offload"  # of a group: where state lies is not part of it
# What schedulers keep in the groups.
_SCHEDULERS = ("initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum")


# ---- Saving ----


def save(opt, as_):
    if as_ not in ("scruple", "torch"):
        raise UsageError(f"state_dict(as_={as_!r}); it can be 'scruple' or 'torch'")
    opt._update_rules()
    numbers, first = {}, 0
    for group in opt.param_groups:  # of a parameter that is repeated the number that torch gives it
        numbers.update({p: i for i, p in enumerate(group["params"], first) if p not in numbers})
        first += len(group["params"])
    by_rows, state = _asked_by_checkpoint(), {}
    for key, held in opt.state.items():
        if key in numbers and held:
            layout = opt._layout(key) if key.dtype in NAMES else None
            saved = {name: value for name, value in held.items() if not is_ours(name, layout)}
            if is_begun(held):
                saved.update(_planes(opt, key, by_rows) if as_ == "scruple" else _values(opt, key))
            state[numbers[key]] = saved
        elif not isinstance(key, torch.Tensor):
            state[key] = held
    # torch.optim.SGD would load coded momentum without an error, as if before the first step. It refuses groups without
    # "dampening", so that key gets another name, but not for torch.distributed.checkpoint, which needs it.
    coded = any(str(name).endswith("/codes") for i in numbers.values() for name in state.get(i, ()))
    hidden = {"dampening": _HIDDEN} if coded and not by_rows else {}
    groups = []
    for group in opt.param_groups:
        by_size = sorted(group["params"], key=torch.Tensor.numel)  # the large have the recipe's formats
        group["formats"] = {kind_of(p): opt._layout(p).formats for p in by_size if p.dtype in NAMES}
        kept = [key for key in group if (as_ == "scruple" or key not in _OURS) and (by_rows or key != _LOCAL)]
        saved = {hidden.get(key, key): group[key] for key in kept}
        groups.append({**saved, "params": [numbers[p] for p in group["params"]]})
    return {"state": state, "param_groups": groups}


def _asked_by_checkpoint():
    """Whether torch.distributed.checkpoint calls, which needs planes that can be cut anew for other ranks."""
    name = "torch.distributed.checkpoint.state_dict"
    frames = traceback.walk_stack(sys._getframe()) if name in sys.modules else ()
    return any(frame.f_globals.get("__name__") == name for frame, _ in frames)


def _planes(opt, p, by_rows):
    layout, state = opt._layout(p), opt.state[p]
    if any(plane.name not in state for plane in layout.planes):  # asked for since the last step
        opt._entry(p)
    saved = {"step": torch.tensor(state.steps, device="cpu")}
    if "adagc_norm" in state:
        saved["adagc_norm"] = torch.tensor(state["adagc_norm"], dtype=torch.float64, device="cpu")
    for name, _, _, per, _, form, _ in layout.planes:
        plane = like(p, state[name], per, by_rows)
        slot, _, kind = name.partition("/")
        if plane is not None:
            saved[name] = plane
        elif name == "extra":
            bits = _apart(state[name], local(p).numel(), form.aux_bits).view(local(p).shape)
            saved[name] = like(p, bits, 1, by_rows, bytes_apart=True)
        else:  # not one rank's groups: values, for the codes and their scales together
            saved[slot + "/codes"] = like(p, opt._entry(p).values(slot, local(p)), 1)
            if kind == "scale":
                saved[name] = torch.zeros((), device="cpu")
    return saved


def _values(opt, p):
    """As torch.optim keeps it."""
    saved = {"step": torch.tensor(float(opt.state[p].steps), device="cpu")}
    for slot in opt._layout(p).slots:
        saved[slot] = like(p, opt._entry(p).values(slot, local(p)), 1)
    return saved


# ---- Loading ----


@contextlib.contextmanager
def unchanged_on_error(opt):
    """Where what is inside fails, puts the groups and the state back. Inside, the state is a copy of which nobody
    knows the formats."""
    groups, old = [dict(group) for group in opt.param_groups], opt.state
    opt.state = {key: copy_of(key, held) for key, held in old.items()}
    opt._state.changed.clear()  # it is not the user who wrote this
    try:
        yield
    except BaseException:
        for group, was in zip(opt.param_groups, groups):
            group.clear()
            group.update(was)
        opt._state = old
        raise
    finally:
        opt._forget_tables()


def load(opt, saved):
    """All or nothing: what can be wrong is looked at before anything is written."""
    groups, states = _checked_groups(opt, saved), saved["state"]
    ours = any(group.get("version") is not None for group in groups)
    with unchanged_on_error(opt):
        old, opt.state = opt.state, {}
        for group, source in zip(opt.param_groups, groups):
            _load_group(opt, group, source, ours)
            opt._check_group(group)
        opt._update_rules()
        read, plan, mine = _read_ours if ours else _read_others, [], {}
        for group, source in zip(opt.param_groups, groups):
            for p, number in zip(group["params"], source["params"]):
                mine[number] = p
                if is_begun(states.get(number)):
                    plan.append((p, read(opt, p, number, states[number], source)))
        opt._refuse_short([p for p, _ in plan if not is_begun(old.get(p))])
        for p, write in plan:
            held = {name: x for name, x in old.get(p, {}).items() if is_ours(name) and name != "adagc_norm"}
            opt.state[p] = copy_of(p, held)  # its planes take the new values: no second copy
            write()
        for key, found in states.items():
            if key not in mine:
                opt.state[key] = found
                continue
            layout = opt._layout(mine[key]) if mine[key].dtype in NAMES else None
            for name, value in found.items():
                if not is_ours(name, layout) and name != "error_bits":
                    opt.state[mine[key]][name] = _cast(mine[key], value, key, groups, name)


def _cast(p, value, number, groups, name):
    """Tensors of the user's own, to where and what torch.optim casts them."""
    to = torch.optim.Optimizer._process_value_according_to_param_policy
    return tree_map_only(torch.Tensor, lambda x: to(p, x, number, groups, name), value)


def _checked_groups(opt, saved):
    if not isinstance(saved, dict) or "state" not in saved or "param_groups" not in saved:
        found = few(map(repr, saved)) if isinstance(saved, dict) else type(saved).__name__
        raise UsageError(f"a state dict has 'state' and 'param_groups'; this has {found}")
    groups = saved["param_groups"]
    if len(groups) != len(opt.param_groups):
        counts = f"{len(groups)} parameter groups and the optimizer {len(opt.param_groups)}"
        raise UsageError(f"the state has {counts}; make the optimizer with the same groups")
    for i, (theirs, mine) in enumerate(zip(groups, opt.param_groups)):
        if len(theirs["params"]) != len(mine["params"]):
            counts = f"{len(theirs['params'])} parameters in the state and {len(mine['params'])}"
            raise UsageError(f"parameter group {i} has {counts} in the optimizer")
        if (version := theirs.get("version") or 0) > VERSION:
            raise UsageError(f"the state has version {version}, above {VERSION}; install a newer scruple")
    return [{_SHOWN.get(key, key): value for key, value in group.items()} for group in groups]


def _load_group(opt, group, source, ours):
    """The saved group's values, as torch.optim does it: from our own states formats too, from others what
    means something here or is the user's own."""
    if ours and "decay_lr" in source and "decoupled_weight_decay" in opt.defaults:
        source = {"decoupled_weight_decay": True, **source}  # of before AdamW's groups said so
    theirs, mine = ("SGDW" if "decay_lr" in x else "SGD" for x in (source, opt.defaults))
    if ours and "nesterov" in source and "nesterov" in opt.defaults and theirs != mine:
        raise UsageError(f"the state is of {theirs}, whose decay is not {mine}'s; load it into {theirs}")
    for key, value in source.items():
        known = key in opt.defaults and (ours or key not in _OURS) or key in _SCHEDULERS
        if key == "decoupled_weight_decay" and opt.rule == "adamw":  # as torch: AdamW stays what it is
            continue
        if key not in ("params", _LOCAL) and (known or key not in opt.defaults and (ours or key in group)):
            group[key] = copy.deepcopy(value)  # a learning rate may be a tensor
    group["version"] = VERSION


def _found(number, state, name, kind=torch.Tensor):
    if not isinstance(state.get(name), kind):
        raise UsageError(f"parameter {number}: the state lacks {name!r}; it has {', '.join(map(str, state))}")
    return state[name]


def _check(number, name, found, shape, dtype):
    if tuple(found.shape) != tuple(shape) or found.dtype != dtype:
        belongs = f"{dtype} of shape {tuple(shape)} belongs there; was it saved for this model?"
        raise UsageError(f"parameter {number}, {name}: the state has {described(found)}, and {belongs}")


def _read_ours(opt, p, number, state, source):
    """Checks one parameter's planes, and returns what writes them."""
    layout, weight = opt._layout(p), local(p)
    layout.check_ready(p)
    formats = (source.get("formats") or {}).get(kind_of(p))
    if source.get("formats") and formats is None:
        kinds = f"parameter {number} is {kind_of(p)}, and the state is of {', '.join(source['formats'])}"
        hint = "make the model alike (cast_model, compress_weights), or load its state_dict(as_='torch')"
        raise UsageError(f"{kinds}; {hint}")
    stored = layout  # what the planes in the state are
    if formats is not None and p.numel() > _abi.recipes()[source["recipe"]].small:
        stored = layout.as_saved(formats, source["recipe"])
    if stored is None:
        here = f"recipe {source['recipe']!r} means {layout.formats} here; load its state_dict(as_='torch')"
        raise UsageError(f"parameter {number}: the state has formats {formats} and {here}")
    steps = int(_found(number, state, "step", (numbers.Real, torch.Tensor)))
    for slot in stored.coded:  # of version 1
        state = {(slot + "/codes" if name == slot else name): x for name, x in state.items()}
    planes, values = {}, {}
    for plane in stored.planes:
        name, slot, bits = plane.name, plane.slot, plane.form.aux_bits
        codes = state.get(slot + "/codes")
        if isinstance(codes, torch.Tensor) and codes.is_floating_point():
            values[slot] = part_of(p, codes)
            continue
        found = _found(number, state, name)
        # Groups of the whole parameter that do not begin where ours do.
        across = is_sharded(p) and not is_sharded(found) and plane.per != 1 and not is_run(p)
        if name == "extra" and plane.per != 1 and tuple(found.shape[:-1]) == tuple(p.shape):
            found = _together(_from_bytes(part_of(p, found)), bits, plane.dtype)
        elif across and name == "extra":
            whole = _apart(found, p.numel(), bits).view(p.shape)
            found = _together(part_of(p, whole), bits, plane.dtype)
        elif across:
            if slot not in values:
                planes.pop(slot + "/codes", None)
                values[slot] = part_of(p, _decoded_whole(p, number, stored, slot, state)).clone()
            continue
        else:
            found = _plane_part(p, found, plane.per)
            if plane.dtype == torch.int16 and found.shape == (*weight.shape, 2):
                found = _from_bytes(found)
        planes[name] = found if plane.per == 1 else found.reshape(-1)
        _check(number, name, planes[name], plane.shape(weight), plane.dtype)
    for slot, found in values.items():
        _check(number, slot, found, weight.shape, found.dtype)

    def write():
        entry, held = make_state(opt, p, steps), opt.state[p]
        if "adagc_norm" in state:
            held["adagc_norm"] = float(state["adagc_norm"])
        for a, slot, form in stored.arrays:
            if form.name != layout.formats[slot] and slot not in values:
                codes, scales = planes.pop(codes_name(slot, form)), planes.pop(slot + "/scale", None)
                recode(entry.row, a, form, codes, scales, weight.device)
        for name, found in planes.items():
            held[name].copy_(found)
        for slot, found in values.items():
            encode(entry.row, layout.index(slot), found, weight.device)

    return write


def _plane_part(p, plane, per):
    """This rank's part of a plane: of a DTensor its own, of a whole plane what the shard covers."""
    if not is_sharded(p):
        return plane
    if is_sharded(plane):
        return plane._local_tensor
    if per == 1 and plane.shape[: p.dim()] == p.shape:
        return part_of(p, plane)
    first, size = round(offset_of(p) / per), math.ceil(round(p._local_tensor.numel() / per, 6))
    return plane.reshape(-1)[first : first + size]


def _from_bytes(plane):
    """Entries of 8 or 16 bits whose bytes are the last dimension."""
    return (plane.contiguous().view(torch.int16) if plane.shape[-1] == 2 else plane).squeeze(-1)


def _decoded_whole(p, number, layout, slot, state):
    """Values of a moment of a whole parameter from planes that another process has saved."""
    planes = [plane for plane in layout.planes if plane.slot == slot]
    found = [_found(number, state, plane.name).reshape(plane.shape(p)) for plane in planes]
    for plane, held in zip(planes, found):
        _check(number, plane.name, held, plane.shape(p), plane.dtype)
    return decode_as(layout.row, layout.index(slot), planes[0].form, found, p.shape, local(p).device)


# ---- Extra bits of a weight, K to an element ----


def _apart(plane, size, bits):
    """A string of `bits` bits per element as one entry per element."""
    wide, dtype = (8, torch.uint8) if bits <= 8 else (16, torch.int16)
    return _repacked(plane, size, bits, wide).view(dtype)


def _together(entries, bits, dtype):
    """The reverse."""
    return _repacked(entries, entries.numel(), 8 * entries.element_size(), bits).view(dtype)


def _repacked(plane, size, was, bits):
    """A string of `was` bits per element as one of `bits`."""
    plane = plane.contiguous().view(-1).view(torch.uint8)
    made = torch.zeros(-(-size * bits // 8), dtype=torch.uint8, device=plane.device)
    places = torch.arange(8, dtype=torch.uint8, device=plane.device)
    for first in range(0, size, _BITS_CHUNK):
        count = min(_BITS_CHUNK, size - first)
        part = plane[first * was // 8 : -(-(first + count) * was // 8)]
        flags = ((part[:, None] >> places) & 1).view(-1)[: count * was].view(count, was)
        flags = torch.nn.functional.pad(flags, (0, bits - was)).reshape(-1)  # or fewer
        flags = torch.nn.functional.pad(flags, (0, -flags.numel() % 8)).view(-1, 8)
        made[first * bits // 8 :][: len(flags)] = (flags << places).sum(1)
    return made


# ---- Other optimizers ----


def _read_others(opt, p, number, state, source):
    """torch.optim's moments, and FlashOptim's codes."""
    layout, weight = opt._layout(p), local(p)
    known = {slot for _, slots, _ in _abi.rules().values() for slot in slots}.difference(layout.slots)
    tensors = [name for name, x in state.items() if isinstance(x, torch.Tensor)]
    if others := [name for name in tensors if str(name).partition("::")[0] in known]:
        found = f"parameter {number}: the state has {', '.join(others)}, and {type(opt).__name__}"
        raise UsageError(f"{found} has none here; it must come from one of the same kind and options")
    flash = [slot for slot in layout.slots if slot + "::quantized" in state and slot not in state]
    for slot in flash:  # our format flash8, with its fp16 scales at times under the name of bf16
        codes, scales = (_found(number, state, slot + part) for part in ("::quantized", "::scales"))
        _check(number, slot, codes, p.shape, codes.dtype)
        _check(number, slot + "::scales", scales.reshape(-1), (-(-p.numel() // 32),), scales.dtype)
    errors = state.get("error_bits") if weight.dtype != torch.float32 else None
    if errors is not None:
        _check(number, "error_bits", errors, p.shape, errors.dtype)

    def write():
        held = {name: x for name, x in state.items() if is_ours(name, layout) and "::" not in name}
        held = tree_map_only(torch.Tensor, torch.clone, held)  # a plane in fp32 becomes the optimizer's own
        for slot in flash:
            codes, scales = state[slot + "::quantized"], state[slot + "::scales"]
            codes = codes.to(torch.int16).to(torch.uint8) if codes.element_size() > 1 else codes
            form, array = _abi.format_named("flash8"), layout.index(slot)
            held[slot] = decode_as(layout.row, array, form, (codes, scales), p.shape, weight.device)
        opt.state[p] = held
        try:
            entry = opt._entry(p)
        except UsageError as problem:
            raise UsageError(f"parameter {number} of a state for {type(opt).__name__}: {problem}") from None
        if errors is not None:
            _load_error_bits(entry.row, weight, part_of(p, errors), source)

    return write


def make_state(opt, p, steps=0):
    """Planes to write into: those that the parameter has, where they fit."""
    state = opt.state.get(p) or {}
    fit = (plane.fits(local(p), state.get(plane.name)) for plane in opt._layout(p).planes)
    if "step" not in state or not all(fit):
        opt.state.pop(p, None)
    entry = opt._entry(p)
    opt.state[p].show(steps)
    return entry


def _load_error_bits(row, weight, errors, source):
    """FlashOptim's wide weight: visible + code / top * ulp / 2 (FlashOptim, 2602.23349, section 3)."""
    bits, least = (7, -126) if weight.dtype == torch.bfloat16 else (10, -14)
    wide, top = (torch.int16, 32767) if source.get("master_bytewidth") == 4 else (errors.dtype, 127)
    visible, errors = weight.detach().reshape(-1), errors.view(wide).reshape(-1)
    for first, size, part in chunks(row):
        high = visible[first : first + size].float()
        _, exponent = torch.frexp(high)
        log_ulp = torch.where(high == 0, least, (exponent - 1).clamp(min=least)) - bits
        code = errors[first : first + size].to(weight.device).float()
        values = high + torch.ldexp(code / top, log_ulp - 1)
        encode(part, _abi.WEIGHT, values, weight.device)

"""What all of scruple.torch's optimizers share: a torch.optim.Optimizer whose state is planes in small
formats and whose step is one library call per device. The formulas are in the library."""

import contextlib
import copy
import ctypes
import difflib
import functools
import inspect
import itertools
import math
import numbers
import operator
import threading
import warnings
from ctypes import byref
from typing import NamedTuple

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from .. import _abi
from .._abi import UsageError, library
from . import pinned
from . import state as state_files
from .coded import form_of, memory_of
from .engines import engine_for
from .planes import NAMES, Layout, count_of, decode, described, encode
from .planes import is_begun, meaning, sized, start_extra
from .shards import groups_of, like, local, offset_of, part_of
from .table import Table, check_gradient
from .watched import Lent, States, copy_of

_turns = itertools.count()  # of groups, parameters and formats, over all optimizers
# What decides how state is stored, beside hyperparameters that ask for exact moments.
_SETTINGS = ("recipe", "weights", "moments", "rounding", "decoupled_weight_decay", "offload")


class Entry(NamedTuple):
    """One parameter as the library sees it. A new one is made when the parameter's memory has moved."""

    layout: Layout
    row: _abi.Tensor
    planes: list
    places: list  # of the planes
    memory: list  # of the planes: the row has their addresses, so they must live even if a user sets .data
    address: int
    device: torch.device  # of the weight
    strided: bool
    turn: int  # of the groups that it was made for

    def fits(self, weight, turn):
        """Whether it can be used again for this weight, under these groups."""
        known = (self.turn, self.address, self.device, self.row.size, self.layout.dtype, not self.strided)
        place = memory_of(weight).data_ptr(), weight.device
        return known == (turn, *place, weight.numel(), weight.dtype, weight.is_contiguous())

    def by_plane(self):
        return zip(self.layout.planes, self.planes)

    def values(self, slot, weight):
        to = torch.device("cpu") if self.row.host else self.device
        return decode(self.row, self.layout.index(slot), weight.shape, self.device, to)


class Optimizer(torch.optim.Optimizer):
    """The base class. `rule` is the update rule's name in the library."""

    rule = ""
    _offload = False  # of one that an earlier version has pickled
    _step_supports_amp_scaling = True  # GradScaler hands over its scale and its flag, and waits for neither

    def __init__(
        self, params, hypers, *, recipe="scruple", weights=None, moments=None, rounding=None, seed=0, maximize=False,
        capturable=False, offload=False, foreach=None, fused=None, differentiable=False,
    ):
        if differentiable:
            raise UsageError("differentiable=True: the step runs outside autograd; use torch.optim for it")
        stored = dict(recipe=recipe, weights=weights, moments=moments, rounding=rounding, seed=seed)
        # In every group, so that torch.distributed.checkpoint carries them.
        more = dict(maximize=maximize, capturable=capturable, version=state_files.VERSION, formats=None)
        self._forget()
        self._offload = offload  # not in the groups: states and checkpoints are the same with and without
        self.defaults = {**hypers, **stored, **more}
        self._new_rule(self.defaults)  # looks at hyperparameters first, as torch does
        self._made = False  # all of its groups
        super().__init__(params, self.defaults)
        self._check_weights()
        self._made = True

    def __init_subclass__(cls, **how):
        """help() and those who read signatures find what `options` stands for."""
        super().__init_subclass__(**how)
        own, *bases = (inspect.signature(kind.__init__).parameters for kind in cls.__mro__[:-1])
        named = [x for x in own.values() if x.kind is not x.VAR_KEYWORD]
        shared = [x for base in bases if "hypers" in base for x in base.values() if x.kind is x.KEYWORD_ONLY]
        more = [x for x in shared if x.name not in own] if len(named) < len(own) else []
        cls.__signature__ = inspect.Signature(named[1:] + more)

    @staticmethod
    def profile_hook_step(step):
        """torch's wrapper of step(), for hooks and profilers. It costs time, so it is used only for these."""
        observed = torch.optim.Optimizer.profile_hook_step(step)

        @functools.wraps(step)
        def observed_or_not(self, *args, **kwargs):
            hooks = self._optimizer_step_pre_hooks or self._optimizer_step_post_hooks
            hooks = hooks or _global_optimizer_pre_hooks or _global_optimizer_post_hooks
            watched = hooks or torch.autograd._profiler_enabled()
            return (observed if watched else step)(self, *args, **kwargs)

        return observed_or_not

    @property
    def state(self):
        """torch.optim's. Reading it waits for the device where only the device counts steps."""
        with self._lock:
            self._looks += 1  # the caller may keep references to planes
            for table in self._tables.values():
                if table.counter is not None:
                    table.count()
            if self._handle is not None:
                self._handle._path.settle()
            self._wait()
        return self._state

    @state.setter
    def state(self, value):
        self._settle()
        self._forget_tables()
        self._state = States(value)

    def _wait(self):
        """Planes in pinned memory are read and written in no stream's order, so until steps have left theirs there."""
        for device in self._away:
            library.engine_synchronize(engine_for(device))

    # ---- Groups and parameters ----

    def add_param_group(self, param_group):
        if self._handle is not None:
            self._handle.refuse_stored("a parameter group that was added")
        super().add_param_group(param_group)
        try:
            self._check_group(self.param_groups[-1])
            if self._made:
                self._check_weights()
        except Exception:
            self.param_groups.pop()
            raise
        self._settle()
        self._forget_tables()

    def _check_group(self, group):
        for key in set(group) - set(self.defaults):  # the user's own, as torch allows; or a slip
            for meant in difflib.get_close_matches(key, self.defaults, 1, 0.85):
                warnings.warn(f"a parameter group has {key!r}, which means nothing; was {meant!r} meant?")
        rule = self._new_rule(group)
        if group.get("nesterov") and (group["momentum"] <= 0 or group["dampening"] != 0):
            raise UsageError("nesterov=True needs a momentum above 0 and no dampening, as in torch.optim.SGD")
        if group.get("decay_lr") and not group.get("decoupled_weight_decay", True):
            raise UsageError("decay_lr is for decoupled decay: AdamW, or Adam with decoupled_weight_decay=True")
        if self._offloads(group) and group.get("capturable"):
            what = "offload=True with capturable=True: a step copies state beside the stream, which no CUDA graph records"
            raise UsageError(f"{what}; leave out one of the two")
        for p in group["params"]:
            if p.dtype not in NAMES and not p.requires_grad:
                continue  # codes of a frozen layer, say: nobody's business until they have a gradient
            if p.layout is not torch.strided:
                raise UsageError(f"{sized(p)} is sparse; scruple steps dense parameters")
            if any(stride == 0 and size > 1 for size, stride in zip(p.shape, p.stride())):
                raise UsageError(f"elements of {sized(p)} share memory; use .contiguous() on it first")
            Layout(rule, group, p.dtype, p.numel(), form_of(p))

    def _offloads(self, group):
        if (asked := group.get("offload", self._offload)) not in (True, False):
            raise UsageError(f"offload is {asked!r}; it can be True or False, for the optimizer or a parameter group")
        return asked

    def _check_weights(self):
        """Refuses weights in 16 bits where every parameter, or every one of a group that asks for it, is in fp32."""
        for group in self.param_groups:
            own, named = group["weights"] != self.defaults["weights"], group["weights"] or "fp32"
            params = group["params"] if own else self._all_params()
            kinds = {NAMES.get(p.dtype) for p in params if p.requires_grad}
            if kinds == {"fp32"} and named.startswith(("bf16", "fp16")):
                raise UsageError(f"weights={named!r} for fp32 parameters; cast_model first, or leave it out")

    def _hypers(self, group):
        """Hyperparameters by the library's names; lr apart."""
        known = _abi.rules()[self._rule_of(group)][2]
        named = {name: group[name] for name in known if name in group and name != "lr"}
        if "betas" in self.defaults:
            named["beta1"], named["beta2"] = group["betas"]
        return named

    def _new_rule(self, group):
        hypers = self._hypers(group)
        for name, value in {**hypers, "lr": group["lr"], "seed": group["seed"]}.items():
            if not isinstance(value, (numbers.Real, torch.Tensor)):
                raise UsageError(f"{name} is {value!r}, a {type(value).__name__}; it must be a number")
        if len({isinstance(beta, torch.Tensor) for beta in group.get("betas", ())}) > 1:
            raise UsageError("betas must be both numbers or both tensors")
        rule = _abi.Rule(self._rule_of(group))
        self._update_rule(rule, group, hypers, None)
        return rule

    def _update_rule(self, rule, group, hypers, device):
        lr, cell = group["lr"], None
        if isinstance(lr, torch.Tensor) and device is not None and "cpu" not in (device.type, lr.device.type):
            # It stays on the device: a scheduler's tensor may be written by a captured graph.
            if rule not in self._cells:
                self._cells[rule] = torch.empty((), dtype=torch.float64, device=device)
            cell = self._cells[rule].copy_(lr, non_blocking=True)
        else:
            hypers = {**hypers, "lr": lr}
        rule.tell(hypers, int(group["seed"]), _address(cell))

    # ---- What is remembered between steps, and can be made anew from state and groups ----

    def _forget(self):
        self._rules, self._cells, self._handle, self._looks = {}, {}, None, 0
        self._lock = threading.RLock()  # a state dict may be taken by another thread
        self._away = set()  # devices with state in pinned memory
        self._forget_tables()

    def _forget_tables(self):
        self._tables, self._owner, self._buckets = {}, {}, None
        self._turn = next(_turns)

    def _rule(self, index, device):
        key = (index, device, self._rule_of(self.param_groups[index]))
        if key not in self._rules:
            self._rules[key] = _abi.Rule(key[2])
        return self._rules[key]

    def _rule_of(self, group):
        return self.rule

    def _update_rules(self):
        hypers = list(map(self._hypers, self.param_groups))
        if self._has_changed(hypers):
            self._check_weights()
            self._settle()
            self._forget_tables()
            self._make_buckets(hypers)
            known = [p for p, held in self._state.items() if getattr(held, "entry", None)]
            self._state.changed.update(dict.fromkeys(known))  # other formats may be asked for now
            if self._handle is not None:  # its sinks know the arrays of before
                self._handle._path.replace(known)
        for (index, device, name), rule in self._rules.items():
            if name == self._rule_of(self.param_groups[index]):
                self._update_rule(rule, self.param_groups[index], hypers[index], device)
        self._state.check_taken()
        if self._state.changed:
            self._adopt()

    def _adopt(self):
        """Takes over what users have written into the state. Refuses groups that ask for other formats than it has."""
        changed = [p for p in self._state.changed if p in self._number and p.dtype in NAMES]
        held = {p: self._state.of(p) for p in changed if p in self._state}
        written = {p: None for p in changed if p not in held or not held[p].is_intact(p)}
        for p, state in held.items():
            if p not in written and state.entry.turn != self._turn:
                self._check_meaning(p, self._layout(p))
        if self._handle is not None:
            self._handle._path.replace(written)
        for p in written:
            if p in self._owner:
                self._settle_table(self._owner[p])
        for p in written:
            if is_begun(held.get(p)):
                self._entry(p)
        self._state.changed.clear()
        self._state.changed.update((p, None) for p, state in held.items() if state.lent)

    def _has_changed(self, hypers):
        """Whether somebody has moved the model, changed a group's parameters or formats, or given a hyperparameter
        a value for which the rule keeps another slot."""
        if self._buckets is None or len(self._seen) != len(self.param_groups):
            return True
        for group, values, (params, asked) in zip(self.param_groups, hypers, self._seen):
            same = len(params) == len(group["params"]) and all(map(operator.is_, params, group["params"]))
            if not same or self._asks(group, values) != asked:
                return True
        return any(local(params[0]).device != device for device, params in self._buckets.items())

    def _asks(self, group, hypers):
        """The part of a group that decides which slots there are, and in which formats."""
        return list(map(bool, hypers.values())), [group.get(name) for name in _SETTINGS]

    def _check_meaning(self, p, layout):
        state, asked = self._state[p], {array[0]: array for array in layout.described}
        if state.entry is None:
            return
        left = {plane.name: held for plane, held in state.entry.by_plane()}
        for was in state.entry.layout.described:
            name, now = was[0], asked.get(was[0], was)
            if meaning(now) != meaning(was) and dict.get(state, name) is left.get(name):
                what = f"{name} of {sized(p)} is held as {' '.join(was[1:])}, not {' '.join(now[1:])}"
                what += ": its group was changed, or it was cast"
                hint = "Set that back; or load state_dict(as_='torch'), and set_master_weights, into a new optimizer"
                raise UsageError(f"{what}, after its first step. {hint}")

    def _make_buckets(self, hypers):
        """The parameters that can go into one call: those of one device."""
        self._buckets, self._number = {}, {}
        asked = copy.deepcopy(list(map(self._asks, self.param_groups, hypers)))
        self._seen = [(list(group["params"]), asks) for group, asks in zip(self.param_groups, asked)]
        for index, group in enumerate(self.param_groups):
            for p in group["params"]:
                if p not in self._number:  # else repeated, of which torch warns
                    self._number[p] = len(self._number), index
                    self._rule(index, local(p).device)
                    self._buckets.setdefault(local(p).device, []).append(p)

    def _entry(self, p):
        """Makes the parameter's state where it has none, and takes over what a user has written there."""
        if local(p).device.type not in ("cpu", "cuda"):
            engine_for(local(p).device)  # says so, before any state is made
        weight, state = local(p).detach(), self._state.of(p)
        if (entry := state.entry) is not None and entry.fits(weight, self._turn) and state.is_intact(p):
            entry.row.step = count_of(state) + 1
            return entry
        layout = self._layout(p)
        layout.check_ready(p)
        self._check_meaning(p, layout)
        self._wait()
        planes, values, steps = layout.read(p, state)
        row = layout.place(weight, planes, self._number[p][0], offset_of(p))
        self._away.update([weight.device] if row.host else [])
        row.step = steps + 1
        fresh = not is_begun(state)
        if fresh and weight.numel():
            library.tensor_reset(engine_for(weight.device), byref(row))
        if "extra" in planes and (fresh or planes["extra"] is not state.get("extra")):
            start_extra(weight, planes["extra"])
        for slot, found in values.items():
            array, part = layout.index(slot), part_of(p, found)
            here = decode(row, array, weight.shape, weight.device)
            if not torch.equal(here, part.to(here)):  # else it was only read
                encode(row, array, part, weight.device)
            state.lent[slot, local(found).data_ptr()] = Lent(found)
        for slot in layout.coded:
            dict.pop(state, slot, None)
        values = found = part = None
        state.forget_lent()  # what nobody else has
        dict.update(state, planes)
        strided = not weight.is_contiguous()
        held, places = list(planes.values()), [x.data_ptr() for x in planes.values()]
        memory, address = [x.untyped_storage() for x in held], memory_of(weight).data_ptr()
        state.entry = Entry(layout, row, held, places, memory, address, weight.device, strided, self._turn)
        if state.shown is None or state.get("step") is not state.shown or state.steps != steps:
            state.show(steps)
        return state.entry

    def _entries(self, params):
        """Of all these; where memory of the host is short, no state of theirs that is new stays."""
        if not any(map(self._offloads, self.param_groups)):
            return [self._entry(p) for p in params]
        own = {p: dict(self._state.get(p, ())) for p in params if not is_begun(self._state.get(p))}
        asked = self._refuse_short(own)
        try:
            return [self._entry(p) for p in params]
        except MemoryError as problem:
            for p, held in own.items():
                self._state.pop(p, None)
                self._state.update({p: held} if held else {})
            raise pinned.not_had(asked, problem) from None

    def _refuse_short(self, params):
        """The bytes of pinned memory that new state of these parameters takes, where the host has as many."""
        layouts = [(self._layout(p), local(p)) for p in params]
        asked = sum(plane.bytes(x) for layout, x in layouts for plane in layout.planes if plane.away)
        pinned.refuse_short(asked)
        return asked

    @contextlib.contextmanager
    def _tried(self, p):
        """The parameter's entry. One that was never stepped has state within the block only: state fixes its master copy,
        and weights may still be loaded into the model."""
        own = dict(self.state.get(p, ()))
        try:
            yield self._entry(p)
        finally:
            if not is_begun(own):
                self.state.pop(p)
                self.state.update({p: own} if own else {})

    def _layout(self, p, form=None):
        """Formats of a parameter, whether it has state or not; of one that is to become coded in `form`."""
        if self._buckets is None:
            self._make_buckets(list(map(self._hypers, self.param_groups)))
        index, device = self._number[p][1], local(p).device
        rule, group = self._rule(index, device), self.param_groups[index]
        self._update_rule(rule, group, self._hypers(group), device)
        away = device.type == "cuda" and self._offloads(group) and local(p).numel() > pinned.SMALL
        return Layout(rule, group, p.dtype, p.numel(), form or form_of(p), away)

    # ---- Tables ----

    def _settle_table(self, table):
        """Brings its step counts into the state, and drops it."""
        if self._tables.pop(table.key, None) is not None:
            table.count()
            for p in table.params:
                self._owner.pop(p, None)

    def _settle(self):
        with self._lock:
            for table in list(self._tables.values()):
                self._settle_table(table)
            if self._handle is not None:
                self._handle._path.settle()

    def _filled(self, key, params, gradients):
        """The table `key` of parameters of one device, with these gradients; None where there are none."""
        if any(map(operator.is_, gradients, itertools.repeat(None))):
            here = [g is not None for g in gradients]
            key = (*key, bytes(here))
            params, gradients = ([x for x, has in zip(xs, here) if has] for xs in (params, gradients))
        if not params:
            return None
        table = self._tables.get(key)
        if table is None:
            if self._handle is not None:
                self._handle.refuse_stored(f"the gradient of {sized(params[0])}, unfrozen, of another model or set by hand,")
            for p, g in zip(params, gradients):  # before any state is made
                check_gradient(p, g)
        elif table.fill(gradients, self._looks):
            return table
        for p in params:  # in another table until now, or moved
            if p in self._owner:
                self._settle_table(self._owner[p])
        entries = self._entries(params)
        table = self._tables[key] = Table(key, params, entries, [self._state[p] for p in params])
        self._owner.update(dict.fromkeys(params, table))
        table.fill(gradients, self._looks)
        return table

    # ---- The step ----

    @torch.no_grad()
    def step(self, closure=None, *, max_norm=None):
        """One step of every parameter that has a gradient.

        `max_norm` clips by the norm of all gradients, as torch.nn.utils.clip_grad_norm_ does, without writing
        to them, and skips the step where a gradient is not finite.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if max_norm is not None and not max_norm > 0:
            raise UsageError(f"max_norm is {max_norm}; it must be above 0, or None for no clipping")
        self._step(max_norm)
        return loss

    @torch._disable_dynamo  # addresses and library calls: nothing that a compiled train step could trace
    def _step(self, max_norm):
        with self._lock:
            if self._handle is not None:
                self._handle.before_step()
            tables, clip = self._present(), None
            given = (getattr(self, name, None) for name in ("found_inf", "grad_scale"))
            found_inf, scale = (x if isinstance(x, torch.Tensor) else None for x in given)
            if max_norm is not None and tables:
                self.last_norm, found_inf, clip = self._measure(tables, max_norm, scale, found_inf)
            elif max_norm is not None and self._handle is not None:
                raise UsageError("release_gradients has the gradients; give it max_norm, with 'compressed'")
            self._take(tables, scale, found_inf, clip)
            for table in tables if scale is not None else ():  # as torch leaves them: unscaled
                torch._foreach_div_([local(p.grad) for p in table.params], scale.to(table.device).squeeze())
            if self._handle is not None:
                self._handle.after_step()

    def zero_grad(self, set_to_none=True):
        if self._handle is not None:
            self._handle.before_zero_grad()
        super().zero_grad(set_to_none)

    def _present(self):
        """Tables of all parameters that have a gradient."""
        self._update_rules()
        found = [self._filled((at,), params, [p.grad for p in params]) for at, params in self._buckets.items()]
        return [table for table in found if table is not None]

    @torch._disable_dynamo
    @torch.no_grad()
    def _found_inf(self):
        """{device: 1 where a gradient there is not finite}, for LossScaler."""
        sums = {table.device: self._sum_squares([table], table.device) for table in self._present()}
        return {device: (~torch.isfinite(total)).to(torch.float32).view(1) for device, total in sums.items()}

    def clip_and_step(self, max_norm):
        """step(max_norm=max_norm), and the norm before clipping, a tensor on its device; None without a gradient."""
        self.last_norm = None
        self.step(max_norm=max_norm)
        return self.last_norm

    def _take(self, tables, scale, found_inf, clip):
        counted = found_inf is not None or any(group.get("capturable") for group in self.param_groups)
        given = found_inf, clip, scale
        for table in tables:
            held = [x if x is None else x.to(table.device, torch.float32, non_blocking=True) for x in given]
            options = _abi.StepOptions(ctypes.sizeof(_abi.StepOptions), 1.0, *map(_address, held), None, 0, 1)
            table.step(options, counted)

    def _measure(self, tables, max_norm, scale, found_inf):
        """Norm, flag and factor of all gradients, on the first table's device: the host waits for none."""
        device = tables[0].device
        max_norm = 0.0 if math.isinf(max_norm) else max_norm  # the library's word for no limit
        norm, flag, clip = (
            torch.empty((), dtype=t, device=device) for t in (torch.float64, *[torch.float32] * 2)
        )
        held = None if scale is None else scale.to(device, torch.float32, non_blocking=True)
        options = _abi.options(_abi.MeasureOptions, max_norm=max_norm, loss_scale=_address(held))
        options.norm, options.found_inf, options.clip = norm.data_ptr(), flag.data_ptr(), clip.data_ptr()
        rows = tables[0].rows
        if len(tables) > 1 or tables[0].any_sharded:
            rows, total = (), self._sum_squares(tables, device)
            options.sum_before = total.data_ptr()
        library.measure(engine_for(device), rows or None, len(rows), byref(options))
        return norm, flag if found_inf is None else torch.maximum(flag, found_inf.to(device)), clip

    def _sum_squares(self, tables, device):
        """Over all tables, and over the ranks that hold the rest of each parameter."""
        sums = {}  # by the ranks that share parameters: their groups, and what each table adds
        for table in tables:
            shared = {}
            for p, row in zip(table.params, table.rows):
                groups = groups_of(p)
                shared.setdefault(tuple(groups), (groups, []))[1].append(row)
            for ranks, (groups, rows) in shared.items():
                part = torch.empty((), dtype=torch.float64, device=table.device)
                options = _abi.options(_abi.MeasureOptions, sum=part.data_ptr())
                rows = (_abi.Tensor * len(rows))(*rows)
                library.measure(engine_for(table.device), rows, len(rows), byref(options))
                sums.setdefault(ranks, (groups, []))[1].append(part.to(device))
        totals = [(groups, sum(parts)) for groups, parts in sums.values()]
        for groups, total in totals:
            for group in groups.values():
                torch.distributed.all_reduce(total, group=group)
        return sum(total for _, total in totals)

    # ---- Weights at full width ----

    def master_weights(self):
        """{parameter: its value in fp32, with the bits that the parameter itself does not show}."""
        self._settle()
        self._update_rules()
        found = {p: p.detach().to(torch.float32, copy=True) for p in self._own_params()}
        for p in found:
            if is_begun(self.state.get(p)):
                row, weight = self._contiguous(p, self._entry(p))
                found[p] = like(p, decode(row, _abi.WEIGHT, weight.shape, weight.device), 1)
        return found

    def _contiguous(self, p, entry):
        """Its row over a weight in one run of memory, and that weight: the parameter's own, or a copy."""
        row, weight = _abi.Tensor.from_buffer_copy(entry.row), local(p).detach().contiguous()
        if not form_of(p):
            row.arrays[_abi.WEIGHT].codes = weight.data_ptr()
        return row, weight

    @torch.no_grad()
    def set_master_weights(self, values):
        """Writes fp32 values, {parameter: tensor}: what fits into the parameter, the rest beside it."""
        self._write_masters(*self._ready_masters(values))

    def _ready_masters(self, values):
        """The values and the entries that they go to. All that can be wrong is found here, before a write."""
        self._settle()
        self._update_rules()
        for p, value in values.items():
            if p not in self._number:
                raise UsageError(f"a value for {sized(p)} that is not in the optimizer")
            floats = isinstance(value, torch.Tensor) and value.is_floating_point() and not value.is_meta
            if not floats or value.shape != p.shape:
                raise UsageError(f"a value for {sized(p)} is {described(value)}; give floats of that shape")
        memory, values = set(map(_memory, values)), dict(values)
        for p, value in values.items():  # in the memory of a parameter, which may be written first
            if _memory(value) in memory and value.data_ptr() != memory_of(p).data_ptr():
                values[p] = value.clone()
        # Those with state first: only they can be refused, and the others get state here.
        order = sorted(values, key=lambda p: not is_begun(self._state.get(p)))
        return values, dict(zip(order, self._entries(order)))

    def _write_masters(self, values, entries):
        for p, value in values.items():
            row, weight = self._contiguous(p, entries[p])
            encode(row, _abi.WEIGHT, part_of(p, value), weight.device)
            if entries[p].strided:
                local(p).detach().copy_(weight)

    def master_state_dict(self, model):
        """A copy of model.state_dict() with floats in fp32, and the optimizer's extra bits in the weights."""
        wide, named, made = self.master_weights(), dict(model.named_parameters(remove_duplicate=False)), {}
        for name, value in model.state_dict().items():
            if (p := named.get(name)) in wide:
                value = wide[p]
            elif isinstance(value, torch.Tensor):
                to = torch.promote_types(value.dtype, torch.float32)
                value = value.to(to if value.is_floating_point() else value.dtype, copy=True)
            made[name] = value
        return made

    def load_master_state_dict(self, model, state_dict, strict=True):
        """Loads weights of any precision; what a parameter cannot show goes into its extra bits."""
        named, mine = dict(model.named_parameters()), set(self._own_params())
        wide = {named[name]: value for name, value in state_dict.items() if named.get(name) in mine}
        rest = {name: value for name, value in state_dict.items() if named.get(name) not in mine}
        own = model.state_dict(keep_vars=True)
        missing = [name for name, p in named.items() if p in mine and name not in state_dict]
        unexpected = [name for name in rest if name not in own]
        if strict and (missing or unexpected):
            found = _abi.said(("lack {}", missing), ("have {}, which the model has not", unexpected))
            raise UsageError(f"the weights {found}; pass strict=False to load those that are in both")
        for name, value in rest.items():
            shapes = [tuple(x.shape) for x in (value, own.get(name)) if isinstance(x, torch.Tensor)]
            if len(set(shapes)) > 1:
                raise UsageError(f"{name} has shape {shapes[0]} in the weights and {shapes[1]} in the model")
        ready = self._ready_masters(wide)
        model.load_state_dict(rest, strict=False)
        self._write_masters(*ready)

    def _all_params(self):
        return [p for group in self.param_groups for p in group["params"]]

    def _own_params(self):
        """Those that it could step."""
        return [p for p in dict.fromkeys(self._all_params()) if p.dtype in NAMES]

    # ---- Saving and loading ----

    def state_dict(self, *, as_="scruple"):
        """Planes as they are stored; with as_="torch" plain fp32 moments, which torch.optim loads."""
        for hook in self._optimizer_state_dict_pre_hooks.values():
            hook(self)
        with self._lock:
            self._settle()
            made = state_files.save(self, as_)
        for hook in self._optimizer_state_dict_post_hooks.values():
            result = hook(self, made)
            made = made if result is None else result
        return made

    @torch.no_grad()
    def load_state_dict(self, state_dict):
        """Takes a state_dict() of ours, or of torch.optim's or FlashOptim's optimizer of the same kind."""
        if self._handle is not None:
            self._handle.before_load()
        state_dict = dict(state_dict) if isinstance(state_dict, dict) else state_dict
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            result = hook(self, state_dict)
            state_dict = state_dict if result is None else result
        self._settle()
        state_files.load(self, state_dict)
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    def __getstate__(self):
        self._settle()
        return {**super().__getstate__(), "_offload": self._offload}

    def __setstate__(self, state):
        self._forget()
        super().__setstate__(state)
        held = self.__dict__.pop("state")  # it was written past the property
        self._made, self.state = True, {key: copy_of(key, x) for key, x in held.items()}


def _memory(tensor):
    return memory_of(tensor).untyped_storage().data_ptr()


def _address(tensor):
    return None if tensor is None else tensor.data_ptr()

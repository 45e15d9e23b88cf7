"""What all of scruple.torch's optimizers share: a torch.optim.Optimizer whose state is planes in small
formats and whose step is one library call per device. The formulas are in the library."""

import contextlib
import copy
import ctypes
import difflib
import functools
import inspect
import math
import numbers
import threading
import warnings
import weakref
from ctypes import byref
from typing import NamedTuple

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from .. import _abi
from .._abi import UsageError, library
from . import state as state_files
from .engines import engine_for
from .planes import NAMES, Layout, count_of, decode, encode, is_begun, is_ours, meaning, start, start_extra
from .shards import groups_of, like, local, offset_of, part_of
from .table import Table, check_gradient, object_addresses
from .watched import State, States, copy_of, version

_NONE = object_addresses([None])
# What decides how state is stored, beside hyperparameters that ask for exact moments.
_SETTINGS = ("recipe", "weights", "moments", "rounding", "decoupled_weight_decay")


class Entry(NamedTuple):
    """One parameter as the library sees it; made anew when its memory has moved."""

    layout: Layout
    row: _abi.Tensor
    planes: list  # alive while the row points there
    address: int
    strided: bool
    turn: int  # of the groups that it was made for

    def fits(self, weight, turn):
        """Whether it can be used again for this weight, under these groups."""
        known = (self.turn, self.address, self.row.size, self.layout.dtype, not self.strided)
        here = (turn, weight.data_ptr(), weight.numel(), weight.dtype, weight.is_contiguous())
        return known == here and (not self.planes or self.planes[0].device == weight.device)

    def by_plane(self):
        return zip(self.layout.planes, self.planes)

    def values(self, slot, weight):
        return decode(self.row, self.layout.index(slot), weight.shape, self.planes[0].device)


class Optimizer(torch.optim.Optimizer):
    """The base class. `rule` is the update rule's name in the library."""

    rule = ""
    _step_supports_amp_scaling = True  # GradScaler hands over its scale and its flag, and waits for neither

    def __init__(
        self,
        params,
        hypers,
        *,
        recipe="scruple",
        weights=None,
        moments=None,
        rounding=None,
        seed=0,
        maximize=False,
        capturable=False,
        foreach=None,
        fused=None,
        differentiable=False,
    ):
        if differentiable:
            raise UsageError("differentiable=True: the step runs outside autograd; use torch.optim for it")
        stored = dict(recipe=recipe, weights=weights, moments=moments, rounding=rounding, seed=seed)
        # Keys of every group, so that torch.distributed.checkpoint carries them.
        stored.update(version=state_files.VERSION, formats=None)
        self._forget()
        self.defaults = {**hypers, **stored, "maximize": maximize, "capturable": capturable}
        self._new_rule(self.defaults)  # looks at hyperparameters first, as torch does
        self._made = False  # all of its groups
        super().__init__(params, self.defaults)
        self._check_weights()
        self._made = True

    def __init_subclass__(cls, **how):
        """help() and those who read signatures find what `options` stands for."""
        super().__init_subclass__(**how)
        own, shared = (inspect.signature(kind.__init__).parameters for kind in (cls, Optimizer))
        named = [x for x in own.values() if x.kind is not x.VAR_KEYWORD]
        more = [x for x in shared.values() if x.kind is x.KEYWORD_ONLY and x.name not in own]
        cls.__signature__ = inspect.Signature(named[1:] + (more if len(named) < len(own) else []))

    @staticmethod
    def profile_hook_step(step):
        """torch's, with its hooks and a name for profilers, where there is one of them: it takes its time."""
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
        """torch.optim's. Where the device counts steps, who looks here waits for it."""
        with self._lock:
            for table in self._tables.values():
                table.counts.seen = True
                if table.counter is not None:
                    table.count()
            if self._handle is not None:
                self._handle._path.settle()
        return self._state

    @state.setter
    def state(self, value):
        self._settle()
        self._forget_tables()
        self._state = States(value)

    # ---- Groups and parameters ----

    def add_param_group(self, param_group):
        if self._handle is not None:
            self._handle.refuse_late("a parameter group was added")
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            self._check_group(group)
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
        for p in group["params"]:
            if p.dtype not in NAMES and not p.requires_grad:
                continue  # codes of a frozen layer, say: nobody's business until they have a gradient
            if p.layout is not torch.strided:
                raise UsageError(
                    f"a parameter of shape {tuple(p.shape)} is sparse; scruple steps dense parameters"
                )
            if any(stride == 0 and size > 1 for size, stride in zip(p.shape, p.stride())):
                raise UsageError(
                    f"a parameter of shape {tuple(p.shape)} has strides {p.stride()}: several of its "
                    "elements share one place in memory; use .contiguous() on it first"
                )
            Layout(rule, group, p.dtype, p.numel())

    def _check_weights(self):
        """Refuses weights in 16 bits where every parameter is its own full-width weight."""
        kinds = {NAMES.get(p.dtype) for p in self._all_params() if p.requires_grad}
        for named in (group["weights"] or "fp32" for group in self.param_groups):
            if kinds == {"fp32"} and not named.startswith("fp32"):
                raise UsageError(
                    f"weights={named!r}, and every parameter is in fp32; cast the model first (cast_model), or leave "
                    "weights out"
                )

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
        self._rules, self._cells, self._handle = {}, {}, None
        self._turn = 0  # of groups, parameters and formats
        self._lock = threading.RLock()  # a state dict may be taken by another thread
        self._forget_tables()

    def _forget_tables(self):
        self._tables, self._owner, self._buckets = {}, {}, None
        self._turn += 1

    def _rule(self, index, device):
        name = self._rule_of(self.param_groups[index])
        key = (index, device, name)
        if key not in self._rules:
            self._rules[key] = _abi.Rule(name)
        return self._rules[key]

    def _rule_of(self, group):
        return self.rule

    def _update_rules(self):
        hypers = list(map(self._hypers, self.param_groups))
        if self._has_changed(hypers):
            self._settle()
            self._forget_tables()
            self._make_buckets(hypers)
            self._check_kept()
        for (index, device, name), rule in self._rules.items():
            if name == self._rule_of(self.param_groups[index]):
                self._update_rule(rule, self.param_groups[index], hypers[index], device)
        if self._state.changed:
            self._adopt()

    def _adopt(self):
        """Takes over what users have written into the state since the last look."""
        changed = [p for p in self._state.changed if p in self._number and p.dtype in NAMES]
        held = {p: self._state.get(p) for p in changed}
        written = [p for p, x in held.items() if not isinstance(x, State) or not x.is_intact(p)]
        if self._handle is not None:
            self._handle._path.replace(written)
        for p in written:
            if p in self._owner:
                self._settle_table(self._owner[p])
        for p in written:
            if is_begun(held[p]):
                self._entry(p)
        self._state.changed.clear()
        self._state.changed.update((p, None) for p in changed if getattr(self._state.get(p), "lent", None))

    def _has_changed(self, hypers):
        """Whether somebody has moved the model, changed a group's parameters or formats, taken state away, or
        given a hyperparameter a value for which the rule keeps another slot."""
        if self._buckets is None:
            return True
        moved = any(local(params[0]).device != device for device, params in self._buckets.items())
        return moved or list(map(self._asks, self.param_groups, hypers)) != self._seen

    def _asks(self, group, hypers):
        """What of a group decides rows, slots and formats."""
        slots = list(map(bool, hypers.values()))
        return object_addresses(group["params"]), slots, [group.get(name) for name in _SETTINGS]

    def _check_kept(self):
        """Refuses groups by which what stands in the state would be read as something else."""
        try:
            for p in self._number:
                if isinstance(self._state.get(p), State) and self._state[p].entry is not None:
                    self._check_meaning(p, self._layout(p))
        except UsageError:
            self._buckets = None  # to be looked at again
            raise

    def _check_meaning(self, p, layout):
        state, now = self._state[p], dict(map(meaning, layout.described))
        was = {} if state.entry is None else dict(map(meaning, state.entry.layout.described))
        left = {plane.name: held for plane, held in state.entry.by_plane()} if was else {}
        for name in was:  # in its order: the same sentence every time
            if name in now and was[name] != now[name] and dict.get(state, name) is left.get(name):
                raise UsageError(
                    f"{name} of a parameter of shape {tuple(p.shape)} is held as {was[name]}, and would be "
                    f"{now[name]}: its group was changed, or it was cast, after its first step. Set that "
                    "back; or make a new optimizer, load this one's state_dict(as_='torch') into it, and its "
                    "master_weights() with set_master_weights"
                )

    def _make_buckets(self, hypers):
        """The parameters that can go into one call: those of one device."""
        self._buckets, self._number = {}, {}
        self._seen = copy.deepcopy(list(map(self._asks, self.param_groups, hypers)))
        for index, group in enumerate(self.param_groups):
            for p in group["params"]:
                if p in self._number:  # repeated, of which torch warns
                    continue
                self._number[p] = len(self._number), index
                device = local(p).device
                self._rule(index, device)
                self._buckets.setdefault(device, []).append(p)

    def _entry(self, p):
        """Makes the parameter's state where it has none, and takes over what a user has written there."""
        if local(p).device.type not in ("cpu", "cuda"):
            engine_for(local(p).device)  # says so, before any state is made
        weight, state = local(p).detach(), self._state.of(p)
        if (entry := state.entry) is not None and entry.fits(weight, self._turn) and state.is_intact(p):
            entry.row.step = count_of(state) + 1
            return entry
        layout = self._layout(p)
        self._check_meaning(p, layout)
        planes, values, steps = layout.read(p, state)
        row = layout.place(weight, planes, self._number[p][0], offset_of(p))
        row.step = steps + 1
        if not is_begun(state):
            start(row, weight, planes)
        elif planes.get("extra") is not state.get("extra"):
            start_extra(weight, planes)
        for slot, found in values.items():
            array, part = layout.index(slot), part_of(p, found)
            here = decode(row, array, weight.shape, weight.device)
            if not torch.equal(here, part.to(here)):  # else it was only read
                encode(row, array, part, weight.device)
            state.lent[slot] = weakref.ref(found), version(found)
        for slot in layout.coded:
            dict.pop(state, slot, None)
        dict.update(state, planes)
        strided = not weight.is_contiguous()
        state.entry = Entry(layout, row, list(planes.values()), weight.data_ptr(), strided, self._turn)
        if state.get("step") is not state.shown or state.steps != steps or state.shown is None:
            state.show(steps)
        return state.entry

    @contextlib.contextmanager
    def _tried(self, p):
        """The parameter's entry. One that was never stepped has state while this lasts, and none behind it:
        that would fix its master copy now, and weights may yet be loaded into it."""
        fresh = not is_begun(self.state.get(p))
        try:
            yield self._entry(p)
        finally:
            if fresh:
                own = {name: value for name, value in self.state.pop(p, {}).items() if not is_ours(name)}
                self.state.update({p: own} if own else {})

    def _layout(self, p):
        """Formats of a parameter, whether it has state or not."""
        if self._buckets is None:
            self._make_buckets(list(map(self._hypers, self.param_groups)))
        index, device = self._number[p][1], local(p).device
        rule, group = self._rule(index, device), self.param_groups[index]
        self._update_rule(rule, group, self._hypers(group), device)
        return Layout(rule, group, p.dtype, p.numel())

    # ---- Tables ----

    def _settle_table(self, table):
        """Brings its step counts into the state, and drops it."""
        if self._tables.pop(table.key, None) is None:
            return
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
        if _NONE in object_addresses(gradients):
            here = [g is not None for g in gradients]
            key = (*key, bytes(here))
            params, gradients = ([x for x, has in zip(xs, here) if has] for xs in (params, gradients))
        if not params:
            return None
        table = self._tables.get(key)
        if table is None:
            for p, g in zip(params, gradients):  # before any state is made
                check_gradient(p, g)
        elif table.fill(gradients):
            return table
        for p in params:  # in another table until now, or moved
            if p in self._owner:
                self._settle_table(self._owner[p])
        entries = [self._entry(p) for p in params]
        table = self._tables[key] = Table(key, params, entries, [self._state[p] for p in params])
        self._owner.update(dict.fromkeys(params, table))
        table.fill(gradients)
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
            found_inf, scale = self._of_scaler("found_inf"), self._of_scaler("grad_scale")
            if max_norm is not None and tables:
                self.last_norm, found_inf, clip = self._measure(tables, max_norm, scale, found_inf)
            elif max_norm is not None and self._handle is not None:
                raise UsageError(
                    "clipping in the step: release_gradients has taken the gradients inside backward; give "
                    "it max_norm instead (policy 'compressed')"
                )
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
        buckets = self._buckets.items()
        found = [self._filled((device,), params, [p.grad for p in params]) for device, params in buckets]
        return [table for table in found if table is not None]

    @torch._disable_dynamo
    @torch.no_grad()
    def _found_inf(self):
        """{device: 1 where a gradient there is not finite}, for LossScaler."""
        flags = {}
        for table in self._present():
            total = self._sum_squares([table], table.device)
            flags[table.device] = (~torch.isfinite(total)).to(torch.float32).view(1)
        return flags

    def clip_and_step(self, max_norm):
        """step(max_norm=max_norm), and the norm before clipping as a tensor on the gradients' device; None
        where no parameter has a gradient."""
        self.last_norm = None
        self.step(max_norm=max_norm)
        return self.last_norm

    def _of_scaler(self, name):
        value = getattr(self, name, None)
        return value if isinstance(value, torch.Tensor) else None

    def _take(self, tables, scale, found_inf, clip):
        counted = found_inf is not None or any(group.get("capturable") for group in self.param_groups)
        for table in tables:
            held = [
                None if x is None else x.to(table.device, torch.float32, non_blocking=True)
                for x in (found_inf, clip, scale)
            ]
            options = _abi.StepOptions(ctypes.sizeof(_abi.StepOptions), 1.0, *map(_address, held), None, 0, 1)
            table.step(options, counted)

    def _measure(self, tables, max_norm, scale, found_inf):
        """Norm, flag and factor of all gradients, on the first table's device: the host waits for none."""
        device = tables[0].device
        max_norm = 0.0 if math.isinf(max_norm) else max_norm  # the library's word for no limit
        norm = torch.empty((), dtype=torch.float64, device=device)
        flag, clip = torch.empty((), device=device), torch.empty((), device=device)
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
        found = {}
        for p in self._own_params():
            if not is_begun(self.state.get(p)):
                found[p] = p.detach().to(torch.float32, copy=True)
                continue
            row, weight = self._contiguous(p, self._entry(p))
            found[p] = like(p, decode(row, _abi.WEIGHT, weight.shape, weight.device), 1)
        return found

    def _contiguous(self, p, entry):
        """Its row over a weight in one run of memory, and that weight: the parameter's own, or a copy."""
        row, weight = _abi.Tensor.from_buffer_copy(entry.row), local(p).detach().contiguous()
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
                raise UsageError(
                    f"a value for a parameter of shape {tuple(p.shape)} that is not in the optimizer"
                )
            if not isinstance(value, torch.Tensor) or not value.is_floating_point() or value.is_meta:
                what = f"{value.dtype} on {value.device}" if isinstance(value, torch.Tensor) else repr(value)
                raise UsageError(
                    f"a value for a parameter of shape {tuple(p.shape)} is {what}; it must be numbers"
                )
            if tuple(value.shape) != tuple(p.shape):
                raise UsageError(
                    f"a value of shape {tuple(value.shape)} for a parameter of shape {tuple(p.shape)}"
                )
        memory = {_memory(p) for p in values}
        values = {
            p: value.clone() if _memory(value) in memory and value.data_ptr() != p.data_ptr() else value
            for p, value in values.items()  # of another parameter, which may be written first
        }
        # Those with state first: only they can be refused, and the others get state here.
        order = sorted(values, key=lambda p: not is_begun(self._state.get(p)))
        return values, {p: self._entry(p) for p in order}

    def _write_masters(self, values, entries):
        for p, value in values.items():
            row, weight = self._contiguous(p, entries[p])
            encode(row, _abi.WEIGHT, part_of(p, value), weight.device)
            if entries[p].strided:
                local(p).detach().copy_(weight)

    def master_state_dict(self, model):
        """A copy of model.state_dict() with floats in fp32, and the optimizer's extra bits in the weights."""
        wide = self.master_weights()
        named = dict(model.named_parameters(remove_duplicate=False))
        made = {}
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
        named = dict(model.named_parameters())
        mine = set(self._own_params())
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
            raise UsageError(
                "loading while release_gradients is at work; handle.remove() first, load, and call it again "
                "(with accelerate after prepare(); with the Trainer by scruple.torch.transformers)"
            )
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
        return super().__getstate__()

    def __setstate__(self, state):
        self._forget()
        super().__setstate__(state)
        held = self.__dict__.pop("state")  # it was written past the property
        self._made, self.state = True, {key: copy_of(key, x) for key, x in held.items()}


def _memory(tensor):
    return local(tensor).untyped_storage().data_ptr()


def _address(tensor):
    return None if tensor is None else tensor.data_ptr()

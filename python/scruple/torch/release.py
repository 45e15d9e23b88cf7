"""Gradients that do not wait for the step: each is stepped with or compressed inside backward, and freed.

A hook on every parameter collects gradients until a bucket is full, so that small parameters share a call.
Plain release hands a bucket to the optimizer's own step. Everything else (compressed accumulators, clipping,
loss scaling, accumulation) is the library's sink, docs/gradients.md.
"""

import contextlib
import ctypes
import gc
import math
import operator
import sys
import threading
import weakref
from ctypes import byref
from functools import partial

import torch
import torch.utils.checkpoint

from .. import _abi
from .._abi import UsageError, library
from .coded import form_of, planes_of, with_codes
from .engines import engine_for
from .optimizer import Optimizer
from .planes import is_begun, sized
from .shards import groups_of, is_sharded, local
from .table import Counts, Pieces, Rows

POLICIES = {"released": _abi.RELEASED, "compressed": _abi.COMPRESSED}
ACCUMULATORS = ("root8", "int8", "bf16", "fp32")
BUCKET = 32 << 20  # bytes of gradients that are collected before a call
KNOWN = weakref.WeakSet()  # scalers that were given to release_gradients
SECOND = "a second backward before opt.step(): add the losses, give accumulate= (the rest of an incomplete step: "
SECOND += "handle.flush()), or use handle.paused()"


def release_gradients(
    model, opt, policy="released", *, accumulate=None, reduction=None, accumulation=None, max_norm=None,
    tensor_norm=None, adagc=None, scaler=None, accumulator="root8", process_group=None,
):
    """From now on backward() takes the steps of `opt` for the parameters of `model`, until handle.remove().

    policy        "released": each gradient is stepped with as it arrives and freed; none is kept.
                  "compressed": each is folded into an accumulator; the step's last backward takes the step.
    accumulate    backward passes to a step; 1, or what accelerate's wrapper of `opt` says
    reduction     "mean": of their gradients, in the last backward; do not divide the loss. "sum": for loops
                  that divide it themselves, as accelerate's, the Trainer's and Lightning's. Gradients add up,
                  over `accumulate` passes at most, and opt.step() takes the step.
    accumulation  released, accumulate > 1: "momentum" (SGD, SGDW), "adama" (Adam, AdamW); with moments="fp32"
    max_norm      compressed: limit of the norm of all gradients
    tensor_norm   released: limit of each parameter's own norm
    adagc         released: lambda of AdaGC, such as 1.05
    scaler        a torch.amp.GradScaler (or LossScaler): scaler.scale in every pass, scaler.step and .update
                  after every `accumulate`-th. False: this loss is not scaled, whatever scalers others have
    accumulator   compressed: "root8", "int8", "bf16" or "fp32"
    process_group data parallelism in place of DistributedDataParallel, whose buckets keep gradients: those of
                  each backward are averaged over it (accumulators in 8 bits could not be). Weights and
                  buffers are taken from its first rank now; buffers go their own ways from there. Every rank
                  must use the same parameters in each backward.

    Keep opt.step() in the loop: it ends a step, and a second backward before it is refused. One between
    opt.step() and opt.zero_grad(), such as a GAN's through its discriminator, leaves gradients in p.grad, as
    with torch; so does one inside `with handle.paused():`, for a pass that is no training step. In a loop
    that never calls opt.step() every backward is a step.
    """
    if hasattr(opt, "gradient_state"):  # accelerate's wrapper, which knows what was left out
        steps = opt.gradient_state.num_steps
        if accumulate in (None, steps):  # accelerator.backward divides, and steps where it sees fit
            accumulate, reduction = steps, reduction or "sum"
        elif steps > 1:
            what = f"accumulate is {accumulate}, but the Accelerator has gradient_accumulation_steps={steps}"
            raise UsageError(f"{what}; leave accumulate out")
        scaler = opt.scaler or False if scaler is None else scaler
    accumulate, reduction = 1 if accumulate is None else accumulate, reduction or "mean"
    opt = inner_optimizer(opt)
    _check(model, opt, policy, accumulate, reduction, accumulation, scaler, accumulator)
    mine = set(opt._all_params())
    params = [p for p in model.parameters() if p.requires_grad and p in mine]
    if not params:
        raise UsageError("no parameter of the model that needs a gradient is in the optimizer")
    if process_group is not None:
        if any(map(is_sharded, params)):
            raise UsageError("process_group with sharded parameters: fully_shard reduces those gradients")
        _broadcast(model, process_group)  # before the optimizer takes master copies
    if scaler:
        KNOWN.add(scaler)
    opt._settle()
    opt._update_rules()
    if policy == "released" and accumulate == 1 and not (max_norm or tensor_norm or adagc or scaler):
        path = Steps(opt, params)
    else:
        options = dict(policy=POLICIES[policy], accumulation=_abi.ACCUMULATE[accumulation or "gradients"])
        options.update(micro_batches=accumulate, tensor_norm=tensor_norm or 0.0, adagc=adagc or 0.0)
        options.update(max_norm=0.0 if max_norm in (None, math.inf) else max_norm)
        path = Sinks(opt, params, options, accumulator, scaler, reduction == "sum")
    return Handle(opt, params, path, process_group, scaler is not None)


def inner_optimizer(opt):
    """That in those of accelerate and Lightning."""
    while isinstance(inside := getattr(opt, "optimizer", None), torch.optim.Optimizer):
        opt = inside
    return opt


def _check(model, opt, policy, accumulate, reduction, accumulation, scaler, accumulator):
    """What the library cannot know; the rest is refused there."""
    if not isinstance(opt, Optimizer):
        raise UsageError(f"the optimizer is a {type(opt).__name__}; it must be one of scruple.torch")
    if opt._handle is not None:
        raise UsageError("release_gradients is at work on this optimizer already; handle.remove() first")
    if isinstance(model, torch.nn.parallel.DistributedDataParallel):
        hint = "pass model.module and process_group=torch.distributed.group.WORLD, or use fully_shard"
        raise UsageError(f"the model is a DistributedDataParallel, which keeps every gradient; {hint}")
    if any(cls.__name__ == "FullyShardedDataParallel" for cls in type(model).__mro__):
        raise UsageError("FSDP1's FullyShardedDataParallel flattens parameters; use FSDP2's fully_shard")
    if not isinstance(accumulate, int) or accumulate < 1:
        raise UsageError(f"accumulate is {accumulate!r}; it must be a number of backward passes, from 1")
    if accumulation is not None and policy == "compressed":
        raise UsageError(f"accumulation={accumulation!r} is for 'released'; leave it out")
    if scaler not in (None, False) and not isinstance(scaler, torch.amp.GradScaler):
        raise UsageError(f"scaler is a {type(scaler).__name__}; it must be a GradScaler or a LossScaler")
    for name, value, known, more in (
        ("policy", policy, POLICIES, " (for stored gradients, call opt.step() after backward as ever)"),
        ("reduction", reduction, ("mean", "sum"), ""),
        ("accumulation", accumulation or "adama", ("momentum", "adama"), " (SGD and SGDW; Adam and AdamW)"),
        ("accumulator", accumulator, ACCUMULATORS, ""),
    ):
        if value not in known:
            raise UsageError(f"{name} is {value!r}; it can be {' or '.join(map(repr, known))}{more}")


def by_device(tensors):
    """{device: those there}, of parameters or gradients by the parameters' numbers in the handle."""
    found = {}
    for i, tensor in tensors.items():
        found.setdefault(local(tensor).device, {})[i] = tensor
    return found


class Steps:
    """Plain release: a bucket is a table of the optimizer's own."""

    def __init__(self, opt, params):
        self.opt, self.params = opt, params
        self.sums, self.batches = False, 0  # no backward waits for others, as in Sinks
        # Now: allocated inside backward, state would fragment the memory of activations.
        opt._entries([p for p in params if not is_begun(opt.state.get(p))])

    def add(self, gradients):
        for device, found in by_device(gradients).items():
            params = [self.params[i] for i in found]
            table = self.opt._filled((device, *found), params, list(found.values()))
            self.opt._take([table], None, None, None)

    def end(self):
        return True  # every backward is a step

    # No norms to report and no micro-batches to wait for.
    begin = flush = renew = settle = replace = report = lambda self, *_: None


class Sinks:
    """Everything that needs memory of gradients or norms: one sink of the library per device."""

    def __init__(self, opt, params, options, accumulator, scaler, sums):
        self.opt, self.params, self.options, self.accumulator = opt, params, options, accumulator
        self.written = with_codes(params)
        self.sums = sums  # gradients add up until opt.step()
        self.parts, self.released = options["micro_batches"], options["policy"] == _abi.RELEASED
        self.scaler = scaler if scaler and scaler.is_enabled() else None
        self.devices = by_device(dict(enumerate(params)))
        if len(self.devices) > 1 and (options["max_norm"] or self.scaler):
            places = ", ".join(map(str, self.devices))
            raise UsageError(f"max_norm and scaler need all on one device, not {places}; or use fully_shard")
        for p in params:
            if not local(p).is_contiguous():
                raise UsageError(f"{sized(p)} has strides {local(p).stride()}; use .contiguous() first")
        decides = options["tensor_norm"] or options["adagc"] or self.scaler
        if self.released and decides and any(map(is_sharded, params)):
            raise UsageError("'released' would clip and scale by each rank's shard; use 'compressed'")
        if len({tuple(groups_of(p)) for p in params}) > 1:
            raise UsageError("parameters are sharded over different ranks; give each kind its own optimizer")
        fresh = [p for p in params if not is_begun(opt.state.get(p))]
        self.sinks, self.replaced = {}, True  # `replaced`: planes are new, and the sinks point to old ones
        self.past = 0, 0  # steps, taken and skipped, of the sinks before these
        try:
            self.renew()
        except Exception:  # the library refuses: no trace of the attempt
            for p in fresh:
                opt.state.pop(p, None)
            opt._forget_tables()
            raise

    def renew(self):
        """Makes new sinks and drops this step's gradients: a backward failed, weights have moved, or state is new."""
        if not self.replaced:
            self.settle()
        self.batches, self.replaced = 0, False  # `batches`: backward passes of this step
        self.came = set()  # numbers of parameters that had a gradient in them
        if self.sinks:
            self.past = operator.itemgetter("steps", "skipped")(self.report())
        for sink in self.sinks.values():
            sink.close()  # before new ones take as much memory
        self.sinks = {device: Sink(self, device, held) for device, held in self.devices.items()}

    def begin(self):
        if any(sink.counts.rewritten(self.opt._looks) for sink in self.sinks.values()):
            self.replace(self.params)
        if self.replaced or self.batches == 0 and any(sink.all.moved() for sink in self.sinks.values()):
            self.renew()  # weights move as fully_shard does it with uneven shards before torch 2.8
        if self.batches == self.parts:
            raise UsageError(f"accumulate={self.parts}: call opt.step() before backward {self.parts + 1}")
        for sink in self.sinks.values():
            sink.begin(1 / self.parts if self.sums else 1)

    def add(self, gradients):
        self.came.update(gradients)
        if self.sums and self.released and self.parts > 1:
            # The sink divides by `parts`. To sum, released gradients are multiplied first, others by the loss scale.
            gradients = {i: local(g) * self.parts for i, g in gradients.items()}
        for device, found in by_device(gradients).items():
            self.sinks[device].add(found)

    def replace(self, written):
        """Users have written into the state of these parameters."""
        if not self.replaced and not set(self.params).isdisjoint(written):
            if self.batches:
                raise UsageError(f"state was written after {self.batches} micro-batches; do it between steps")
            self.settle()
            self.replaced = True

    def end(self):
        """Whether that was a step."""
        self.batches += 1
        if self.batches < self.parts:
            self._end_sinks()
        elif not self.sums:
            self._step()
        return self.batches == 0

    def flush(self):
        came, parts = self.batches, self.parts
        if came == 0:
            return
        if self.released and not self.sums:
            raise UsageError(f"moments have {came} of {parts} micro-batches; await all, or use 'compressed'")
        self.opt._update_rules()
        for sink in self.sinks.values():
            sink.begin(1 / parts if self.sums else came / parts)
        for _ in range(came, parts - 1):
            self._end_sinks()
        if self.released and came < parts:  # the last part moves the weights
            for i in list(self.came):
                self.add({i: torch.zeros_like(self.params[i])})
        self._step()

    def _end_sinks(self):
        for sink in self.sinks.values():
            try:
                library.sink_end(sink.handle)
            except UsageError:
                problem, sink.problem = sink.problem, None
                if problem is None:
                    raise
                raise _abi.Error(f"the norm could not be added up over the ranks: {problem}") from problem

    def _step(self):
        self._end_sinks()
        self.batches = 0
        self.came.clear()
        torch.autograd.graph.increment_version(self.written)
        if self.scaler is not None:
            # As after scaler.unscale_: scaler.step and scaler.update find the flag here.
            state = self.scaler._per_optimizer_states[id(self.opt)]
            state["stage"] = torch.amp.grad_scaler.OptState.UNSCALED
            state["found_inf_per_device"] = {device: sink.flag() for device, sink in self.sinks.items()}

    def settle(self):
        for sink in self.sinks.values():
            steps, norms = (ctypes.c_int64 * len(sink.params))(), (ctypes.c_double * len(sink.params))()
            engine_for(sink.device)
            library.sink_read_tensors(sink.handle, steps, norms)
            sink.counts.tell([step - 1 for step in steps])
            for state, norm in zip(sink.counts.states, norms if self.options["adagc"] else ()):
                dict.update(state, adagc_norm=norm)

    def report(self):
        sink, found = next(iter(self.sinks.values())), _abi.SinkReport()
        engine_for(sink.device)
        library.sink_read(sink.handle, byref(found))
        counts = {"steps": found.steps + self.past[0], "skipped": found.skipped + self.past[1]}
        return {"norm": found.norm, "clip": found.clip, "found_inf": bool(found.found_inf), **counts}


class Sink:
    """A scruple_sink over some parameters of one device, with memory from torch's allocator."""

    def __init__(self, path, device, numbered):
        opt, options, params = path.opt, path.options, list(numbered.values())
        self.device, self.params, self.scaler = device, params, path.scaler
        self.index = {number: i for i, number in enumerate(numbered)}
        entries = opt._entries(params)
        self.all = Rows(params, [entry.row for entry in entries], [entry.address for entry in entries])
        self.counts = Counts([opt._state[p] for p in params], self.all.rows)
        self.pieces = {}  # by the place of the first in `all`: those that were added together
        form = _abi.format_named(path.accumulator)
        # Unbiased, so that small gradients add up over micro-batches: the best of what the format can.
        rounding = max(r for r in (_abi.NEAREST, _abi.STOCHASTIC, _abi.DITHER) if form.rounds(r))
        for row in self.all.rows:
            row.arrays[_abi.GRADIENT] = _abi.Array(form.handle, None, None, rounding)
        self.blocks, self.problem = {}, None  # memory that the library has; what failed in a callback
        self.groups = groups_of(params[0])
        # What the library keeps pointers to.
        self.callbacks = _abi.ALLOC(self._alloc), _abi.FREE(self._free), _abi.REDUCE(self._reduce)
        # Without a scaler, what undoes a division by too many micro-batches.
        scales = path.scaler is not None or not path.released and path.parts > 1
        self.scale = torch.ones((), device=device) if scales else None
        made = _abi.options(_abi.SinkOptions, **options)
        made.alloc, made.free = self.callbacks[:2]
        if self.groups and not path.released:  # which takes no norm over parameters
            made.reduce = self.callbacks[2]
        if self.scale is not None:
            made.loss_scale = self.scale.data_ptr()
        if options["adagc"]:
            norms = (ctypes.c_double * len(params))(*(opt.state[p].get("adagc_norm", 0.0) for p in params))
            made.adagc_norms = ctypes.cast(norms, ctypes.c_void_p)
        self.handle = ctypes.c_void_p()
        library.sink_create(engine_for(device), self.all.rows, len(params), byref(made), byref(self.handle))

    def close(self):
        if getattr(self, "handle", None):
            library.sink_destroy(self.handle)
        self.handle = self.callbacks = None  # which make a cycle

    __del__ = close

    # Called by the library. An exception cannot pass through it: torch's goes into `problem`.
    def _alloc(self, _, size):
        try:
            block = torch.empty(size, dtype=torch.uint8, device=self.device)
        except RuntimeError:  # out of memory; the library says so
            return None
        self.blocks[block.data_ptr()] = block
        return block.data_ptr()

    def _free(self, _, address, __):
        self.blocks.pop(address, None)

    def _reduce(self, _, address):
        try:
            total = tensor_at(address, torch.float64, self.device)
            for group in self.groups.values():
                torch.distributed.all_reduce(total, group=group)
            return 0
        except Exception as problem:  # noqa: BLE001 - told at the end
            self.problem = problem
            return 1

    def begin(self, share):
        engine_for(self.device)
        if getattr(self.scaler, "_scale", None) is not None:
            self.scale.copy_(self.scaler._scale, non_blocking=True).mul_(share)
        elif self.scale is not None:
            self.scale.fill_(share)

    def add(self, gradients):
        places = [self.index[number] for number in gradients]
        found = self.pieces.get(places[0])
        if found is None or found.places != places:
            rows = ([held[i] for i in places] for held in (self.params, self.all.rows, self.all.addresses))
            found = self.pieces[places[0]] = Pieces(places, *rows)
        if moved := found.moved():
            raise UsageError(f"{sized(moved[0])} has moved in a step; handle.remove(), and release again")
        kept = found.lend(list(gradients.values()))  # noqa: F841 - alive until the call has been queued
        engine_for(self.device)
        library.sink_add(self.handle, found.pieces, len(found.pieces))

    def flag(self):
        return tensor_at(library.sink_found_inf(self.handle), torch.float32, self.device).clone()


def tensor_at(address, dtype, device):
    """One value in the engine's memory as a tensor over the same memory."""
    if device.type == "cpu":
        return torch.frombuffer((ctypes.c_char * dtype.itemsize).from_address(address), dtype=dtype)
    described = {"data": (address, False), "shape": (1,), "typestr": f"<f{dtype.itemsize}", "version": 3}
    return torch.as_tensor(type("Cell", (), {"__cuda_array_interface__": described})(), device=device)


class Handle:
    """What release_gradients returns."""

    def __init__(self, opt, params, path, process_group, knows_scaler):
        self._opt, self._params, self._path, self._lock = opt, params, path, threading.RLock()
        # Whether gradients are taken, opt.zero_grad() came since the last step, this is inside paused().
        self._armed, self._zeroed, self._paused = True, False, False
        self._left, self._done = {}, set()  # gradients left in p.grad; parameters stepped since opt.step()
        self._loop = None  # "steps": it calls opt.step(); "twice": two backwards came before it did
        self._folded = False  # whether a backward that was no whole step has come since opt.step()
        self._dropped = None  # such passes: "once", or "in vain" where opt.step() then took no step
        self._group, self._knows_scaler = process_group, knows_scaler
        self._task = None  # the backward pass that is running
        self._waiting, self._size = {}, 0  # gradients that have come, by their parameters' numbers here
        self._used = set()  # those whose gradients of this backward have been used
        self._flying = {}, []  # gradients that are being averaged over ranks, and what to wait for
        opt._handle = self
        arrivals = [partial(self._arrive, i, local(p).numel()) for i, p in enumerate(params)]
        self._hooks = list(map(torch.Tensor.register_post_accumulate_grad_hook, params, arrivals))
        self._set_late_hooks(arrivals)

    def remove(self):
        """Gradients stay in p.grad again, for opt.step()."""
        self._set_late_hooks([None] * len(self._params))
        if self._hooks:
            self._opt._settle()
            self._opt._handle = None
            self._opt._forget_tables()
        while self._hooks:
            self._hooks.pop().remove()

    def _set_late_hooks(self, arrivals):
        for p, arrival in zip(self._params, arrivals):
            if form_of(p):
                p.store.hook = arrival

    def report(self):
        """norm, clip, found_inf, steps and skipped: waits for the device. None for plain release."""
        return self._path.report()

    @torch.no_grad()
    def flush(self):
        """Takes the step now, with the mean (reduction "sum": the sum) of the passes that have come, if any.
        For the end of an epoch: those of an incomplete step would count towards the next one."""
        with self._lock:
            if self._task is not None:
                self._abandon()
            self._path.flush()
            self._folded = False

    @contextlib.contextmanager
    def paused(self):
        """Inside, backward leaves gradients in p.grad: for a pass that is no training step."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    # ---- Around backward: what the optimizer tells ----

    def before_step(self):
        """Refuses a second backward, and gradients in p.grad that opt.step() would step with."""
        if self._loop == "twice":
            self._loop = "steps"
            raise UsageError(SECOND)
        for i in list(self._left):
            self._refuse_left(i, self._params[i].grad)

    def _refuse_left(self, i, gradient):
        if self._left.pop(i)() is gradient:
            what = f"{sized(gradient)} has a gradient of no training step: in handle.paused(), or after opt.step()"
            raise UsageError(f"{what}. Call opt.zero_grad() before every training pass, or before none")

    def before_load(self):
        """State may be loaded between steps into coded weights, which live under a handle from the start."""
        if not any(map(form_of, self._params)):
            hint = "(with accelerate after prepare(); with the Trainer by scruple.torch.transformers)"
            raise UsageError(f"load under release_gradients; handle.remove() first, and release again {hint}")
        if self._path.batches:
            what = f"loading after {self._path.batches} micro-batches would lose their gradients"
            raise UsageError(f"{what}; load after opt.step() or opt.zero_grad()")
        self._path.settle()
        self._path.replaced = True

    def refuse_stored(self, what):
        """Plain release leaves gradients that it did not take to opt.step()."""
        if not isinstance(self._path, Steps):
            again = "compress_weights" if any(map(form_of, self._params)) else "release_gradients"
            hint = f"call handle.remove(), opt.zero_grad() and {again} again"
            raise UsageError(f"{what} has no part in accumulation and clipping; {hint}")

    def after_step(self):
        self._loop, self._folded, took = "steps", False, bool(self._done)
        if self._path.sums:
            took = self._path.batches > 0
            self.flush()
        self._dropped = "in vain" if self._dropped and not took else None
        if not self._path.batches:  # else more micro-batches come
            if took:  # in a loop that calls opt.zero_grad() the next training pass comes after that
                self._armed = not self._zeroed
            self._zeroed = False
            self._done.clear()

    def before_zero_grad(self):
        if self._loop == "steps" and self._done or self._folded and self._path.released:
            hint = "Call opt.step() after a training pass; put a pass that is none inside `with handle.paused():`"
            raise UsageError(f"opt.zero_grad() before opt.step(): weights or moments have moved. {hint}")
        if self._folded:  # As torch drops gradients. Who drops twice, and took no step between, would drop all.
            if self._dropped == ("in vain" if self._loop == "steps" else "once"):
                raise UsageError("opt.zero_grad() drops all micro-batches; call it after opt.step()")
            self._dropped = "once"
            self._abandon()
        self._armed = self._zeroed = True
        self._left.clear()

    # ---- Inside backward ----

    def _arrive(self, i, length, p):  # without no_grad around it, which costs as much as all the rest
        with self._lock:
            if not self._hooks:  # removed
                return
            if self._paused or not self._armed:
                self._left[i] = weakref.ref(p.grad)
                return
            if i in self._left:
                self._refuse_left(i, p.grad)
            if i in self._done:
                if self._loop == "steps":
                    p.grad = None
                    raise UsageError(SECOND)
                self._loop = "twice"
            # Not left in p.grad: what a failed backward leaves there would be added to the next one's.
            gradient, p.grad = p.grad, None
            if gradient is None:
                return
            if torch._C._current_graph_task_id() != self._task:
                self._begin()
            if i in self._used:
                raise UsageError(f"{sized(p)} is shared by reentrant checkpoints; use use_reentrant=False")
            if i in self._waiting:
                with torch.no_grad():
                    self._waiting[i] = self._waiting[i] + gradient
                return
            self._waiting[i] = gradient
            self._size += length * gradient.itemsize
            if self._size >= BUCKET:
                self._hand_over()

    @torch.no_grad()
    def _begin(self):
        """For the first gradient of a backward, or of one inside it."""
        if self._task is not None and self._callback() is not None and _is_nested():
            return
        if not self._knows_scaler:
            _refuse_scaled_losses()
            self._knows_scaler = True
        if self._task is not None:
            self._abandon()
        if _is_nested() and not isinstance(self._path, Steps):  # the end cannot be seen from there
            raise UsageError("backward begins inside a reentrant checkpoint; use use_reentrant=False")
        self._opt._update_rules()
        self._path.begin()
        self._task = torch._C._current_graph_task_id()
        callback = self._near_end  # which the backward holds until its end, whichever that is
        self._callback = weakref.ref(callback)
        torch.autograd.Variable._execution_engine.queue_callback(callback)

    @torch.no_grad()
    def _abandon(self):
        """The step begins anew: the last backward ended in an exception, or was no training pass."""
        self._task, self._waiting, self._size, self._flying, self._folded = None, {}, 0, ({}, []), False
        self._used.clear()
        self._path.renew()

    def _near_end(self):
        # FSDP2 reduces its last gradients in a callback of its own. One queued from within one comes last.
        torch.autograd.Variable._execution_engine.queue_callback(self._end)

    @torch.no_grad()
    def _end(self):
        with self._lock:
            self._hand_over()
            self._land()
            self._folded = not self._path.end()
            if not self._folded:
                self._dropped = None
                self._done.update(self._used if isinstance(self._path, Steps) else range(len(self._params)))
            self._used.clear()
            self._task = None

    @torch.no_grad()
    def _hand_over(self):
        gradients, self._waiting, self._size = self._waiting, {}, 0
        self._used.update(gradients)
        if self._group is None:
            self._path.add(gradients)
        elif gradients:
            flying = _average(gradients, self._group)
            self._land()  # the bucket before this one, while this one flies
            self._flying = flying

    def _land(self):
        (means, works), self._flying = self._flying, ({}, [])
        for work in works:
            work.wait()
        self._path.add(means)


def _refuse_scaled_losses():
    """Refuses a loss that a GradScaler scales of which release_gradients does not know: weights would move too far, and
    torch's scaler.update() would fail only after the first step. A gradient does not tell it, so this looks for such a
    scaler among the garbage collector's objects: once, before a weight moves (58 ms for 221,000 objects on a
    Neoverse-V1). Tried with CPython 3.11 and 3.12."""
    for generation in (0, 2):  # one that was dropped may wait for a whole collection, which takes its time
        gc.collect(generation)
        scalers = [x for x in gc.get_objects() if issubclass(type(x), torch.amp.GradScaler)]
        if all(x in KNOWN or getattr(x, "_scale", None) is None for x in scalers):
            return
    hint = "give it as scaler=, or scaler=False where this loss is not scaled"
    raise UsageError(f"a GradScaler has scaled a loss, and weights would move as much too far; {hint}")


def _is_nested():
    """Whether this runs in a backward that a reentrant checkpoint started inside another."""
    frame, place = sys._getframe(), (torch.utils.checkpoint.__file__, "backward")
    while frame is not None and (frame.f_code.co_filename, frame.f_code.co_name) != place:
        frame = frame.f_back
    return frame is not None


def _average(gradients, group):
    """Starts the means, one message for all gradients of a dtype: views of them, and what to wait for."""
    kinds, means, works = {}, {}, []
    for i, g in gradients.items():
        kinds.setdefault((g.dtype, g.device), {})[i] = g
    for found in kinds.values():
        flat = [g.contiguous().view(-1) for g in found.values()]
        flat = torch.cat(flat) if len(flat) > 1 else flat[0]
        flat.mul_(1.0 / torch.distributed.get_world_size(group))
        works.append(torch.distributed.all_reduce(flat, group=group, async_op=True))
        parts = flat.split([g.numel() for g in found.values()])
        means.update({i: part.view(g.shape) for (i, g), part in zip(found.items(), parts)})
    return means, works


def _broadcast(model, group):
    first = torch.distributed.get_global_rank(group, 0)
    held = [x for p in (*model.parameters(), *model.buffers()) for x in (planes_of(p) or (p.detach(),))]
    for tensor in held:
        values = tensor.contiguous()
        torch.distributed.broadcast(values, first, group=group)
        if values.data_ptr() != tensor.data_ptr():
            tensor.copy_(values)

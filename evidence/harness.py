"""What the tasks share: the rows, the loop, what is measured of a run, and its JSON line.

A task's module has tasks(data, small, device), which gives a list of tasks. A task has

  name, metric             the table's, and which of the metrics leads it
  steps, optimizer, hypers of the reference, the same for every row
  model()                  a fresh model on the CPU, fp32
  batch(generator)         tensors on the task's device, one element of each for a sample
  loss(model, batch)       a scalar; models cast what they read
  evaluate(model)          {metric: value, ...}

and, where it wants them,

  rows                     other rows than ROWS
  rate(step)               the learning rate as a share of the peak; else warm-up and a cosine
  autocast                 True: on a GPU, weights in fp32 are multiplied in bf16, as mixed precision does
  row                      is set to the row that runs, before anything is asked of it
  begin                    what tells its first weights from others, where they are not made by the seed alone
  compiled                 True: on a GPU, loss() gets the model compiled
  watches                  True: a run says which share of the weights a step leaves as they are, and its peak of memory
  finished(model, row, seed)   called after the last step, before evaluate()
  needs(row, seed)         True: run it, though its line is there: what finished() keeps is not
"""

import contextlib
import dataclasses
import datetime
import functools
import gc
import importlib
import importlib.metadata
import importlib.util
import math
import platform
import re
import statistics
import subprocess
import time

import gather
import torch

import scruple
import scruple.torch as st


@dataclasses.dataclass(frozen=True)
class Row:
    """Who steps. `recipe`: ours; `other`: another's class, "module:name"; neither: torch.optim."""

    name: str
    dtype: torch.dtype = torch.bfloat16
    recipe: str = None
    gradients: str = "stored"  # "coded": compressed, and weights are codes
    other: str = None  # with {} for the rule's name
    options: dict = dataclasses.field(default_factory=dict)  # more arguments of the optimizer
    passes: int = 1  # micro-batches that a batch is cut into
    accumulator: str = "root8"  # of compressed gradients
    loss_scale: float = None
    rate: float = 1.0  # of the task's learning rate
    on_cpu: bool = False  # another's that steps there, too

    def missing(self, kind, device):
        """Why it cannot run here, or None."""
        if self.name == LPMM and kind != "SGD":
            return "is for SGD"
        if self.other is None:
            return None
        module, name = self.other.format(kind).split(":")
        package = module.split(".")[0]
        if importlib.util.find_spec(package) is None:
            return f"{package} is not installed"
        if device.type != "cuda" and not self.on_cpu:
            return f"{package} needs a GPU"
        return None if hasattr(importlib.import_module(module), name) else f"{package} has no {name}"

    def optimizer(self, kind, model, hypers):
        params = [p for p in model.parameters() if p.requires_grad]
        if self.recipe is not None:
            opt = getattr(st, kind)(params, recipe=self.recipe, **hypers, **self.options)
            more = {"accumulate": self.passes, "accumulator": self.accumulator, "scaler": False}
            if self.gradients == "coded":
                st.compress_weights(model, opt, **more)
            elif self.gradients != "stored":
                st.release_gradients(model, opt, self.gradients, **more)
            return opt
        if self.other is None:
            return getattr(torch.optim, kind)(params, fused=True, **hypers, **self.options)
        module, name = self.other.format(kind).split(":")
        return getattr(importlib.import_module(module), name)(params, **hypers, **self.options)


REFERENCE = Row(gather.REFERENCE, torch.float32)
LPMM = "lpmm's momentum"
COINED = "scruple, no extra bits"  # stochastically rounded weights: 4.1 bytes with gradients released
COINS = {"bf16_stochastic_round": True}
# The peers as their own pages show them: bitsandbytes beside weights in fp32, torchao with bf16 weights that are
# rounded stochastically, FlashOptim with its 24-bit weights.
ROWS = (
    REFERENCE,
    *(Row(recipe, recipe=recipe) for recipe in ("mixed", "split", "scruple", "scant", "flash")),
    Row(LPMM, recipe="lpmm", options={"weights": "bf16+8"}),
    Row("scruple, released", recipe="scruple", gradients="released"),
    Row("scruple, compressed", recipe="scruple", gradients="compressed"),
    Row("torch bf16"),
    Row("FlashOptim", other="flashoptim:Flash{}", options={"master_weight_bits": 24}),
    Row("bitsandbytes 8-bit", torch.float32, other="bitsandbytes.optim:{}8bit", on_cpu=True),
    Row("torchao 8-bit", other="torchao.optim:{}8bit", options=COINS, on_cpu=True),
    Row("torchao 4-bit", other="torchao.optim:{}4bit", options=COINS, on_cpu=True),
    # Controls, which a task should tell from `mixed`, as it should torch bf16 (PROTOCOL.md).
    Row(gather.NEAREST, recipe="scruple", options={"rounding": {"moments": "nearest"}}),
    *(Row(f"mixed, lr x {rate}", recipe="mixed", rate=rate) for rate in (0.9, 1.1)),
    Row(COINED, recipe="scruple", options={"weights": "bf16", "rounding": "stochastic"}),
)


class Training:
    """A row at work on a task."""

    def __init__(self, task, row, seed, device):
        torch.manual_seed(seed)
        self.task, self.row, self.device = task, row, device
        task.row = row
        self.model = task.model().to(device)
        if row.dtype != torch.float32:
            st.cast_model(self.model, row.dtype)
        self.params = [p for p in self.model.parameters() if p.requires_grad]
        self.opt = row.optimizer(task.optimizer, self.model, task.hypers)
        on_gpu = device.type == "cuda"
        self.forward = self.model
        if on_gpu and getattr(task, "compiled", False):
            torch._dynamo.reset()  # each run is compiled as the first is
            self.forward = torch.compile(self.model)
        self.autocasts = on_gpu and getattr(task, "autocast", False) and row.dtype == torch.float32
        self.scaler = torch.amp.GradScaler(device.type, row.loss_scale) if row.loss_scale else None
        self.order = torch.Generator().manual_seed(1000 + seed)  # the same batches for every row
        self.gradients = 0  # the most bytes of them
        if row.gradients != "stored":  # they are gone when backward ends: the step is taken inside
            path = self.opt._handle._path
            end = path.end
            path.end = lambda: (self.count_gradients(), end())[1]

    def precision(self):
        return torch.autocast(self.device.type, torch.bfloat16) if self.autocasts else contextlib.nullcontext()

    def count_gradients(self):
        self.gradients = max(self.gradients, nbytes([*(p.grad for p in self.params), *accumulators(self.opt)]))

    def step(self, number, batch, watch=lambda: None):
        """The loss. `watch` is called when all gradients are there."""
        lr = self.task.hypers["lr"] * self.row.rate * self.rate(number)
        for group in self.opt.param_groups:
            group["lr"] = group["lr"].fill_(lr) if isinstance(group["lr"], torch.Tensor) else lr  # torchao's is one
        total = 0.0
        for part in zip(*(x.chunk(self.row.passes) for x in batch)):
            with self.precision():
                loss = self.task.loss(self.forward, part)
            total = total + loss.detach() / self.row.passes
            if self.row.gradients == "stored":  # a release takes the mean itself
                loss = loss / self.row.passes
            (self.scaler.scale(loss) if self.scaler else loss).backward()
        self.count_gradients()
        watch()
        if self.scaler:
            self.scaler.step(self.opt)
            self.scaler.update()
        else:
            self.opt.step()
        self.opt.zero_grad()
        return total

    def rate(self, step):
        if hasattr(self.task, "rate"):
            return self.task.rate(step)
        steps, warm = self.task.steps, max(1, self.task.steps // 20)
        if step < warm:
            return (step + 1) / warm
        return 0.55 + 0.45 * math.cos(math.pi * (step - warm) / max(1, steps - warm))

    def evaluate(self):
        with self.precision(), torch.no_grad():
            return self.task.evaluate(self.model)

    def bytes(self):
        """By kind, per parameter."""
        count = sum(p.numel() for p in self.params)
        seen = set()  # the state of a weight in codes has these, too
        kinds = {"weights": nbytes(self.params, seen), "state": nbytes(self.opt.state, seen), "gradients": self.gradients}
        return {kind: size / count for kind, size in kinds.items()}


class Shadow:
    """Moments in fp32 from the gradients of a run: what its own should be. Of Adam and AdamW; of SGD momentum."""

    def __init__(self, training):
        hypers = training.task.hypers
        self.params, self.adam = training.params, training.task.optimizer != "SGD"
        self.beta1, self.beta2 = hypers.get("betas", (0.9, 0.999)) if self.adam else (hypers["momentum"], 0.0)
        self.decay = 0.0 if training.task.optimizer == "AdamW" else hypers.get("weight_decay", 0.0)
        self.decays = 1.0 if training.task.optimizer == "AdamW" else 0.0
        self.decays *= hypers.get("weight_decay", 1e-2)
        self.eps, self.steps, self.training = hypers.get("eps", 1e-8), 0, training
        self.m, self.v = ([torch.zeros_like(p, dtype=torch.float32) for p in self.params] for _ in range(2))

    @torch.no_grad()
    def see(self):
        gradients = [p.grad.float() for p in self.params]
        if self.decay:
            gradients = torch._foreach_add(gradients, [p.float() for p in self.params], alpha=self.decay)
        self.steps += 1
        if not self.adam:
            torch._foreach_mul_(self.m, self.beta1)
            torch._foreach_add_(self.m, gradients)
            return
        torch._foreach_lerp_(self.m, gradients, 1 - self.beta1)
        torch._foreach_mul_(self.v, self.beta2)
        torch._foreach_addcmul_(self.v, gradients, gradients, 1 - self.beta2)

    def weights(self):
        """At full width, extra bits and all."""
        full = self.training.opt.master_weights() if self.training.row.recipe else {p: p.detach() for p in self.params}
        return [full[p].double() for p in self.params]

    @torch.no_grad()
    def errors(self, before):
        """Of the step that was just taken, from the weights `before`: how far what arrived in the weights is from the
        step by exact moments, and what share of sqrt(v) is off by more than 1.5 times."""
        opt, row = self.training.opt, self.training.row
        lr, state = opt.param_groups[0]["lr"], opt.state_dict(as_="torch") if row.recipe else opt.state_dict()
        correction1, correction2 = (1 - beta**self.steps for beta in (self.beta1, self.beta2))
        sums = torch.zeros(6, dtype=torch.float64, device=self.m[0].device)  # ours true, ours^2, true^2, off^2, far, all
        for i, (m, v, old, new) in enumerate(zip(self.m, self.v, before, self.weights())):
            ours, far, all_ = new - old, m[:0], m[:0]
            if self.adam:
                true = -lr * (m / correction1 / ((v / correction2).sqrt() + self.eps) + self.decays * old)
                kept = state["state"][i]["exp_avg_sq"].to(m.device).float()
                ratio = (kept.clamp_min(1e-45) / v.clamp_min(1e-45)).sqrt()
                all_ = v > 0  # elements that have had a gradient
                far = ((ratio > 1.5) | (ratio < 1 / 1.5)) & all_
            else:
                true = -lr * m.double()
            parts = ours * true, ours**2, true**2, (ours - true) ** 2, far, all_
            sums += torch.stack([part.sum().double() for part in parts])
        dot, ours2, true2, off2, far, count = sums.tolist()
        found = {"applied": math.sqrt(off2 / true2), "cosine": dot / math.sqrt(max(ours2 * true2, 1e-300))}
        return {**found, "far": far / count if count else None} if self.adam else found  # None: of NaNs


def nbytes(things, seen=None):
    """Of all tensors in these containers and objects, each memory once."""
    seen = set() if seen is None else seen
    if isinstance(things, torch.Tensor):
        if hasattr(things, "__tensor_flatten__"):  # a class around others, as torchao's
            return sum(nbytes(getattr(things, name), seen) for name in things.__tensor_flatten__()[0])
        fresh = things.data_ptr() not in seen
        seen.add(things.data_ptr())
        return things.nbytes if fresh else 0
    if isinstance(things, dict):
        things = things.values()
    elif not isinstance(things, (list, tuple)):
        things = vars(things).values() if hasattr(things, "__dict__") else ()
    return sum(nbytes(thing, seen) for thing in things)


def accumulators(opt):
    """The memory that gradients are folded into."""
    sinks = getattr(getattr(getattr(opt, "_handle", None), "_path", None), "sinks", {})
    return [block for sink in sinks.values() for block in sink.blocks.values()]


@functools.cache
def processor():
    """Its name, where Linux knows it, and how much of it is at work."""
    try:
        said = subprocess.run(["lscpu"], capture_output=True, text=True, env={"LC_ALL": "C"}).stdout
    except OSError:
        said = ""
    name = re.search(r"^Model name:\s*(.+)", said, re.MULTILINE)
    threads = torch.get_num_threads()
    return f"{name[1] if name else platform.machine()}, {threads} thread{'s' * (threads > 1)}"


def head(task, row, device):
    """What tells a line from others, and what it was made with."""
    package = row.other.split(":")[0].split(".")[0] if row.other else None
    return {
        "task": task.name,
        "row": row.name,
        "place": [known.name for known in getattr(task, "rows", ROWS)].index(row.name),
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else processor(),
        "torch": torch.__version__,
        "scruple": scruple.version(),
        **({package: importlib.metadata.version(package)} if package else {}),
        "begin": getattr(task, "begin", None),
        "steps": task.steps,
        "optimizer": task.optimizer,
        "hypers": {**task.hypers, "lr": task.hypers["lr"] * row.rate, **row.options},
        "clip": None,  # no task clips
    }


def at_rest(device):
    """Bytes that are allocated already: data, and the products' workspace. What an earlier row has left is freed."""
    gc.collect()
    ones = torch.ones(8, 8, device=device, requires_grad=True)
    (ones @ ones).sum().backward()  # autograd's thread has a workspace of its own
    del ones
    return torch.cuda.memory_allocated() if device.type == "cuda" else 0


def unmoved(training, step, batch):
    """(loss, share of the elements of large weights that this step leaves as they are)."""
    with st.watch_updates(training.opt, training.model) as shares:
        loss = training.step(step, batch)
    sizes = {name: p.numel() for name, p in training.model.named_parameters() if p.numel() > 4096 and name in shares}
    return loss, sum(size * shares[name] for name, size in sizes.items()) / sum(sizes.values())


def run(task, row, seed, device, progress=lambda text: None):
    """One run, as what its JSON line says."""
    watches = getattr(task, "watches", False)
    before = at_rest(device) if watches else 0
    training = Training(task, row, seed, device)
    with torch.random.fork_rng():  # a run draws the same numbers whether it is asked or not
        start = training.evaluate()[task.metric]
    has_moments = row.other is None and row.gradients == "stored" and row.loss_scale is None
    shadow = Shadow(training) if has_moments and row.name != gather.REFERENCE and not watches else None
    moments = {max(1, int(task.steps * share)) for share in (0.25, 0.6, 0.95)}
    losses, errors, every = [], [], max(1, task.steps // 20)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for step in range(task.steps):
        batch, looks = task.batch(training.order), step + 1 in moments
        if looks and watches and row.recipe:
            loss, share = unmoved(training, step, batch)
            errors.append({"step": step + 1, "unmoved": share})
        elif looks and shadow:
            old = shadow.weights()
            loss = training.step(step, batch, shadow.see)
            errors.append({"step": step + 1, **shadow.errors(old)})
        else:
            loss = training.step(step, batch, shadow.see if shadow else lambda: None)
        losses.append(loss)
        if (step + 1) % every == 0:
            progress(f"step {step + 1}/{task.steps}  loss {float(losses[-1]):.4f}")
    peak = torch.cuda.max_memory_allocated() - before if watches and device.type == "cuda" else None
    losses = torch.stack(losses).float().cpu()
    if hasattr(task, "finished"):
        with training.precision():
            task.finished(training.model, row, seed)
    return {
        **head(task, row, device),
        "seed": seed,
        "parameters": sum(p.numel() for p in training.params),
        "start": start,
        "metrics": training.evaluate(),
        "losses": [round(float(part.mean()), 5) for part in losses.split(max(1, task.steps // 40))],
        "bytes": training.bytes(),
        "errors": errors,
        **({"peak_gib": peak and peak / 2**30} if watches else {}),
    }


def clock(task, row, device, warm=12, steps=30):
    """Time and memory of a row, with the device to itself: what is compiled or allocated at first is not counted."""
    before = at_rest(device)
    training = Training(task, row, 0, device)

    def now():
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    batches = [task.batch(training.order) for _ in range(4)]
    for step in range(warm):
        training.step(step, batches[step % 4])
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    blocks = []  # a step of a few ms is the host's, and one block of them may be a tenth off
    while len(blocks) < 9 and sum(blocks) < 5:
        start = now()
        for step in range(steps):
            training.step(warm + step, batches[step % 4])
        blocks.append(now() - start)
    line = {**head(task, row, device), "ms": 1e3 * statistics.median(blocks) / steps}
    if row.gradients == "stored":  # else it is part of the backward pass
        waits = []
        for step in range(steps):
            training.step(warm + step, batches[step % 4], lambda: waits.append(-now()))
            waits[-1] += now()
        line["ms_optimizer"] = 1e3 * statistics.median(waits)
    if device.type == "cuda":
        line["peak_gib"] = (torch.cuda.max_memory_allocated() - before) / 2**30
    return line

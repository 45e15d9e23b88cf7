"""What the tasks share: the rows, the loop, what is measured of a run, and its JSON line.

A task is a class with

  name, metric             the table's, and which of the metrics leads it
  steps, optimizer, hypers of the reference, the same for every row
  model()                  a fresh model on the CPU, fp32
  batch(generator)         a batch on the task's device, in any dtype: models cast what they read
  loss(model, batch)       a scalar
  evaluate(model)          {metric: value, ...}
"""

import dataclasses
import datetime
import importlib
import importlib.util
import math
import platform
import time

import report
import torch

import scruple
import scruple.torch as st


@dataclasses.dataclass(frozen=True)
class Row:
    """Who steps. `recipe`: ours; `other`: another's class, "module:name"; neither: torch.optim."""

    name: str
    dtype: torch.dtype = torch.bfloat16
    recipe: str = None
    gradients: str = "stored"
    other: str = None
    more: tuple = ()  # hyperparameters that only the other has

    def missing(self, device):
        """Why it cannot run here, or None."""
        if self.other is None:
            return None
        package = self.other.split(".")[0].split(":")[0]
        if importlib.util.find_spec(package) is None:
            return f"{package} is not installed"
        return f"{package} needs a GPU" if device.type != "cuda" else None

    def optimizer(self, kind, model, hypers):
        params = [p for p in model.parameters() if p.requires_grad]
        if self.recipe is not None:
            opt = getattr(st, kind)(params, recipe=self.recipe, **hypers)
            if self.gradients != "stored":
                st.release_gradients(model, opt, self.gradients)
            return opt
        if self.other is None:
            return getattr(torch.optim, kind)(params, fused=True, **hypers)
        module, name = self.other.split(":")
        return getattr(importlib.import_module(module), name)(params, **hypers, **dict(self.more))


REFERENCE = Row(report.REFERENCE, torch.float32)
ROWS = (
    REFERENCE,
    *(Row(recipe, recipe=recipe) for recipe in ("mixed", "split", "scruple", "scant", "flash")),
    Row("scruple, released", recipe="scruple", gradients="released"),
    Row("scruple, compressed", recipe="scruple", gradients="compressed"),
    Row("torch bf16"),
    Row("FlashOptim", other="flashoptim:FlashAdamW", more=(("master_weight_bits", 24),)),
    Row("bitsandbytes 8-bit", other="bitsandbytes.optim:AdamW8bit"),
    Row("torchao 8-bit", other="torchao.optim:AdamW8bit"),
    Row("torchao 4-bit", other="torchao.optim:AdamW4bit"),
)


def rate(step, steps):
    """Of the peak: up over a twentieth of the steps, then a cosine down to a tenth."""
    warm = max(1, steps // 20)
    if step < warm:
        return (step + 1) / warm
    return 0.55 + 0.45 * math.cos(math.pi * (step - warm) / max(1, steps - warm))


class Shadow:
    """Adam's moments in fp32 from the gradients of a run: what its own should be."""

    def __init__(self, params, hypers):
        self.params, (self.beta1, self.beta2) = params, hypers.get("betas", (0.9, 0.999))
        self.eps, self.steps = hypers.get("eps", 1e-8), 0
        self.m, self.v = ([torch.zeros_like(p, dtype=torch.float32) for p in params] for _ in range(2))

    @torch.no_grad()
    def see(self):
        gradients = [p.grad.float() for p in self.params]
        torch._foreach_lerp_(self.m, gradients, 1 - self.beta1)
        torch._foreach_mul_(self.v, self.beta2)
        torch._foreach_addcmul_(self.v, gradients, gradients, 1 - self.beta2)
        self.steps += 1

    @torch.no_grad()
    def errors(self, state):
        """Of the update by the moments of `state`, a state dict as torch's, next to this one's."""
        scale = math.sqrt(1 - self.beta2**self.steps)
        dot = ours2 = true2 = off2 = 0.0
        far = count = 0
        for i, (m, v) in enumerate(zip(self.m, self.v)):
            kept = state["state"][i]
            their_m, their_v = (kept[key].to(m.device).float() for key in ("exp_avg", "exp_avg_sq"))
            ours, true = their_m / (their_v.sqrt() / scale + self.eps), m / (v.sqrt() / scale + self.eps)
            dot += float((ours * true).double().sum())
            ours2, true2 = ours2 + float(ours.double().square().sum()), true2 + float(true.double().square().sum())
            off2 += float((ours - true).double().square().sum())
            here = v > 0  # elements that have had a gradient
            ratio = (their_v.clamp_min(1e-45) / v.clamp_min(1e-45)).sqrt()[here]
            far += int(((ratio > 1.5) | (ratio < 1 / 1.5)).sum())
            count += int(here.sum())
        return {
            "relative": math.sqrt(off2 / true2),
            "cosine": dot / math.sqrt(ours2 * true2),
            "far": far / max(1, count),
        }


def nbytes(tensors):
    return sum(t.nbytes for t in tensors if isinstance(t, torch.Tensor))


def accumulators(opt):
    """The memory that gradients are folded into."""
    sinks = getattr(getattr(getattr(opt, "_handle", None), "_path", None), "sinks", {})
    return [block for sink in sinks.values() for block in sink.blocks.values()]


def run(task, row, seed, device, progress=lambda text: None):
    """One run, as what its JSON line says."""
    torch.manual_seed(seed)
    model = task.model().to(device)
    if row.dtype != torch.float32:
        st.cast_model(model, row.dtype)
    params = [p for p in model.parameters() if p.requires_grad]
    opt = row.optimizer(task.optimizer, model, task.hypers)
    has_moments = row.other is None and row.gradients == "stored" and task.optimizer in ("Adam", "AdamW")
    shadow = Shadow(params, task.hypers) if has_moments and row != REFERENCE else None
    moments = {max(1, int(task.steps * share)) for share in (0.25, 0.6, 0.95)}
    order = torch.Generator().manual_seed(1000 + seed)  # the same batches for every row
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    losses, errors, in_steps, gradients = [], [], 0.0, 0

    def now():
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    for step in range(task.steps):
        for group in opt.param_groups:
            group["lr"] = task.hypers["lr"] * rate(step, task.steps)
        batch = task.batch(order)
        start = now()
        loss = task.loss(model, batch)
        loss.backward()
        if shadow is not None:
            spent = now()
            shadow.see()
            start += now() - spent
        gradients = max(gradients, nbytes(p.grad for p in params) + nbytes(accumulators(opt)))
        opt.step()
        opt.zero_grad()
        in_steps += now() - start
        losses.append(loss.detach())
        if shadow is not None and step + 1 in moments:
            state = opt.state_dict(as_="torch") if row.recipe else opt.state_dict()
            errors.append({"step": step + 1, **shadow.errors(state)})
        if (step + 1) % max(1, task.steps // 20) == 0:
            progress(f"step {step + 1}/{task.steps}  loss {float(loss):.4f}")
    losses = torch.stack(losses).float().cpu()
    state = [t for kept in opt.state.values() for t in kept.values()]
    count = sum(p.numel() for p in params)
    every = max(1, task.steps // 40)
    line = {
        "task": task.name,
        "row": row.name,
        "seed": seed,
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else platform.machine(),
        "torch": torch.__version__,
        "scruple": scruple.version(),
        "parameters": count,
        "steps": task.steps,
        "metrics": task.evaluate(model),
        "losses": [round(float(part.mean()), 5) for part in losses.split(every)],
        "bytes": {"weights": nbytes(params) / count, "state": nbytes(state) / count, "gradients": gradients / count},
        "ms": in_steps * 1e3 / task.steps,
        "errors": errors,
    }
    if device.type == "cuda":
        line["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    return line

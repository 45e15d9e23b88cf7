"""Follows a run's metrics.jsonl into TensorBoard or Weights & Biases while `scruple train` writes it.

    python examples/watch.py RUN [--wandb | --print] [--once]      (needs tensorboard and torch, or wandb)
"""
import json, pathlib, sys, time

if len(sys.argv) < 2 or "--help" in sys.argv:
    print(__doc__)
    sys.exit("--help" not in sys.argv)
file, before, logged, flush = pathlib.Path(sys.argv[1]).resolve() / "metrics.jsonl", b"", set(), lambda: None
if "--wandb" in sys.argv:
    import wandb
    wandb.init(project="scruple", name=file.parent.name)
    log = lambda step, values, when: wandb.log(values, step=step)
elif "--print" in sys.argv:
    log = lambda step, values, when: print(step, *(f"{name} {value:.6g}" for name, value in values.items()), flush=True)
else:
    from torch.utils.tensorboard import SummaryWriter
    writer = SummaryWriter(file.parent / "tensorboard")
    flush, log = writer.flush, lambda step, values, when: [writer.add_scalar(name, values[name], step, when) for name in values]

while True:
    whole = (text := file.read_bytes())[: text.rfind(b"\n") + 1]  # the last line may be half written
    for row in map(json.loads, whole.removeprefix(before).splitlines()):  # every line, where a resumed run began the file anew
        step, when, kind = row.pop("step"), row.pop("time", None), ("val_loss" in row, "saved_step" in row)
        if (step, kind) not in logged:
            log(step, {name: float(value) for name, value in row.items() if isinstance(value, (int, float))}, when)
            logged.add((step, kind))
    before = whole
    flush()
    if "--once" in sys.argv:
        break
    time.sleep(1)

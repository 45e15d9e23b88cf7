"""Follows a run's metrics.jsonl into TensorBoard or Weights & Biases while `scruple train` writes it.

    python examples/watch.py RUN [--wandb | --print] [--once]      (needs tensorboard and torch, or wandb)
"""

import json
import pathlib
import sys
import time

run, once = pathlib.Path(sys.argv[1]), "--once" in sys.argv  # --once: what is there now

if "--wandb" in sys.argv:
    import wandb

    wandb.init(project="scruple", name=run.name)
    log = lambda step, values, when: wandb.log(values, step=step)
elif "--print" in sys.argv:
    log = lambda step, values, when: print(step, *(f"{key} {value:.6g}" for key, value in values.items()))
else:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(run / "tensorboard")
    log = lambda step, values, when: [writer.add_scalar(key, value, step, when) for key, value in values.items()]

at = 0
while True:
    text = (run / "metrics.jsonl").read_bytes()
    if len(text) < at:  # a run that goes on writes the file anew, without what it does again
        at = 0
    end = text.rfind(b"\n") + 1  # the last line may not be whole yet
    for row in map(json.loads, text[at:end].splitlines()):
        numbers = {key: value for key, value in row.items() if isinstance(value, (int, float))}
        log(numbers.pop("step"), numbers, numbers.pop("time", None))
    at = end
    if once:
        break
    time.sleep(5)

"""What saving costs a training: `scruple train` that saves every N steps beside one that does not save.

    python bench/saves.py SCRUPLE [--model 1.1B|8B|tiny] [--every N] [--saves K] [--work DIR] [--device cpu]

SCRUPLE is the path of the command, such as build/gpu/scruple. The models are gpu_trainer.py's: a Hugging Face folder with
random bf16 weights and real shapes, random tokens. Both runs are killed when they have shown enough. A checkpoint is
removed as soon as it is there, so the disk needs room for one, and for the weights. Needs numpy.

  step      ms, the median without saves
  disk      GB/s that this script writes alone, with fsync
  save      seconds until a checkpoint is on the disk, as metrics.jsonl tells, and GB/s
  waited    seconds: from the step that is saved to the end of the next one, less a step; by the clock of metrics.jsonl.
            The first save takes its host memory too
  told      the same as metrics.jsonl says it
  lost      share of a run that saves every minute: waited / 60 s, and of this run: its time beyond so many steps

`--model tiny --device cpu` tries the script itself.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import tempfile
import time

from gpu_cases import CASES, GIB, WARM, parameters_of, write_tokens
from gpu_trainer import Failed, end, last_words, model_of

MODELS = {"1.1B": "llama-1.1b", "8B": "llama-8b", "tiny": "tiny-gpt2"}
EVERY = {"1.1B": 120, "8B": 140, "tiny": 400}
ENDLESS = 1000000  # steps: the run is killed


def disk_speed(folder, size=2 * GIB):
    """GB/s of a file that is written and flushed."""
    part, path = os.urandom(1 << 24), folder / "speed"
    begin = time.perf_counter()
    with open(path, "wb") as file:
        for _ in range(size // len(part)):
            file.write(part)
        file.flush()
        os.fsync(file.fileno())
    seconds = time.perf_counter() - begin
    path.unlink()
    return size / seconds / 1e9


class Run:
    """What a training writes to metrics.jsonl, while it lives."""

    def __init__(self, out):
        self.path, self.at, self.times, self.saves = out / "metrics.jsonl", 0, {}, []
        self.checkpoints = out / "checkpoints"

    def look(self):
        if not self.path.exists():
            return
        text = self.path.read_bytes()
        whole = text.rfind(b"\n") + 1
        for row in map(json.loads, text[self.at : whole].splitlines()):
            if "saved_step" in row:
                self.saves.append(row)
                shutil.rmtree(self.checkpoints / f"step-{row['saved_step']:08}", ignore_errors=True)
            elif "loss" in row:
                self.times[row["step"]] = row["time"]
        self.at = whole

    def between(self):
        """Seconds of each step, from the end of the one before."""
        return {step: self.times[step] - self.times[step - 1] for step in self.times if step - 1 in self.times}

    def steady(self):
        return [seconds for step, seconds in self.between().items() if step > WARM + 1]


def trained(command, out, enough, timeout):
    shutil.rmtree(out, ignore_errors=True)
    run, begin = Run(out), time.perf_counter()
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen([*command, "--out", str(out)], stdout=said, stderr=said)
        try:
            while not enough(run):
                if process.poll() is not None or time.perf_counter() - begin > timeout:
                    said.seek(0)
                    raise Failed(f"{len(run.times)} steps, {len(run.saves)} saves: {last_words(said.read())}")
                time.sleep(0.05)
                run.look()
        finally:
            end(process)
            shutil.rmtree(out, ignore_errors=True)
    return run


def measured(arguments, folder):
    case = dataclasses.replace(CASES[MODELS[arguments.model]], steps=ENDLESS)
    every = arguments.every or EVERY[arguments.model]
    data = folder / "tokens.bin"
    write_tokens(data, case.config["vocab_size"])
    disk = disk_speed(folder, GIB // 8 if arguments.model == "tiny" else 2 * GIB)
    model = model_of(case, folder, arguments.drawn)
    command = [arguments.scruple, "train", "--model", str(model), "--data", str(data), *case.options()]
    command += ["--device", arguments.device, *arguments.options.split()]
    print("# " + " ".join(command), flush=True)
    steps = WARM + 30
    alone = trained(command, folder / "alone", lambda run: len(run.times) >= steps, arguments.timeout)
    step = statistics.median(alone.steady())
    saving = trained(
        [*command, "--save-every", str(every), "--keep", "1"],
        folder / "saving",
        lambda run: len(run.saves) >= arguments.saves and run.saves[-1]["saved_step"] + 1 in run.times,
        arguments.timeout,
    )
    between = saving.between()
    waited = [between[row["saved_step"] + 1] - step for row in saving.saves]
    later = waited[1:] or waited
    steady = saving.steady()
    seconds = statistics.mean(row["save_seconds"] for row in saving.saves)
    size = saving.saves[0]["save_bytes"]
    return {
        "model": arguments.model,
        "parameters": parameters_of(case.config),
        "step_ms": round(1e3 * step, 2),
        "disk_gb_s": round(disk, 2),
        "saves": len(saving.saves),
        "every_s": round(every * step, 1),
        "save_gb": round(size / 1e9, 2),
        "save_s": round(seconds, 2),
        "save_gb_s": round(size / seconds / 1e9, 2),
        "waited_first_s": round(waited[0], 3),
        "waited_s": round(statistics.mean(later), 3),
        "waited_steps": round(statistics.mean(later) / step, 2),
        "told_s": [round(row["save_waited"], 3) for row in saving.saves],
        "other_steps": round(statistics.median(steady) / step, 4),  # while a checkpoint is written, of those alone
        "lost_of_minutes": round(statistics.mean(later) / 60, 5),
        "lost_here": round(sum(steady) / (len(steady) * step) - 1, 5),
    }


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("scruple", help="path of the command")
    add("--model", choices=MODELS, default="1.1B")
    add("--every", type=int, default=0, help="steps between saves (default: some 10 s on an H200; of 8B a minute)")
    add("--saves", type=int, default=3)
    add("--device", default="cuda")
    add("--drawn", action="store_true", help="no weights are written; the trainer draws them")
    add("--options", default="", help="more words for 'scruple train', in one argument")
    add("--timeout", type=float, default=300, help="seconds that a run may take")
    add("--work", help="where models and runs are written for a while (default: a new folder in $TMPDIR)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="saves-", dir=arguments.work) as folder:
        found = measured(arguments, pathlib.Path(folder))
    print(json.dumps(found))
    print(
        f"{found['model']}: a step takes {found['step_ms']:,.1f} ms; a save of {found['save_gb']:,.2f} GB takes "
        f"{found['save_s']:,.1f} s ({found['save_gb_s']} GB/s; the disk alone {found['disk_gb_s']} GB/s), and training "
        f"waits {found['waited_s']} s for it, {found['waited_steps']} steps (the first {found['waited_first_s']} s); "
        f"saving every minute costs {100 * found['lost_of_minutes']:.2f} %"
    )


if __name__ == "__main__":
    main()

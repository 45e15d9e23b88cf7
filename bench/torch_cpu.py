"""torch's fused fp32 AdamW on the CPU beside ours, in one run: bench/torch_cpu.py build/scruple [params] [threads].

Needs torch. Prints M parameters per second and resident bytes per parameter (weights, moments, gradients).
"""

import json
import statistics
import subprocess
import sys
import time

import torch


def torch_rate(params, threads, repeats=7):
    torch.set_num_threads(threads)
    weight = torch.nn.Parameter(torch.randn(params) * 0.02)
    weight.grad = torch.randn(params) * 1e-3
    optimizer = torch.optim.AdamW([weight], fused=True)
    optimizer.step()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        optimizer.step()
        seconds.append(time.perf_counter() - start)
    return params / statistics.median(seconds)


def scruple_rows(command, params, threads, *more):
    arguments = [command, "bench", "--optimizer", "adamw", "--params", str(params), "--threads", str(threads), "--json"]
    arguments += more
    return json.loads(subprocess.run(arguments, check=True, capture_output=True, text=True).stdout)["rows"]


def plan_bytes(command, recipe):
    arguments = [command, "plan", "--params", "1e9", "--optimizer", "adamw", "--recipe", recipe, "--json"]
    return json.loads(subprocess.run(arguments, check=True, capture_output=True, text=True).stdout)["rows"][0]


def main():
    command = sys.argv[1]
    params = int(sys.argv[2]) if len(sys.argv) > 2 else 1 << 26
    threads = int(sys.argv[3]) if len(sys.argv) > 3 else 2
    print(f"AdamW, {params} parameters, {threads} threads, torch {torch.__version__}")
    print(f"{'':24}{'Mparams/s':>10}{'bytes/param':>13}")
    print(f"{'torch fused fp32':24}{torch_rate(params, threads) / 1e6:10.0f}{16:13.2f}")
    rows = scruple_rows(command, params, threads, "--recipe", "fp32", "--gradient-format", "fp32")  # as torch's
    rows += [row for row in scruple_rows(command, params, threads) if row["recipe"] != "fp32"]
    for row in rows:
        held = plan_bytes(command, row["recipe"])["bytes_per_param"]
        print(f"{'scruple ' + row['recipe']:24}{row['params_per_s'] / 1e6:10.0f}{held:13.2f}")


if __name__ == "__main__":
    main()

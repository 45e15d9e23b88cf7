"""How many extra bits does a weight need, and how should it be rounded? Lewandowski and Kosson leave it open. The fine-tuning
of finetuning.py at 1e-6, moments in fp32, weights of bf16 and 0, 1, 2, 4, 8 or 16 bits more, by every rounding.
"""

import finetuning
import harness

ROUNDINGS = ("nearest", "truncate", "stochastic")


def rows():
    yield harness.REFERENCE
    for bits in (0, 1, 2, 4, 8, 16):
        for rounding in ROUNDINGS[:1] if bits == 16 else ROUNDINGS:  # with 16 there is nothing to round
            weights = f"bf16+{bits}" if bits else "bf16"
            options = {"weights": weights, "rounding": {"weights": rounding}}
            yield harness.Row(f"{bits} bits, {rounding}", recipe="split", options=options)


def tasks(data, small, device):
    made = finetuning.tasks(data, small, device, "bits", (1e-6,))
    for task in made:
        task.rows = tuple(rows())
    return made

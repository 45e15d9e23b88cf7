"""What the lines show by the rules of PROTOCOL.md: a row beside `mixed`, over pairs of one seed."""

import functools
import math
import statistics

MARGIN = 0.003  # of the reference's metric
GAIN_MARGIN = 0.02  # of what training gained
LEAST_PAIRS = 8  # below it nothing is shown
ONE_SIDED, TWO_SIDED = 0.95, 0.975
POWER_OF_Z = statistics.NormalDist().inv_cdf(ONE_SIDED) + statistics.NormalDist().inv_cdf(0.9)  # power 0.8 at gap 0


@functools.cache
def quantile(share, freedom):
    """Of Student's t, by bisection over Simpson's integral of its density."""
    factor = math.gamma((freedom + 1) / 2) / math.gamma(freedom / 2) / math.sqrt(freedom * math.pi)

    def density(x):
        return factor * (1 + x * x / freedom) ** (-(freedom + 1) / 2)

    def below(x, parts=400):
        width = x / parts
        inside = sum((4 if i % 2 else 2) * density(i * width) for i in range(1, parts))
        return 0.5 + width / 3 * (density(0) + inside + density(x))

    low, high = 0.0, 700.0 / freedom  # 12.71 is the largest that is asked for, at freedom 1
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if below(middle) < share else (low, middle)
    return low


def verdict(gaps, reference, share=MARGIN):
    """(verdict, mean gap, half of its 95 % interval, pairs that would decide): of gaps of pairs that are above 0 where a
    row is worse, and what the margin is a share of: the reference's mean metric."""
    mean, count = statistics.mean(gaps), len(gaps)
    if count < 2:
        return "not shown", mean, None, None
    error, margin = statistics.stdev(gaps) / math.sqrt(count), share * abs(reference)
    half = quantile(TWO_SIDED, count - 1) * error
    needed = max(LEAST_PAIRS, math.ceil((POWER_OF_Z * statistics.stdev(gaps) / margin) ** 2))
    if count < LEAST_PAIRS:
        found = "not shown"
    elif abs(mean) + quantile(ONE_SIDED, count - 1) * error < margin:
        found = "equivalent"
    elif abs(mean) > half:
        found = "worse" if mean > 0 else "better"
    else:
        found = "not shown"
    return found, mean, half, needed

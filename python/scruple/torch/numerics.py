"""A look at whether the present learning rate can move weights in the format they are kept in."""

import contextlib
from ctypes import byref

import torch

from .. import _abi
from .._abi import library
from .engines import engine_for
from .planes import NAMES, decode
from .shards import local
from .table import check_gradient

SAMPLE = 1 << 16  # elements of each parameter that are tried


@torch.no_grad()
def check_updates(opt, model=None, threshold=0.1):
    """What is wrong with the next step, in words; [] where nothing is. Call it between backward() and step().

    The next step is tried on a copy of up to 65,536 elements of each parameter. Where more than `threshold` of those
    that have a gradient would come out with the same bits, the step is below the last bit of the format: those weights
    stand still. (Rounded stochastically or wide they move on average, and nothing is said.)
    """
    names = {p: name for name, p in model.named_parameters()} if model is not None else {}
    if opt._handle is not None:
        raise _abi.UsageError("backward has taken the gradients; use watch_updates, or check_updates without release")
    opt._settle()
    opt._update_rules()
    found = []
    for p, (number, index) in opt._number.items():
        if p.grad is None or not local(p).numel():
            continue
        if (waits := opt._layout(p).waits) is not None:
            raise _abi.UsageError(f"weights in {waits} cannot be checked before a step; use watch_updates around it")
        _, weight, rounding = opt._layout(p).described[0]
        base, plus, extra = weight.partition("+")
        if rounding == "stochastic" or rounding == "wide" and extra != "16":  # with 16 wide drops nothing
            continue
        if (share := _unmoved(opt, p)) > threshold:
            lr = float(opt.param_groups[index]["lr"])
            drawn = "rounding={'weights': 'wide'}" if plus else "rounding='stochastic'"
            wider = f"weights='{base}+{16 if plus else 8}' (more extra bits) or {drawn}"
            if weight == "fp32" or extra in ("16", "fp32"):
                wider = "a larger lr"
            what = f"{names.get(p, f'parameter {number}')} ({weight}, lr {lr:g}): {100 * share:.0f} % of the weights"
            why = "that have a gradient would not move; the step is below their last bit"
            found.append(f"{what} {why}. Use {wider}")
    return found


def _unmoved(opt, p):
    """The share of sampled elements with a gradient that a step leaves as they are."""
    check_gradient(local(p), local(p.grad))
    device, weight = local(p).device, local(p).detach().reshape(-1)[:SAMPLE].clone()
    gradient = local(p.grad).reshape(-1)[:SAMPLE].contiguous()
    with opt._tried(p) as entry:
        row, kept = _abi.Tensor.from_buffer_copy(entry.row), []
        for plane, held in entry.by_plane():
            codes, aux = plane.form.bytes(weight.numel())
            held = held.reshape(-1).view(torch.uint8)
            kept.append(held[: codes if plane.part == "codes" else aux].to(device, copy=True))
            setattr(row.arrays[plane.array], plane.part, kept[-1].data_ptr())
    row.host = 0  # these copies are on the device
    row.size, row.arrays[_abi.WEIGHT].codes = weight.numel(), weight.data_ptr()
    form = _abi.format_named(NAMES[gradient.dtype])
    row.arrays[_abi.GRADIENT] = _abi.Array(form.handle, gradient.data_ptr())
    before = decode(row, _abi.WEIGHT, row.size, device)
    options = _abi.options(_abi.StepOptions, multiplier=1.0, parts=1)
    library.step(engine_for(device), byref(row), 1, byref(options))
    after = decode(row, _abi.WEIGHT, row.size, device)
    unmoved = (before == after)[gradient != 0]
    return unmoved.double().mean().item() if unmoved.numel() else 0.0


@contextlib.contextmanager
def watch_updates(opt, model=None):
    """Which share of the weights the steps inside leave as they are: a dict, filled at the end of the block.

    with watch_updates(opt, model) as unmoved:
        criterion(model(x), y).backward()
        opt.step()
    print(unmoved)                  # {"layer1.0.conv1.weight": 0.93, ...}; without a model by parameter

    Of the first 65,536 elements of each parameter those count whose momentum is not zero after the steps; one in codes
    has moved if its code has. Rounded to nearest, what does not move is lost; rounded stochastically it moves on average,
    and a high share says that steps are small beside the distance of codes. Waits for the device.
    """
    names = {p: name for name, p in model.named_parameters()} if model is not None else {}
    opt._settle()
    opt._update_rules()
    params = [p for p in opt._number if p.requires_grad and p.numel()]
    before, shares = {p: _sampled(opt, p)[0] for p in params}, {}
    yield shares
    opt._settle()
    opt._update_rules()
    for p, was in before.items():
        weights, moving = _sampled(opt, p)
        unmoved = (weights == was)[moving]
        if unmoved.numel():
            shares[names.get(p, p)] = unmoved.double().mean().item()


@torch.no_grad()
def _sampled(opt, p):
    """The first elements' weights at full width, and whether each has momentum (all, where the rule keeps none)."""
    with opt._tried(p) as entry:
        row, kept = opt._contiguous(p, entry)
        part, size = _abi.Tensor(), min(row.size, SAMPLE)
        library.tensor_view(byref(row), 0, size, byref(part))
        weight = part.arrays[_abi.WEIGHT]
        form = _abi.format_at(weight.format)
        if form.aux_is_scale:  # the codes: a group's scale moves by itself, and the values of all its codes with it
            ones = torch.ones(-(-size // form.group_size), device=kept.device)
            weight.aux = ones.data_ptr()
        weights = decode(part, _abi.WEIGHT, (size,), kept.device)
        if not entry.layout.slots:
            return weights, torch.ones_like(weights, dtype=torch.bool)
        return weights, decode(part, entry.layout.index(entry.layout.slots[0]), (size,), kept.device) != 0

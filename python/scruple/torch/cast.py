"""cast_model: a model in 16 bits, except where that would hurt."""

import fnmatch
import functools

import torch
from torch.utils._pytree import tree_map_only

from .._abi import UsageError, few

_WITH_STATISTICS = torch.nn.modules.batchnorm._NormBase  # batch and instance normalisation


def cast_model(model, dtype=torch.bfloat16, *, overrides=None):
    """Casts a model's floating-point parameters and buffers in place, and returns it.

    Left as they are: batch and instance normalisations (their running statistics are averages over many
    batches, which stand still in 8 bits; they take 16-bit inputs all the same), and buffers that are not
    saved with the model and would lose by it, such as rotary frequencies; a mask of 0 and -100 is cast.

    overrides   {pattern: dtype} over the names of modules, parameters and buffers, as in the shell; the first
                match wins: {"lm_head": torch.float32, "*.norm?": torch.float32}. A module that is kept in
                another dtype casts its inputs on the way in and its outputs on the way out: back to `dtype`,
                or to the second of a pair, {"lm_head": (torch.float32, torch.float32)}.
    """
    overrides = {
        pattern: target if isinstance(target, tuple) and len(target) == 2 else (target, dtype)
        for pattern, target in (overrides or {}).items()
    }
    for pattern, targets in [("*", (dtype, dtype)), *overrides.items()]:
        for target in targets:
            if target not in (torch.bfloat16, torch.float16, torch.float32):
                raise UsageError(f"{pattern!r} cast to {target}; use torch.bfloat16, float16 or float32")
    used = set()

    def choose(name):
        """The dtypes for this name, or for the nearest module around it; None where nothing was said."""
        while name:
            for pattern, dtypes in overrides.items():
                if fnmatch.fnmatchcase(name, pattern):
                    used.add(pattern)
                    return dtypes
            name = name.rpartition(".")[0]
        return None

    params, buffers, doors = {}, [], []  # nothing is cast before all names are known to be right
    for path, module in model.named_modules():
        own = choose(path)
        if own is not None and own != (dtype, dtype) and choose(path.rpartition(".")[0]) != own:
            doors.append((module, *own))
        statistics = isinstance(module, _WITH_STATISTICS)
        for name, p in module.named_parameters(path, recurse=False):
            target, _ = choose(name) or (None if statistics else dtype, None)
            if target and p.is_floating_point():
                first, other = params.setdefault(p, (name, target))
                if other != target:
                    both = f"{first} and {name} are one parameter, and would be {other} and {target}"
                    raise UsageError(f"{both}; give both names the same dtype, or untie them")
        for name, buffer in module.named_buffers(recurse=False):
            kept = statistics or name in module._non_persistent_buffers_set and _loses(buffer, dtype)
            target, _ = choose(f"{path}.{name}".lstrip(".")) or (None if kept else dtype, None)
            if target and buffer.is_floating_point():
                buffers.append((module, name, target))
    if unused := [repr(pattern) for pattern in overrides if pattern not in used]:
        some = few(repr(name) for name, _ in model.named_parameters())
        raise UsageError(f"nothing is called {', '.join(unused)} (overrides); names look like {some}")
    for p, (_, target) in params.items():
        gradient, p.grad = p.grad, None
        p.data = p.data.to(target)
        p.grad = None if gradient is None else gradient.to(target)
    for module, name, target in buffers:
        module._buffers[name] = module._buffers[name].to(target)
    for module, inside, outside in doors:
        module.register_forward_pre_hook(functools.partial(_cast_inputs, inside), with_kwargs=True)
        module.register_forward_hook(functools.partial(_cast_output, outside))
    return model


def _loses(buffer, dtype):
    return buffer.is_meta or not torch.equal(buffer.to(dtype).to(buffer.dtype), buffer)


# Hooks by name, so that the model can be pickled.


def _cast_inputs(dtype, module, args, kwargs):
    return _cast_output(dtype, module, args, (args, kwargs))


def _cast_output(dtype, module, args, output):
    """All tensors of floating-point numbers in it."""
    return tree_map_only(torch.Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, output)

"""compress_weights: weights, moments and gradients in low bits (LPMM, Li et al., ICLR 2023 submission), for any module."""

import weakref

import torch
from torch import nn

from .. import _abi
from .._abi import UsageError
from .coded import Coded, Store, form_of
from .optimizer import Optimizer
from .planes import NAMES, few_elements
from .release import inner_optimizer, release_gradients
from .shards import is_sharded


@torch.no_grad()
def compress_weights(model, opt, *, accumulator="int8", **how):
    """From now on the weights of `model` that `opt` keeps in int8 to int12 live as codes, and backward() folds
    gradients into 8-bit accumulators and frees them, as release_gradients(model, opt, policy="compressed") does, whose
    handle this returns and whose arguments it takes: accumulate, max_norm, scaler, reduction, process_group.

    opt = SGD(model.parameters(), lr=0.1, momentum=0.9, recipe="lpmm")
    handle = compress_weights(model, opt, accumulate=4)

    Which weights: those of more than 4,096 elements in a group with recipe="lpmm" or weights="int8" .. "int12". They
    stay in model.parameters(), with shape and dtype. A weight is decoded where it is used and freed after, forward and
    backward. Copies (copy.deepcopy, state_dict) are plain tensors.
    Call it where the model will train, before the first step. After an error the model is as it was.
    """
    if "policy" in how:
        raise UsageError("compress_weights folds gradients (policy='compressed'); leave policy out")
    inner = inner_optimizer(opt)
    if not isinstance(inner, Optimizer):
        raise UsageError(f"the optimizer is a {type(inner).__name__}; it must be one of scruple.torch")
    inner._settle()
    inner._update_rules()
    names = _weights(model, inner)
    coded, swapped = {p: _coded(inner, p) for p in names}, []
    # channels_last: codes are decoded to contiguous values, and small weights become so too.
    small = [p for p in inner._all_params() if p.requires_grad and p not in names and not is_sharded(p)]
    strided = {p: p.data for p in small if not p.is_contiguous()}
    recurrent = [module for module in model.modules() if isinstance(module, torch.nn.RNNBase)]
    try:
        for module in recurrent:  # weak references, for which swap_tensors would refuse
            module._flat_weight_refs = []
        for p, values in strided.items():
            p.data = values.contiguous()
        for p, twin in coded.items():
            _swap(p, twin, names[p])
            swapped.append((p, twin))
        inner._forget_tables()
        handle = release_gradients(model, opt, policy="compressed", accumulator=accumulator, **how)
    except BaseException:
        for p, twin in swapped:
            inner._state.pop(p, None)
            torch.utils.swap_tensors(p, twin)
        for p, values in strided.items():
            p.data = values
        inner._forget_tables()
        raise
    finally:
        for module in recurrent:
            module._flat_weight_refs = [weakref.ref(w) if w is not None else None for w in module._flat_weights]
    for module in model.modules():
        if any(type(p) is Coded for p in module._parameters.values()):
            module.register_state_dict_post_hook(_decode_state)
            if (own := getattr(type(module), "_conv_forward", None)) and own in _CONVOLUTIONS:
                module._conv_forward = _Method(module, "_conv_forward", _conv_forward)
            elif type(module).forward is nn.Linear.forward and "forward" not in vars(module):
                module.forward = _Method(module, "forward", _linear_forward)
    return handle


def _weights(model, opt):
    """{parameter: name} of those that become codes. What can be wrong with one is said before any is touched."""
    if not isinstance(model, torch.nn.Module):
        raise UsageError(f"the model is a {type(model).__name__}; it must be a torch.nn.Module")
    mine, names, coded = set(opt._all_params()), {}, []
    for name, p in model.named_parameters():
        if p in mine and p.grad is not None:
            raise UsageError(f"{name} has a gradient, which would be lost; call opt.zero_grad(set_to_none=True) first")
        if form_of(p):
            coded.append(name)
        if p not in mine or not p.requires_grad or p.dtype not in NAMES or not opt._layout(p).waits:
            continue
        if is_sharded(p):
            raise UsageError(f"{name} is a DTensor (FSDP2), which cannot hold codes; use process_group= instead")
        if p.device.type not in ("cpu", "cuda"):
            raise UsageError(f"{name} is on device {p.device}; move the model to a CPU or a CUDA device first")
        if type(p) is not torch.nn.Parameter:
            raise UsageError(f"{name} is a {type(p).__name__}; only plain parameters can become codes")
        if p._backward_hooks or p._post_accumulate_grad_hooks:
            raise UsageError(f"{name} has hooks, which would stay behind; register them after compress_weights")
        if not p.isfinite().all():
            raise UsageError(f"{name} has values that are not finite, and no code holds them")
        names[p] = name
    if mine.isdisjoint(model.parameters()):
        raise UsageError("the optimizer has none of this model's parameters; make it of model.parameters()")
    if not names and coded:
        hint = "release_gradients(model, opt, policy='compressed') gives a new handle"
        raise UsageError(f"{coded[0]} and others are in codes already; {hint}")
    if not names:
        few = f"weights of up to {few_elements()} elements stay as they are"
        raise UsageError(f"no weight becomes codes: give the optimizer recipe='lpmm' or weights='int12'; {few}")
    return names


def _coded(opt, p):
    """A parameter with the values of p in codes, to nearest."""
    layout = opt._layout(p, opt._layout(p).waits)
    planes = {plane.part: plane.zeros(p) for plane in layout.planes if plane.array == _abi.WEIGHT}
    store = Store(planes["codes"], planes["aux"], _abi.format_named(layout.formats["weight"]), p.shape, p.dtype)
    store.encode(p.detach())
    return torch.nn.Parameter(Coded(store), p.requires_grad)


def _swap(p, twin, name):
    """p becomes the twin and the other way round, for all who refer to p. Attributes of the user's stay."""
    try:
        twin.__dict__.update({key: value for key, value in p.__dict__.items() if key not in twin.__dict__})
        torch.utils.swap_tensors(p, twin)
    except RuntimeError as problem:
        hint = "drop what an earlier forward pass left (del loss), call compress_weights before torch.compile, and use "
        hint += "torch.nn.utils.parametrizations in place of torch.nn.utils.weight_norm and spectral_norm"
        raise UsageError(f"{name} is held by something else ({problem}); {hint}") from None


_CONVOLUTIONS = [getattr(kind, "_conv_forward", None) for kind in (nn.Conv1d, nn.Conv2d, nn.Conv3d)]
_saved_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda _: True)  # before torch 2.8
_takes_hooks = getattr(torch._C._autograd, "_saved_tensors_hooks_is_enabled", bool)  # not under torch.func.grad


class _Method:
    """A method of one module. Copies of the module have plain weights, and their class's own method."""

    def __init__(self, module, name, function):
        self.module, self.name, self.function = module, name, function

    def __call__(self, *args, **named):
        return self.function(self.module, *args, **named)

    def __reduce__(self):
        return getattr, (self.module, self.name)


def _conv_forward(self, x, weight, bias):
    forward = type(self)._conv_forward
    if x.dim() != weight.dim():
        return forward(self, x, weight, bias)
    return _over_values(lambda values: forward(self, x, values, bias), x, weight, "_raw_saved_weight", lambda w: w)


def _linear_forward(self, input):
    linear = lambda w: nn.functional.linear(input, w, self.bias)  # noqa: E731
    return _over_values(linear, input, self.weight, "_raw_saved_mat2", torch.t)


def _over_values(forward, x, weight, saved, as_saved):
    """forward(weight), over values that autograd decodes anew: faster on the host than by Coded.__torch_dispatch__."""
    decodes = form_of(weight) and weight.source is None and torch.is_grad_enabled()
    if not decodes or torch.compiler.is_compiling() or _saved_hooks(False) or not _takes_hooks():
        return forward(weight)
    dtype = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else weight.dtype
    out = forward(weight.to(dtype, copy=True, memory_format=torch.contiguous_format))
    node = out.grad_fn
    while node is not None and "View" in node.name():  # of a product of matrices
        node = node.next_functions[0][0]
    if hasattr(node, saved) and (x.requires_grad or saved != "_raw_saved_mat2"):  # a product saves its weight for x alone
        decode = lambda at: as_saved(weight.decode(dtype, at))  # noqa: E731
        getattr(node, saved).register_hooks(lambda _: weight._version, decode)
    return out


def _decode_state(module, state, prefix, _):
    for name, p in module._parameters.items():
        found = state.get(prefix + name)
        if form_of(p) and type(found) is Coded and found is not p:  # else keep_vars=True
            state[prefix + name] = found.decode()

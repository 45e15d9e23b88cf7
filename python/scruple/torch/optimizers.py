"""The optimizers by name: torch.optim's arguments and defaults, and how state is stored.

All take, for the optimizer or per parameter group:

  recipe    a named choice of formats: "scruple" (the default), "flash", "scant", "split", "mixed", "fp32",
            and "lpmm" (SGD, SGDW, Lion; with compress_weights)
  weights   what is kept beside a 16-bit parameter, such as "bf16+16"; in place of the recipe's. An fp32
            parameter is its own full-width weight. "int8" to "int12": the weight itself (compress_weights).
  moments   a format for every moment that it can hold, or {slot: format}; in place of the recipe's. Second
            moments under amsgrad and centered count to the last bit, and stay in fp32 whatever is said.
  rounding  "nearest", "truncate" or "stochastic" for every weight and moment that can; "wide" for weights
            with extra bits, of which the model then sees the nearest 16-bit number while the whole is rounded
            stochastically, as moments are beside it; or a dict, {"weights": "wide", "moments": "nearest",
            "exp_avg": "stochastic"}, in which a slot's own name counts before "moments"; in place of the
            recipe's
  seed      of stochastic rounding; together with step, parameter and element it decides every random number
  decay_lr  decoupled decay (SGDW, AdamW, Lion): above 0, decay is weight_decay * lr / decay_lr, not weight_decay * lr
  offload   True: moments and extra bits of parameters on a GPU lie in pinned host memory, and steps copy them

They take torch's `maximize` and `capturable` too. `foreach` and `fused` are accepted and change nothing:
every step is one fused call per device.
"""

from .optimizer import Optimizer


def _hypers(arguments):
    """What a constructor was given for its own arguments."""
    others = ("self", "params", "options", "__class__")
    return {name: value for name, value in arguments.items() if name not in others}


class SGD(Optimizer):
    """Momentum, dampening, Nesterov's variant, coupled decay: torch.optim.SGD."""

    rule = "sgd"

    def __init__(self, params, lr=1e-3, momentum=0, dampening=0, weight_decay=0, nesterov=False, **options):
        super().__init__(params, _hypers(locals()), **options)


class _Decoupled(Optimizer):
    """With weight decay apart from the gradient (Loshchilov and Hutter, 1711.05101)."""

    def __init__(self, params, hypers, *, decay_lr=0.0, **options):
        super().__init__(params, {**hypers, "decay_lr": decay_lr}, **options)


class SGDW(_Decoupled):
    """SGD with decoupled decay."""

    rule = "sgdw"

    def __init__(self, params, lr=1e-3, momentum=0, dampening=0, weight_decay=1e-2, nesterov=False, **options):
        super().__init__(params, _hypers(locals()), **options)


class Adam(_Decoupled):
    """torch.optim.Adam; with decoupled_weight_decay, which may differ by group, it is AdamW."""

    rule = "adam"

    def _rule_of(self, group):
        return "adamw" if group["decoupled_weight_decay"] else "adam"

    def __init__(
        self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0, amsgrad=False, *,
        decoupled_weight_decay=False, **options,
    ):
        super().__init__(params, _hypers(locals()), **options)


class AdamW(Adam):
    """torch.optim.AdamW."""

    rule = "adamw"

    def __init__(
        self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2, amsgrad=False, **options
    ):
        super().__init__(params, decoupled_weight_decay=True, **_hypers(locals()), **options)


class Lion(_Decoupled):
    """The sign of an interpolated momentum (Chen et al., 2302.06675)."""

    rule = "lion"

    def __init__(self, params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0, **options):
        super().__init__(params, _hypers(locals()), **options)


class Adagrad(Optimizer):
    """torch.optim.Adagrad."""

    rule = "adagrad"

    def __init__(
        self, params, lr=1e-2, lr_decay=0, weight_decay=0, initial_accumulator_value=0, eps=1e-10, **options
    ):
        super().__init__(params, _hypers(locals()), **options)


class RMSprop(Optimizer):
    """torch.optim.RMSprop."""

    rule = "rmsprop"

    def __init__(self, params, lr=1e-2, alpha=0.99, eps=1e-8, weight_decay=0, momentum=0, centered=False, **options):
        super().__init__(params, _hypers(locals()), **options)

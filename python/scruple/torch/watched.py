"""opt.state: torch's dicts, which note when they are written to.

Users set state as with torch.optim: opt.state[p] = {}, opt.state[p]["exp_avg"] = values, ["step"] = 0. The
optimizer takes that over before its next step (Optimizer._adopt). Without a note a step asks one flag.
"""

import collections
import functools
import weakref

import torch
from torch.optim.optimizer import _get_scalar_dtype

from .._abi import UsageError
from .shards import like, local


def _noting(cls):
    """Has every method that writes say so first."""
    for name in ("__setitem__", "__delitem__", "__ior__", "clear", "pop", "popitem", "setdefault", "update"):

        def noted(self, *args, _write=getattr(cls, name), **kwargs):
            self.note(*args)
            return _write(self, *args, **kwargs)

        setattr(cls, name, functools.wraps(getattr(cls, name))(noted))
    return cls


@_noting
class State(dict):
    """The state of one parameter. `dict.update(state, ...)` writes without a note."""

    def __init__(self, param, changed, held=()):
        super().__init__(held)
        self.param, self.changed = param, changed
        self.entry = None  # the Entry over these planes, which says what they mean
        self.steps, self.shown = 0, None  # the count, and the tensor that shows it as "step"
        self.lent = {}  # moments that were read: {name: (reference, version)}

    def note(self, *_):
        self.changed[self.param] = None

    def show(self, steps, tensor=None):
        """Counts so many steps, which `tensor` or a new one shows."""
        if tensor is None:
            tensor = torch.tensor(float(steps), dtype=_get_scalar_dtype(), device="cpu")
        self.steps, self.shown = steps, tensor
        dict.update(self, step=tensor)

    def is_intact(self, param):
        """Whether all that a step of this parameter uses is as it was left."""
        self.lent = {name: (x, version) for name, (x, version) in self.lent.items() if x() is not None}
        for name, (reference, version) in self.lent.items():
            if name not in self and local(reference())._version != version:
                del self.lent[name]
                raise UsageError(
                    f"values of {name!r} that were read from opt.state before the last step were written to. They "
                    f"are no longer the optimizer's: read opt.state[p][{name!r}] again, and write before a step"
                )
        if self.entry is None or self.param is not param or self.get("step") is not self.shown:
            return False
        same = (self.get(plane.name) is held for plane, held in self.entry.by_plane())
        return all(same) and not any(slot in self for slot in self.entry.layout.coded)

    def __missing__(self, name):
        """A moment that is kept in codes, by torch's name: its values. What is written to them until the next
        step is taken over by it; later it is refused."""
        if self.entry is None or name not in self.entry.layout.coded:
            raise KeyError(name)
        with torch.inference_mode(False), torch.no_grad():
            self[name] = values = like(self.param, self.entry.values(name, local(self.param)), 1)
        self.lent[name] = weakref.ref(values), local(values)._version
        return values

    def __reduce__(self):
        return dict, (dict(self),)


@_noting
class States(collections.defaultdict):
    """The states of all parameters."""

    def __init__(self, held=()):
        super().__init__(dict, held)
        self.changed = dict.fromkeys(self)

    def note(self, *args):
        one = args and isinstance(args[0], (torch.Tensor, str))
        self.changed.update(dict.fromkeys(args[:1] if one else self))

    def __missing__(self, key):
        return dict.setdefault(self, key, State(key, self.changed))

    def of(self, param):
        """The parameter's State: what a user has put there becomes one. Extra bits complete one weight alone."""
        held = self[param]
        if not isinstance(held, State) or held.param is not param or held.changed is not self.changed:
            moved = {name: x for name, x in held.items() if name != "extra" or not isinstance(held, State)}
            held = State(param, self.changed, moved)
            dict.__setitem__(self, param, held)
        return held

    def __reduce__(self):
        return collections.defaultdict, (dict, dict(self))

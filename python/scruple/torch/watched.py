"""opt.state: torch's dicts, which record that they were written to.

Users set state as with torch.optim: opt.state[p] = {}, opt.state[p]["exp_avg"] = values, ["step"] = 0. The
optimizer takes that over before its next step (Optimizer._adopt). A step without a record tests one flag.
"""

import collections
import functools
import sys
import weakref

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import _get_scalar_dtype

from .._abi import UsageError
from .shards import like, local


def _noting(cls):
    """Has every method that writes say so first."""
    for name in ("__setitem__", "__delitem__", "__ior__", "clear", "pop", "popitem", "update"):

        def noted(self, *args, _write=getattr(cls, name), **kwargs):
            self.note(*args)
            return _write(self, *args, **kwargs)

        setattr(cls, name, functools.wraps(getattr(cls, name))(noted))
    return cls


class Lent:
    """A tensor that a user set as a moment and that a step has encoded, with a copy of its values. Later
    writes to the tensor would be lost, so they are looked for as long as somebody has it or a view of it."""

    def __init__(self, values):
        x = local(values).detach()
        self.tensor, self.memory = weakref.ref(values), StorageWeakRef(x.untyped_storage())
        self.was, self.part = x.clone(), (x.storage_offset(), x.shape, x.stride())

    def found(self):
        """The tensor, which may be elsewhere now (`x.data = ...`), and its memory, which views may have."""
        tensor, memory = self.tensor(), torch.UntypedStorage._new_with_weak_ptr(self.memory.cdata)
        found = [] if tensor is None else [local(tensor)]
        return found if memory is None else [*found, self.was.new_empty(0).set_(memory, *self.part)]

    def is_written(self):
        return not all(torch.equal(self.was, x.to(self.was)) for x in self.found())


@_noting
class State(dict):
    """The state of one parameter. The package writes with `dict.update(state, ...)`, which leaves no record.

    A moment that is stored as codes can be read by torch's name ("exp_avg"). It is then decoded into this
    dict, and the next step takes it back, with what the user has written.
    """

    def __init__(self, param, changed, held=()):
        super().__init__(held)
        self.param, self.changed = param, changed
        self.entry = None  # the Entry over these planes, which says what they mean
        # The count, the tensor that shows it as "step", and where that lies.
        self.steps, self.shown, self.place = 0, None, 0
        self.lent = {}  # {(name, address): Lent}

    def note(self, *_):
        self.changed[self.param] = None

    def show(self, steps, tensor=None):
        """Counts so many steps, which `tensor` or a new one shows."""
        if tensor is None:
            with torch.inference_mode(False):
                tensor = torch.tensor(float(steps), dtype=_get_scalar_dtype(), device="cpu")
        self.steps, self.shown, self.place = steps, tensor, tensor.data_ptr()
        dict.update(self, step=tensor)

    def has(self, name):
        """Whether it stands here; `in` is true of what can be read, too."""
        return dict.__contains__(self, name)

    def forget_lent(self):
        self.lent = {key: x for key, x in self.lent.items() if x.found()}

    def is_intact(self, param):
        """Whether all that a step of this parameter uses is as it was left."""
        self.forget_lent()
        for (name, place), lent in list(self.lent.items()):
            again = dict.get(self, name)
            again = torch.is_tensor(again) and (again is lent.tensor() or local(again).data_ptr() == place)
            if not again and lent.is_written():
                del self.lent[name, place]
                what = f"a tensor that was {name!r} in opt.state before the last step was written to"
                raise UsageError(f"{what}; read or set opt.state[p][{name!r}] again, and write before a step")
        if self.entry is None or self.get("step") is not self.shown:
            return False
        same = all(self.get(plane.name) is held for plane, held in self.entry.by_plane())
        same = same and self.param is param and not any(map(self.has, self.entry.layout.coded))
        here = [x.data_ptr() for x in (self.shown, *self.entry.planes)]  # `x.data = ...` leaves no note
        return same and here == [self.place, *self.entry.places]

    def __missing__(self, name):
        if not self.__contains__(name):
            raise KeyError(name)
        with torch.inference_mode(False), torch.no_grad():
            self[name] = like(self.param, self.entry.values(name, local(self.param)), 1)
        return self[name]

    def __contains__(self, name):
        return self.has(name) or any(map(self.has, self._planes_of(name)))

    def _planes_of(self, name):
        """The names of the planes that hold a moment in codes."""
        if self.entry is None or name not in self.entry.layout.coded:
            return ()
        return [plane.name for plane in self.entry.layout.planes if plane.slot == name]

    def get(self, name, default=None):
        return self[name] if name in self else default

    def setdefault(self, name, default=None):
        if name not in self:
            self[name] = default
        return self[name]

    def pop(self, name, *default):
        """Planes of a moment go with it: the next step asks for what is missing."""
        if name in self:
            default = (self[name],)
        for plane in self._planes_of(name):
            dict.pop(self, plane, None)
        return dict.pop(self, name, *default)

    __delitem__ = pop

    def __reduce__(self):
        return dict, (dict(self),)


def copy_of(param, held):
    """A parameter's state with its extra bits, but nothing of what its planes mean; else the user's own entry."""
    return State(param, {}, held) if isinstance(held, dict) and isinstance(param, torch.Tensor) else held


@_noting
class States(collections.defaultdict):
    """The states of all parameters."""

    def __init__(self, *held):
        super().__init__(dict, *held[-1:])  # a copy gives the factory first
        self.changed = dict.fromkeys(self)
        self.taken = []  # plain dicts that became states: (parameter, State, dict, what it had)

    def note(self, *args):
        one = args and isinstance(args[0], (torch.Tensor, str))
        self.changed.update(dict.fromkeys(args[:1] if one else self))

    def __missing__(self, key):
        return dict.setdefault(self, key, State(key, self.changed))

    def of(self, param):
        """The parameter's State; what a user has put there becomes one. Extra bits of another weight, or of an
        earlier one, are left out: they belong to the weight, and not to its moments."""
        held = self[param]
        owner = held.param if isinstance(held, State) else None
        is_mine = owner is param and held.changed is self.changed
        if not is_mine and (owner is None or held.changed is not self.changed or self.get(owner) is held):
            made = State(param, self.changed, held)  # of a plain dict, or of what is another's too
            if owner is param:
                vars(made).update(vars(held), changed=self.changed)
            elif owner is None:
                self.taken.append((param, made, held, dict(held)))
            dict.__setitem__(self, param, made)
            held = made
        if owner is not param:
            held.entry, held.param = None, param
            dict.pop(held, "extra", None)
        return held

    def check_taken(self):
        """A plain dict in opt.state is copied into a State. Refuses later writes to it, which would be lost."""
        self.taken = [x for x in self.taken if self.get(x[0]) is x[1] and sys.getrefcount(x[2]) > 2]
        for _, _, held, was in self.taken:
            if list(map(id, held.values())) != list(map(id, was.values())):
                raise UsageError("a dict was written to after a step took it over; write to opt.state[p]")

    def __reduce__(self):
        return collections.defaultdict, (dict, dict(self))

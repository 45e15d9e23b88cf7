"""What the tests over several processes share: worlds of gloo ranks, models whose gradients a case decides, and
comparisons of shards.

Worlds of 2 and 3 ranks are started once and run one case after another; a world in which a rank fails while
others wait for it is ended and started anew.
"""

import datetime
import faulthandler
import itertools
import multiprocessing
import multiprocessing.connection
import socket
import time
import traceback
import unittest
import warnings

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from scruple import _abi
from support import bits

LIMIT = 60  # seconds that anything may wait for another rank


def rank_main(rank, world, port, pipe):
    """Runs the cases that come through the pipe; answers each with None or a traceback."""
    warnings.filterwarnings("ignore")
    faulthandler.enable()  # a rank that crashes says where
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, world, rank == 0, timeout=datetime.timedelta(seconds=LIMIT))
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world, timeout=datetime.timedelta(seconds=LIMIT)
    )
    while True:
        case, arguments = pipe.recv()
        try:
            case(*arguments)
            pipe.send(None)
        except BaseException:  # noqa: BLE001 - all of it is for the parent to tell
            pipe.send(traceback.format_exc())


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class World:
    """Some ranks, each a process of its own; started at the first case."""

    def __init__(self, size):
        self.size, self.ranks, self.pipes = size, [], []

    def start(self):
        # Forked, a rank need not import torch again, which takes seconds; the parent runs nothing of torch.
        forks = "fork" in multiprocessing.get_all_start_methods()
        spawn, port = multiprocessing.get_context("fork" if forks else "spawn"), free_port()
        for rank in range(self.size):
            mine, theirs = spawn.Pipe()
            process = spawn.Process(target=rank_main, args=(rank, self.size, port, theirs), daemon=True)
            process.start()
            theirs.close()
            self.ranks.append(process)
            self.pipes.append(mine)

    def run(self, case, *arguments):
        """{rank: traceback} of those that failed."""
        if not self.ranks:
            self.start()
        for pipe in self.pipes:
            pipe.send((case, arguments))
        problems, waiting, end = {}, dict(zip(self.pipes, range(self.size))), time.monotonic() + 2 * LIMIT
        while waiting and time.monotonic() < end:
            for pipe in multiprocessing.connection.wait(list(waiting), timeout=0.5):
                rank = waiting.pop(pipe)
                try:
                    problem = pipe.recv()
                except EOFError:
                    problem = "the process has ended"
                if problem is not None:
                    problems[rank] = problem
                    end = min(end, time.monotonic() + 3)  # the others may wait for this one in vain
        for rank in waiting.values():
            problems[rank] = "still waiting when another had failed, or beyond the time limit"
        if waiting or any("has ended" in problem for problem in problems.values()):
            self.stop()
        return problems

    def stop(self):
        for process in self.ranks:
            process.kill()
        for process in self.ranks:
            process.join(10)
        self.ranks, self.pipes = [], []


class Distributed(unittest.TestCase):
    """Tests are functions that every rank of a world runs; `ranks` makes them of its methods."""

    @classmethod
    def setUpClass(cls):
        cls.worlds = {size: World(size) for size in (2, 3)}
        for world in cls.worlds.values():
            world.start()
            cls.addClassCleanup(world.stop)

    def run_in(self, size, case, *arguments):
        same = {}
        for rank, problem in sorted(self.worlds[size].run(case, *arguments).items()):
            same.setdefault(problem, []).append(str(rank))
        told = (f"rank {', '.join(ranks)} of {size}: {problem}" for problem, ranks in same.items())
        self.assertFalse(same, f"{case.__name__}{arguments}\n" + "\n".join(told))


def ranks(*sizes, cases=((),)):
    """A test in worlds of these sizes, once for each tuple of arguments."""

    def mark(case):
        def test(self):
            for size, arguments in itertools.product(sizes, cases):
                with self.subTest(ranks=size, arguments=arguments):
                    self.run_in(size, case, *arguments)

        setattr(Distributed, "test_" + case.__name__, test)
        return case

    return mark


class Bag(torch.nn.Module):
    """Parameters of given shapes whose gradients are the inputs, so that a case decides every gradient."""

    def __init__(self, shapes, dtype=torch.bfloat16):
        super().__init__()
        torch.manual_seed(1)
        for i, shape in enumerate(shapes):
            self.register_parameter(f"p{i}", torch.nn.Parameter(torch.randn(shape).to(dtype)))

    def forward(self, gradients):
        return sum((p * g.to(p.dtype)).sum().float() for p, g in zip(self.parameters(), gradients))


# Even rows; uneven; fewer rows than ranks; one row; rows that are not multiples of 128 (even, uneven, few);
# 1-D.
SHAPES = [
    (6, 128),
    (7, 256),
    (2, 128),
    (1, 384),
    (6, 64),
    (10, 100),
    (2, 100),
    (5, 3, 2, 2),
    (384,),
    (100,),
    (2,),
]


def gradients_of(shapes, step, rank=0, spread=1.0):
    g = torch.Generator().manual_seed(1000 * step + rank)
    return [torch.randn(shape, generator=g) * spread for shape in shapes]


def aligned(shape, world=None):
    """Whether all shards of rows begin on the boundary of a group."""
    world = world or dist.get_world_size()
    chunk = -(-shape[0] // world)
    row = torch.Size(shape[1:]).numel()
    return all(begin * row % 128 == 0 for begin in range(chunk, shape[0], chunk))


def mlp(dtype=torch.float32, widths=(128, 192, 128, 6)):
    torch.manual_seed(2)
    layers = []
    for a, b in itertools.pairwise(widths):
        layers += [torch.nn.Linear(a, b), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers[:-1]).to(dtype)


def batch(step, rank, dtype=torch.float32, width=128, out=6):
    g = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(8, width, generator=g).to(dtype), torch.randn(8, out, generator=g).to(dtype)


def loss_of(model, step, rank, dtype=torch.float32):
    x, y = batch(step, rank, dtype)
    return (model(x) - y).float().square().mean()


def sharded(model, mesh=None, **kw):
    """fully_shard for each layer that has parameters, and for what is left."""
    mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer, mesh=mesh, **kw)
    return fully_shard(model, mesh=mesh, **kw)


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def expect(condition, *what):
    if not condition:
        raise AssertionError(" ".join(map(str, what)))


def expect_equal(a, b, *what):
    if hasattr(a, "full_tensor") and hasattr(b, "full_tensor") and a.placements == b.placements:
        a, b = a.to_local(), b.to_local()  # every rank looks at its own
    a, b = whole(a).detach(), whole(b).detach()
    if not torch.equal(bits(a), bits(b)):
        worst = (a.double() - b.double()).abs().max().item() if a.shape == b.shape else (a.shape, b.shape)
        raise AssertionError(f"{' '.join(map(str, what))}: bits differ, by up to {worst}")


def expect_near(a, b, limit, *what):
    worst = (whole(a).double() - whole(b).double()).abs().max().item() if whole(a).numel() else 0.0
    expect(worst <= limit, *what, f"differ by {worst}, and may by {limit}")


def expect_same_model(a, b, *what):
    for (name, p), q in zip(a.named_parameters(), b.parameters()):
        expect_equal(p, q, *what, name)


def expect_alike(a, opt, b, other, *what):
    """Two models and their optimizers, to the bit."""
    expect_same_model(a, b, *what)
    expect_state_equal(opt.state_dict(), other.state_dict(), *what)


def expect_refused(words, call, *arguments, **options):
    try:
        call(*arguments, **options)
    except ValueError as problem:
        expect(all(word in str(problem) for word in words), problem)
    else:
        expect(False, "accepted", options)


def expect_near_model(a, b, limit, *what):
    for (name, p), q in zip(a.named_parameters(), b.parameters()):
        expect_near(p, q, limit, *what, name)


def expect_same_way(a, b, start, share, *what):
    """Two models have gone from `start` in nearly the same direction: for small gradients of either sign
    Adam's steps differ by up to 2 lr, so that no limit per element says much."""
    for (name, p), q, origin in zip(a.named_parameters(), b.parameters(), start.parameters()):
        expect_near_of_way(*(whole(x).double() for x in (p, q, origin)), share, *what, name)


def expect_same_way_on_the_whole(a, b, start, share, *what):
    """The same over all parameters at once. A bias of 6 elements may be far off by one of them whose gradient
    is nearly zero: by 0.02 or 0.75 of the way for the last one here, as the seed of an 8-bit accumulator has
    it, and by 0.75 with a bf16 one."""
    found = (torch.cat([whole(x).double().reshape(-1) for x in m.parameters()]) for m in (a, b, start))
    expect_near_of_way(*found, share, *what)


def expect_near_of_way(p, q, origin, share, *what):
    off = (p - q).norm() / (p - origin).norm()
    expect(off <= share, *what, f"off by {off:.3f} of the way, and may by {share}")


def expect_replicas(model, opt=None):
    """All ranks have the same bits."""
    tensors = [bits(p) for p in model.parameters()]
    if opt is not None:
        tensors += [bits(plane) for state in opt.state_dict()["state"].values() for plane in state.values()]
    mine = torch.cat(tensors)
    all_of_them = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(all_of_them, mine)
    expect(all(torch.equal(mine, other) for other in all_of_them), "replicas differ")


def expect_state_equal(a, b, *what):
    """Two state dicts with the same planes, gathered."""
    expect(a["state"].keys() == b["state"].keys(), *what)
    for key, planes in a["state"].items():
        expect(planes.keys() == b["state"][key].keys(), *what, key, list(planes), list(b["state"][key]))
        for name, plane in planes.items():
            expect_equal(plane, b["state"][key][name], *what, key, name)


def bound_of(form, nonneg, values):
    """How far a value may be from what a format makes of it; the group's largest is at most the tensor's."""
    info = _abi.FormatInfo()
    _abi.library.get_format_info(_abi.format_named(form).handle, info)
    bound = info.bound_nonneg if nonneg else info.bound
    # Rounded to nearest; stochastically it may be twice that (log4 and log5, whose levels are not even: 3 and
    # 2.5 times), and a little for the scale's own rounding.
    return {"log4": 3.01, "log5": 2.51}.get(form, 2.01) * (
        bound.relative * values.abs() + bound.group * values.abs().max() + bound.absolute
    )

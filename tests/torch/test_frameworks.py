"""The modules for torchtitan, axolotl and LLM Foundry. Where such a package is not installed, a stand-in with
the part of its interface that the module meets takes its place, and the test says so."""

import contextlib
import dataclasses
import importlib
import pathlib
import re
import sys
import tempfile
import types
import unittest

import torch

from support import BF16, KINDS, Case, loss_of, mlp, picture, same, st

ROOT = pathlib.Path(__file__).resolve().parents[2]


@contextlib.contextmanager
def standing_in(name, **attributes):
    """The real module, or one made of `attributes`."""
    try:
        importlib.import_module(name)
        yield True
        return
    except ImportError:
        pass
    parts = name.split(".")
    made = [".".join(parts[: i + 1]) for i in range(len(parts))]
    before = {key: sys.modules.pop(key, None) for key in made}
    for key in made:
        sys.modules[key] = types.ModuleType(key)
    vars(sys.modules[name]).update(attributes)
    try:
        yield False
    finally:
        for key, value in before.items():
            sys.modules.pop(key)
            if value is not None:
                sys.modules[key] = value


# ---- torchtitan: components/optimizer, 0.3 ----


@dataclasses.dataclass(kw_only=True)
class ParamGroupConfig:
    pattern: str
    optimizer_name: str
    optimizer_kwargs: dict = dataclasses.field(default_factory=dict)


class OptimizersContainer:
    """Makes an optimizer by name for the parameters that match, with options in their groups."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config:
        param_groups: list = dataclasses.field(default_factory=list)
        implementation: str = "fused"

        def build(self, **objects):
            return self._owner(config=self, **objects)

    def __init_subclass__(cls):
        cls.Config._owner = cls

    @staticmethod
    def _resolve_optimizer_factory(name):
        if name not in ("Adam", "AdamW"):
            raise NotImplementedError(name)
        return getattr(torch.optim, name)

    def __init__(self, config, *, model_parts):
        self.optimizers, claimed = [], set()
        for model in model_parts:
            by_name = {}
            for asked in config.param_groups:
                found = [
                    (name, p)
                    for name, p in model.named_parameters()
                    if name not in claimed and re.search(asked.pattern, name)
                ]
                claimed.update(name for name, _ in found)
                group = dict(params=[p for _, p in found], param_names=[name for name, _ in found])
                group.update(fused=config.implementation == "fused", foreach=False, **asked.optimizer_kwargs)
                by_name.setdefault(asked.optimizer_name, []).append(group)
            for name, groups in by_name.items():
                self.optimizers.append(self._resolve_optimizer_factory(name)(groups))

    def step(self):
        for opt in self.optimizers:
            opt.step()

    def zero_grad(self):
        for opt in self.optimizers:
            opt.zero_grad()

    def state_dict(self):
        return {str(i): opt.state_dict() for i, opt in enumerate(self.optimizers)}

    def load_state_dict(self, saved):
        for i, opt in enumerate(self.optimizers):
            opt.load_state_dict(saved[str(i)])


class Torchtitan(Case):
    def test_container(self):
        name, how = "torchtitan.components.optimizer", dict(lr=1e-2, recipe="scant")
        parts = dict(OptimizersContainer=OptimizersContainer, ParamGroupConfig=ParamGroupConfig)
        with standing_in(name, **parts) as real:
            group = sys.modules[name].ParamGroupConfig
            ours = importlib.import_module("scruple.torch.torchtitan")
            decays = {"bias$": 0.0, ".*": 0.1}
            asked = [
                group(
                    pattern=pattern, optimizer_name="AdamW", optimizer_kwargs=dict(weight_decay=decay, **how)
                )
                for pattern, decay in decays.items()
            ]
            config = ours.OptimizersContainer.Config(param_groups=asked)
            made = config.build(model_parts=[model := mlp(BF16)])
            self.assertIsInstance(made, ours.OptimizersContainer)
            (opt,) = made.optimizers
            self.assertIs(type(opt), st.AdamW)
            twin, groups = mlp(BF16), ([], [])
            for name, p in twin.named_parameters():
                groups[not name.endswith("bias")].append(p)
            plain = [dict(params=ps, weight_decay=decay) for ps, decay in zip(groups, decays.values())]
            plain = st.AdamW(plain, **how)

            def steps(first, count, *pairs):
                for step in range(first, first + count):
                    for net, optimizer in pairs:
                        loss_of(net, step).backward()
                        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
                        optimizer.step()
                        optimizer.zero_grad()

            steps(0, 3, (model, made), (twin, plain))
            self.assertSame(model.state_dict(), twin.state_dict())
            # Saved, loaded into a new one, and on: the same bits.
            late = mlp(BF16)
            late.load_state_dict(model.state_dict())
            again = config.build(model_parts=[late])
            again.load_state_dict(made.state_dict())
            steps(3, 3, (late, again), (twin, plain))
            self.assertSame(late.state_dict(), twin.state_dict())
            with self.assertRaises(NotImplementedError):
                ours.OptimizersContainer._resolve_optimizer_factory("Optimizer2")
            print("torchtitan" if real else "a stand-in of torchtitan", file=sys.stderr)

    def test_another_name_of_the_hook(self):
        """As on the main branch for a while: torch's AdamW would run."""
        other = {**vars(OptimizersContainer), "_resolve_factory": OptimizersContainer._resolve_optimizer_factory}
        other = {name: x for name, x in other.items() if not name.startswith(("__dict", "__weak", "_resolve_opt"))}
        sys.modules.pop("scruple.torch.torchtitan", None)
        with standing_in("torchtitan.components.optimizer", OptimizersContainer=type("Other", (), other)) as real:
            if real:
                self.skipTest("torchtitan is installed")
            with self.assertRaisesRegex(ImportError, "torchtitan 0.3, or its main branch from 14 August 2026 on"):
                importlib.import_module("scruple.torch.torchtitan")


# ---- axolotl: integrations/base, 0.19 ----


class BasePlugin:
    def __init__(self):
        pass

    def get_input_args(self):
        return None

    def post_trainer_create(self, cfg, trainer):
        pass


class Cfg(dict):
    """Keys as attributes, None where there is none."""

    __getattr__ = dict.get


class Axolotl(Case):
    def setUp(self):
        try:
            import pydantic
            import transformers
        except ImportError as problem:
            self.skipTest(str(problem))

    def train(self, folder, cfg, plugin, **options):
        from test_transformers import Model, make_trainer

        loop = dict(max_steps=4, learning_rate=1e-2, weight_decay=0.1, save_strategy="no")
        trainer = make_trainer(folder, Model(BF16), **loop, **options)
        plugin.post_trainer_create(cfg, trainer)
        trainer.train()
        return trainer

    def test_plugin(self):
        with standing_in("axolotl.integrations.base", BasePlugin=BasePlugin) as real:
            ours = importlib.import_module("scruple.torch.axolotl")
            plugin = ours.ScruplePlugin()
            module, _, name = plugin.get_input_args().rpartition(".")
            arguments = getattr(importlib.import_module(module), name)
            self.assertIn("scruple", arguments.model_fields)
            for gradients in ("stored", "compressed", "released"):
                options = dict(gradient_accumulation_steps=2)
                if gradients == "released":
                    options = dict(max_grad_norm=0)
                asked = dict(optimizer="AdamW", gradients=gradients, recipe="scant", betas=[0.9, 0.95])
                cfg = Cfg(scruple=asked)
                arguments(**cfg)
                with self.subTest(gradients), tempfile.TemporaryDirectory() as folder:
                    trainer = self.train(folder, cfg, plugin, **options)
                    opt = trainer.optimizer.optimizer
                    self.assertIs(type(opt), st.AdamW)
                    self.assertEqual({g["recipe"] for g in opt.param_groups}, {"scant"})
                    self.assertEqual(list(opt.param_groups[0]["betas"]), [0.9, 0.95])
                    self.assertEqual({g["weight_decay"] for g in opt.param_groups}, {0.0, 0.1})
                    self.assertEqual({int(s["step"]) for s in opt.state_dict()["state"].values()}, {4})
            with self.refused("'Sophia'", "AdamW"):
                plugin.post_trainer_create(Cfg(scruple=dict(optimizer="Sophia")), None)
            print("axolotl" if real else "a stand-in of axolotl", file=sys.stderr)


class LlmFoundry(Case):
    def test_entry_points(self):
        """Each names a class that takes the model's parameters as `params`, as LLM Foundry gives them."""
        text = (ROOT / "pyproject.toml").read_text()
        section = re.search(r"\[project\.entry-points\.llmfoundry_optimizers\]\n((?:\w.*\n)+)", text)[1]
        found = dict(re.findall(r'(\w+) = "([^"]+)"', section))
        kinds = sorted(KINDS, key=lambda kind: kind.__name__.lower())
        self.assertEqual(sorted(found), [f"scruple_{kind.__name__.lower()}" for kind in kinds])
        for name, kind in zip(sorted(found), kinds):
            with self.subTest(name):
                module, _, attribute = found[name].partition(":")
                self.assertIs(getattr(importlib.import_module(module), attribute), kind)
                self.assertTrue(issubclass(kind, torch.optim.Optimizer))
                model = mlp(BF16)
                opt = kind(lr=1e-3, recipe="scruple", params=model.parameters())
                before = picture(opt, model)["model"]
                loss_of(model, 0).backward()
                opt.step()
                self.assertFalse(same(before, model.state_dict()))


if __name__ == "__main__":
    unittest.main()

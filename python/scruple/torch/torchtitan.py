"""torchtitan with the optimizers of scruple.torch: with this container's Config in place of torchtitan's own,
AdamW, Lion and the others in its param_groups are ours, with their options.

    adamw = {"lr": 3e-4, "weight_decay": 0.1, "recipe": "scant"}
    optimizer=OptimizersContainer.Config(
        param_groups=[ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs=adamw)]
    )

Gradients are stored: torchtitan clips them between backward and step.
"""

from dataclasses import dataclass

from torchtitan.components.optimizer import OptimizersContainer as Base

from . import optimizers

if not hasattr(Base, "_resolve_optimizer_factory"):
    what = "this torchtitan has no OptimizersContainer._resolve_optimizer_factory, and would run torch's optimizers"
    raise ImportError(f"{what}. Install torchtitan 0.3, or its main branch from 14 August 2026 on")


class OptimizersContainer(Base):
    @dataclass(kw_only=True, slots=True)
    class Config(Base.Config):
        """torchtitan makes the container in whose class a Config stands."""

    @staticmethod
    def _resolve_optimizer_factory(name):
        kind = getattr(optimizers, name, None)
        ours = isinstance(kind, type) and issubclass(kind, optimizers.Optimizer)
        return kind if ours else Base._resolve_optimizer_factory(name)

"""axolotl's plugin. In its configuration:

    plugins:
      - scruple.torch.axolotl.ScruplePlugin
    scruple:
      optimizer: AdamW        # or Lion, SGD, ...; the rest are its arguments
      gradients: compressed   # or released, stored
      recipe: scruple

Learning rate, weight decay, betas, accumulation and clipping are those of the configuration.
"""

from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel

from .._abi import UsageError
from . import optimizers
from .transformers import release_gradients


class ScrupleArgs(BaseModel):
    """What axolotl lets stand in its configuration."""

    scruple: dict | None = None


class ScruplePlugin(BasePlugin):
    def get_input_args(self):
        return "scruple.torch.axolotl.ScrupleArgs"

    def post_trainer_create(self, cfg, trainer):
        """Here and not in create_optimizer, which axolotl does not call."""
        options = dict(cfg.scruple or {})
        name, gradients = options.pop("optimizer", "AdamW"), options.pop("gradients", "stored")
        kind = getattr(optimizers, name, None)
        if not (isinstance(kind, type) and issubclass(kind, optimizers.Optimizer)):
            raise UsageError(f"scruple.optimizer is {name!r}; it can be one of scruple.torch, such as AdamW")
        args = trainer.args
        made = {"lr": args.learning_rate, "weight_decay": args.weight_decay}
        if name in ("Adam", "AdamW"):
            made.update(betas=(args.adam_beta1, args.adam_beta2), eps=args.adam_epsilon)
        trainer.optimizer_cls_and_kwargs = kind, {**made, **options}
        if gradients != "stored":
            release_gradients(trainer, gradients)

"""Lightning's Trainer with gradients that do not wait for the step.

    trainer = lightning.Trainer(callbacks=[ReleaseGradients("compressed")], gradient_clip_val=1.0, ...)

Stored gradients need nothing of this: return an optimizer of scruple.torch from configure_optimizers.
"""

try:
    from lightning.pytorch import Callback
except ImportError:  # the same under its older name
    from pytorch_lightning import Callback

from .._abi import UsageError
from .release import release_gradients


class ReleaseGradients(Callback):
    """scruple.torch.release_gradients for the length of every trainer.fit(). Accumulation, gradient_clip_val
    and loss scaling are the Trainer's; other `options` are passed on. `handle` is what it returned."""

    def __init__(self, policy="compressed", **options):
        self.policy, self.options, self.handle, self.clip = policy, options, None, None

    def on_train_start(self, trainer, module):
        """After a checkpoint has been loaded, which has to come first."""
        if not module.automatic_optimization:
            raise UsageError("manual optimization: call scruple.torch.release_gradients in on_train_start")
        if len(trainer.optimizers) != 1:
            raise UsageError(f"there are {len(trainer.optimizers)} optimizers; release works with one")
        self.clip, by = trainer.gradient_clip_val, trainer.gradient_clip_algorithm
        if self.clip and by not in (None, "norm"):
            raise UsageError(f"gradient_clip_algorithm is {by!r}; release clips by 'norm'")
        model = trainer.strategy.model  # not the module inside: a DDP has to be seen and refused
        scaler = getattr(trainer.precision_plugin, "scaler", None) or False
        given = dict(accumulate=trainer.accumulate_grad_batches, max_norm=self.clip or None, scaler=scaler)
        given["reduction"] = "sum"  # Lightning divides the loss
        self.handle = release_gradients(model, trainer.optimizers[0], self.policy, **given, **self.options)
        trainer.gradient_clip_val = None  # it would find no gradients

    def on_train_end(self, trainer, module, exception=None):
        if self.handle is not None:
            self.handle.remove()
            self.handle, trainer.gradient_clip_val = None, self.clip

    on_exception = on_train_end

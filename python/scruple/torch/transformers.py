"""Hugging Face's Trainer with gradients that do not wait for the step.

    trainer = Trainer(model, args, optimizers=(AdamW(model.parameters(), lr=1e-4), None), ...)
    release_gradients(trainer, "compressed")
    trainer.train()
"""

import torch
from transformers import TrainerCallback

from .._abi import UsageError
from . import release


def release_gradients(trainer, policy="compressed", **options):
    """scruple.torch.release_gradients for the length of every trainer.train(). Accumulation, max_grad_norm
    and loss scaling are the Trainer's; other `options` are passed on."""
    trainer.add_callback(Release(trainer, policy, options))


class Release(TrainerCallback):
    def __init__(self, trainer, policy, options):
        self.trainer, self.policy, self.options = trainer, policy, options
        self.handle = self.accelerator = None

    def on_train_begin(self, args, state, control, **_):
        """After the Trainer has loaded its checkpoint, which has to come first."""
        self._end()  # the last train() ended in an exception
        trainer, options = self.trainer, self.options
        per_tensor = options.get("tensor_norm") or options.get("adagc")
        max_norm = args.max_grad_norm if args.max_grad_norm and not per_tensor else None
        if max_norm and self.policy == "released":
            raise UsageError(
                f"policy 'released' with max_grad_norm={max_norm} (the Trainer's default is 1.0): parameters "
                "are stepped before the norm of all is known; use policy 'compressed', set max_grad_norm=0, "
                "or clip each parameter by tensor_norm or adagc"
            )
        self.handle = release.release_gradients(
            trainer.model_wrapped,  # not the model inside: a DDP has to be seen and refused
            trainer.optimizer,
            self.policy,
            accumulate=args.gradient_accumulation_steps,
            reduction="sum",  # the Trainer divides the loss
            max_norm=max_norm,
            scaler=trainer.accelerator.scaler or False,
            **options,
        )
        # What clips stored gradients would find none, and log a norm of 0.
        self.accelerator, trainer.accelerator.clip_grad_norm_ = trainer.accelerator, self._norm

    def on_train_end(self, args, state, control, **_):
        self._end()

    def _norm(self, *_, **__):
        """The norm of the step, clipped already; None, which is not logged, where it is not taken."""
        self.handle.flush()
        return torch.tensor(self.handle.report()["norm"]) if self.policy == "compressed" else None

    def _end(self):
        if self.handle is not None:
            self.handle.remove()
            del self.accelerator.clip_grad_norm_
        self.handle = None

"""Hugging Face's Trainer with gradients that do not wait for the step.

trainer = Trainer(model, args, optimizers=(AdamW(model.parameters(), lr=1e-4), None), ...)
release_gradients(trainer, "compressed")
trainer.train()
"""

import torch
from transformers import TrainerCallback

from .._abi import UsageError
from . import release
from .shards import is_sharded


def release_gradients(trainer, policy="compressed", **options):
    """scruple.torch.release_gradients for the length of every trainer.train(). Accumulation, max_grad_norm
    and loss scaling are the Trainer's; other `options` are passed on."""
    trainer.add_callback(Release(trainer, policy, options))


class Release(TrainerCallback):
    def __init__(self, trainer, policy, options):
        self.trainer, self.policy, self.options = trainer, policy, options
        self.handle = self.accelerator = None
        self.hooks, self.norms = [], []

    def on_train_begin(self, args, state, control, **_):
        """After the Trainer has loaded its checkpoint, which has to come first."""
        self.on_train_end()  # the last train() ended in an exception
        trainer, options = self.trainer, self.options
        per_tensor = options.get("tensor_norm") or options.get("adagc")
        max_norm = args.max_grad_norm if args.max_grad_norm and not per_tensor else None
        if max_norm and self.policy == "released":
            what = f"'released' with max_grad_norm={max_norm} (the Trainer's default is 1.0) steps before the norm is known"
            raise UsageError(f"{what}; use 'compressed', max_grad_norm=0, or clip by tensor_norm or adagc")
        model, parts = trainer.model_wrapped, args.gradient_accumulation_steps  # a DDP is seen and refused
        params = [p for p in model.parameters() if p.requires_grad]
        if self.policy == "released" and parts == 1 and not any(map(is_sharded, params)):
            # Before those of release, which take the gradients.
            self.hooks = [p.register_post_accumulate_grad_hook(self._see) for p in params]
        given = dict(accumulate=parts, max_norm=max_norm, scaler=trainer.accelerator.scaler or False)
        given["reduction"] = "sum"  # the Trainer divides the loss
        self.handle = release.release_gradients(model, trainer.optimizer, self.policy, **given, **options)
        # What clips stored gradients would find none, and log a norm of 0.
        self.accelerator, trainer.accelerator.clip_grad_norm_ = trainer.accelerator, self._norm

    def _see(self, p):
        if p.grad is not None:
            self.norms.append(torch.linalg.vector_norm(p.grad.detach(), dtype=torch.float32))

    def _norm(self, *_, **__):
        """The norm of the step, clipped already; None, which is not logged, where it is not known."""
        self.handle.flush()
        if self.policy == "compressed":
            return torch.tensor(self.handle.report()["norm"])
        if not self.norms:
            return None
        norm = torch.stack([norm.to(self.norms[0].device) for norm in self.norms]).norm()
        self.norms.clear()
        scaler = self.accelerator.scaler
        return norm if scaler is None else norm / scaler.get_scale()

    def on_train_end(self, *_, **__):
        for hook in self.hooks:
            hook.remove()
        if self.handle is not None:
            self.handle.remove()
            del self.accelerator.clip_grad_norm_
        self.handle, self.hooks = None, []
        self.norms.clear()

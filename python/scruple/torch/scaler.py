"""Loss scaling for fp16: torch's GradScaler, for gradients of any dtype."""

import torch

from .._abi import UsageError
from .optimizer import Optimizer


class LossScaler(torch.amp.GradScaler):
    """torch.amp.GradScaler (2**16 at first, doubled after 2,000 clean steps, halved on overflow) that takes
    fp16 gradients, and bf16 ones on a GPU.

        scaler = LossScaler(device)
        scaler.scale(loss).backward()
        scaler.step(opt, max_norm=1.0)  # unscales, clips and skips inside the step; max_norm is optional
        scaler.update()

    torch's own refuses fp16 gradients in unscale_, since what it writes back would underflow. So does this
    one, and says what to do: scaler.step needs no unscale_.
    """

    def unscale_(self, optimizer):
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"]]
        if any(g is not None and g.dtype == torch.float16 for g in gradients):
            raise UsageError("fp16 underflows in unscale_; leave it to scaler.step(opt, max_norm=1.0)")
        super().unscale_(optimizer)

    def _check_inf_per_device(self, optimizer):
        """One call that only reads, where torch's writes every gradient back; over all ranks of shards."""
        if not isinstance(optimizer, Optimizer):
            return super()._check_inf_per_device(optimizer)
        found = self._per_optimizer_states[id(optimizer)]["found_inf_per_device"] = optimizer._found_inf()
        return found

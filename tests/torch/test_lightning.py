"""scruple.torch under Lightning, against the real package: configure_optimizers, automatic optimization,
gradient_clip_val, accumulation, and resuming to the bit, with gradients stored, released and compressed."""

import logging
import pathlib
import sys
import tempfile
import unittest
import warnings

try:
    import lightning
except ImportError:
    print("lightning is not installed")
    sys.exit(77)

import torch

from scruple.torch.lightning import ReleaseGradients
from support import BF16, DEVICE, FP32, Case, each, loss_of, mlp, picture, st, stored

BATCHES = 8  # with accumulation over 3, the last step of an epoch has 2


class Module(lightning.LightningModule):
    def __init__(self, dtype=FP32, kind=st.AdamW, **options):
        super().__init__()
        self.net, self.make = mlp(dtype), lambda: kind(self.parameters(), lr=1e-2, **options)
        self.losses = []

    def training_step(self, batch, _):
        loss = loss_of(self.net, int(batch))
        self.losses.append(float(loss))
        return loss

    def configure_optimizers(self):
        opt = self.make()
        schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 1 / (1 + step))
        return {"optimizer": opt, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def quiet_trainer(**options):
    silent = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    quiet = dict(accelerator=DEVICE.type, devices=1, **dict.fromkeys(silent, False))
    return lightning.Trainer(**quiet, **options)


def fit(release=None, module=None, epochs=2, resume=None, plugins=None, save=None, **options):
    module = Module(recipe="fp32") if module is None else module
    options = {"accumulate_grad_batches": 3, "gradient_clip_val": 0.2, **options}
    callbacks = [ReleaseGradients(**release)] if release else []
    trainer = quiet_trainer(max_epochs=epochs, callbacks=callbacks, plugins=plugins, **options)
    trainer.fit(module, torch.utils.data.DataLoader(range(BATCHES)), ckpt_path=resume)
    if save:
        trainer.save_checkpoint(save)
    return trainer, picture(trainer.optimizers[0], module.net)


class Lightning(Case):
    def setUp(self):
        warnings.simplefilter("ignore")
        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    def test_stored(self):
        """configure_optimizers alone: what torch's AdamW does."""
        _, ours = fit(module=Module(recipe="fp32", weight_decay=0.01))
        _, theirs = fit(module=Module(kind=torch.optim.AdamW, weight_decay=0.01))
        self.assertNear(ours["weights"], theirs["weights"], 2e-5)

    @each(clip=(0.2, None))
    def test_compressed_is_stored(self, clip):
        # SGD's steps show a wrong factor, which Adam's would forgive.
        ways = (None, dict(accumulator="fp32"))
        fits = [fit(way, Module(kind=st.SGD, recipe="fp32"), gradient_clip_val=clip) for way in ways]
        (_, stored), (trainer, found) = fits
        self.assertNear(stored["weights"], found["weights"], 2e-5)
        # fit() has ended: nothing is left of it.
        self.assertEqual(trainer.gradient_clip_val, clip)
        self.assertIsNone(trainer.optimizers[0]._handle)

    def test_released_is_stored(self):
        how = dict(accumulate_grad_batches=1, gradient_clip_val=None)
        _, stored = fit(module=Module(BF16), **how)
        _, found = fit(dict(policy="released"), module=Module(BF16), **how)
        self.assertSame(stored, found)

    def test_loss_scaling(self):
        """Lightning's scaler is found and used; clipping too, which Lightning does not do for optimizers that
        unscale in their step."""

        def scaled():
            scaler = torch.amp.GradScaler(DEVICE.type, init_scale=2.0**8)
            return lightning.pytorch.plugins.MixedPrecision("16-mixed", DEVICE.type, scaler)

        _, stored = fit(plugins=scaled(), gradient_clip_val=None)
        _, found = fit(dict(accumulator="fp32"), plugins=scaled(), gradient_clip_val=None)
        self.assertNear(stored["weights"], found["weights"], 1e-4)
        _, clipped = fit(dict(accumulator="fp32"), plugins=scaled())
        self.assertNotEqual(float(clipped["weights"][0].sum()), float(found["weights"][0].sum()))

    @each(
        case={
            "stored": (None, {}),
            "compressed": (dict(policy="compressed"), {}),
            "released": (dict(policy="released"), dict(accumulate_grad_batches=1, gradient_clip_val=None)),
        }
    )
    def test_resume(self, case):
        release, options = case
        with tempfile.TemporaryDirectory() as folder:
            path = str(pathlib.Path(folder) / "one.ckpt")
            _, whole = fit(release, Module(BF16), epochs=3, **options)
            fit(release, Module(BF16), epochs=1, save=path, **options)
            _, found = fit(release, Module(BF16), epochs=3, resume=path, **options)
            self.assertSame(whole, found)

    @each(
        case={
            "clipping": ("released", dict(accumulate_grad_batches=1), ("max_norm", "compressed")),
            "accumulation": ("released", dict(gradient_clip_val=None), ("3 micro-batches",)),
            "by value": ("compressed", dict(gradient_clip_algorithm="value"), ("'value'", "'norm'")),
        }
    )
    def test_refused(self, case):
        """Before a weight has moved; and the settings are as they were."""
        policy, options, words = case
        module = Module(recipe="fp32")
        with self.refused(*words):
            fit(dict(policy=policy), module, **options)
        self.assertEqual(module.losses, [])

    def test_longer_accumulation_later(self):
        """A schedule of accumulation that grows beyond what release was told of is refused, not cut short."""
        module = Module(recipe="fp32")
        schedule = lightning.pytorch.callbacks.GradientAccumulationScheduler({0: 2, 1: 4})
        trainer = quiet_trainer(max_epochs=2, callbacks=[ReleaseGradients(), schedule])
        with self.refused("accumulate=", "opt.step()"):
            trainer.fit(module, torch.utils.data.DataLoader(range(BATCHES)))


if __name__ == "__main__":
    unittest.main()

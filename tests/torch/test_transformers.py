"""scruple.torch under Hugging Face's Trainer and accelerate, against the real packages: gradients stored,
released and compressed, accumulation, clipping, the norm in the log, and resuming to the bit."""

import copy
import pathlib
import sys
import tempfile
import unittest
from unittest import mock

try:
    import accelerate
    import transformers
except ImportError:
    print("transformers or accelerate is not installed")
    sys.exit(77)

import torch

from scruple.torch import transformers as ours
from support import BF16, DEVICE, FP32, WIDE, Case, each, loss_of, mlp, picture, st, stored, tensor

ROWS = 22  # 11 batches of 2: with accumulation over 3, the last step of an epoch has 2


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return ROWS

    def __getitem__(self, i):
        return {"x": tensor(12, seed=i).cpu(), "labels": tensor(5, seed=99 + i).cpu()}


class Model(torch.nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.net = mlp(dtype).cpu()

    def forward(self, x, labels):
        out = self.net(x.to(next(self.parameters()).dtype))
        return {"loss": torch.nn.functional.mse_loss(out.float(), labels), "out": out}


def make_trainer(folder, model, optimizers=(None, None), more={}, **options):
    """A quiet Trainer; options are those of TrainingArguments, as far as this version has them."""
    quiet = dict(output_dir=str(folder), use_cpu=DEVICE.type == "cpu", report_to="none", disable_tqdm=True)
    known = transformers.TrainingArguments.__dataclass_fields__
    arguments = {k: v for k, v in {**quiet, "logging_steps": 1, **options}.items() if k in known}
    trainer = transformers.Trainer(
        model,
        transformers.TrainingArguments(**arguments),
        train_dataset=Rows(),
        optimizers=optimizers,
        **more,
    )
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


def train(folder, policy=None, dtype=BF16, resume=None, kind=st.AdamW, optimizer={}, release={}, **options):
    """(trainer, log, picture) of 3 epochs."""
    model = Model(dtype)
    opt = kind(model.parameters(), lr=1e-2, **optimizer)
    # lr falls, so that a step at another time is seen.
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 1 / (1 + step))
    loop = dict(
        num_train_epochs=3, per_device_train_batch_size=2, gradient_accumulation_steps=3, max_grad_norm=0.2
    )
    loop.update(save_steps=5, save_safetensors=True, seed=0)
    trainer = make_trainer(folder, model, (opt, schedule), **{**loop, **options})
    if policy is not None:
        ours.release_gradients(trainer, policy, **release)
    trainer.train(resume_from_checkpoint=resume)
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    return trainer, log, picture(opt, model)


class Trainer(Case):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)

    def path(self, name):
        return pathlib.Path(self.folder.name) / name

    @each(limit=(0.2, 0))
    def test_compressed_is_stored(self, limit):
        """Clipped steps over micro-batches that the Trainer has divided, a shorter last one, the norm in the
        log: with fp32 accumulators all is as with stored gradients."""
        how = dict(kind=st.SGD, dtype=FP32, optimizer=WIDE, max_grad_norm=limit)
        _, stored_log, stored = train(self.path("a"), **how)
        trainer, log, found = train(self.path("b"), "compressed", release=dict(accumulator="fp32"), **how)
        self.assertEqual(len(log), 12)
        self.assertNear(stored["weights"], found["weights"], 2e-5)
        for a, b in zip(stored_log, log):
            self.assertGreater(b["grad_norm"], 0)
            self.assertAlmostEqual(a["grad_norm"] / b["grad_norm"], 1, places=4)
            self.assertAlmostEqual(a["loss"] / b["loss"], 1, places=4)
            self.assertEqual(a["learning_rate"], b["learning_rate"])
        # train() has ended: nothing is left of it.
        self.assertIsNone(trainer.optimizer.optimizer._handle)
        self.assertNotIn("clip_grad_norm_", vars(trainer.accelerator))
        self.assertTrue(all(p.grad is None for p in trainer.model.parameters()))

    def test_released_is_stored(self):
        """To the bit, and the norm in the log is the same."""
        how = dict(gradient_accumulation_steps=1, max_grad_norm=0)
        _, stored_log, stored = train(self.path("a"), **how)
        _, log, found = train(self.path("b"), "released", **how)
        self.assertSame(stored, found)
        for a, b in zip(stored_log, log):
            self.assertAlmostEqual(
                a["grad_norm"] / b["grad_norm"], 1, delta=2.0**-7
            )  # torch's is rounded to bf16

    def test_released_over_micro_batches(self):
        how = dict(kind=st.SGD, dtype=FP32, max_grad_norm=0, optimizer=dict(momentum=0.9, **WIDE))
        _, _, stored = train(self.path("a"), **how)
        _, log, found = train(self.path("b"), "released", release=dict(accumulation="momentum"), **how)
        self.assertNear(stored["weights"], found["weights"], 2e-5)
        self.assertNotIn("grad_norm", log[0])  # nobody knows it, and 0 would be wrong

    @each(
        case=[
            (None, {}),
            ("compressed", {}),
            ("released", dict(gradient_accumulation_steps=1, max_grad_norm=0)),
        ]
    )
    def test_resume(self, case):
        """From a checkpoint in the midst of an epoch, in a new Trainer: the bits of one go."""
        policy, options = case
        folder = self.path(str(policy))
        _, log, whole = train(folder, policy, **options)
        _, late, found = train(folder, policy, resume=str(folder / "checkpoint-5"), **options)
        self.assertSame(whole, found)
        self.assertEqual(log[5:], late[5:])

    def test_train_again(self):
        trainer, _, _ = train(self.path("a"), "compressed")
        trainer.args.num_train_epochs = 1
        trainer.train()
        self.assertIsNone(trainer.optimizer.optimizer._handle)
        self.assertGreater(trainer.state.log_history[-2]["grad_norm"], 0)

    def test_made_by_the_trainer(self):
        """optimizer_cls_and_kwargs: the Trainer makes the groups, the optimizer and the schedule."""
        of_ours = dict(optimizer_cls_and_kwargs=(st.AdamW, dict(lr=1e-2, recipe="scant")))
        trainer = make_trainer(self.path("a"), Model(BF16), more=of_ours, max_steps=4, save_strategy="no")
        ours.release_gradients(trainer)
        trainer.train()
        self.assertEqual({int(s["step"]) for s in trainer.optimizer.state_dict()["state"].values()}, {4})

    @each(
        case={
            "clipping": (dict(max_grad_norm=1.0), ("max_grad_norm", "compressed", "adagc")),
            "accumulation": (dict(max_grad_norm=0), ("3 micro-batches", "compressed")),
        }
    )
    def test_refused(self, case):
        """Before a weight has moved."""
        options, words = case
        model = Model(BF16)
        before = copy.deepcopy(model.state_dict())
        with mock.patch.dict(globals(), Model=lambda dtype: model), self.refused(*words):
            train(self.path("a"), "released", **options)
        self.assertSame(before, model.state_dict())


class Accelerate(Case):
    """prepare(), accumulate() and backward() of accelerate, which divides the loss and skips opt.step()."""

    def setUp(self):
        accelerate.state.AcceleratorState._reset_state(True)
        accelerate.state.GradientState._reset_state()

    def run_loop(self, release=None, scaler=None, batches=8, steps=3, max_norm=0.2, kind=st.AdamW, **options):
        accelerator = accelerate.Accelerator(gradient_accumulation_steps=steps, cpu=DEVICE.type == "cpu")
        accelerator.scaler = scaler
        model = mlp()
        opt = kind(model.parameters(), lr=1e-2, recipe="fp32", **options)
        loader = torch.utils.data.DataLoader(range(batches))
        model, opt, loader = accelerator.prepare(model, opt, loader)
        self.assertIsInstance(opt, accelerate.optimizer.AcceleratedOptimizer)
        handle = st.release_gradients(model, opt, **release) if release else None
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, int(batch)))
                if accelerator.sync_gradients and not release and max_norm:
                    accelerator.clip_grad_norm_(model.parameters(), max_norm)
                opt.step()
                opt.zero_grad()
        return picture(opt, model), handle

    @each(max_norm=(0.2, None))
    def test_compressed_is_stored(self, max_norm):
        """8 batches, 3 to a step, the last of 2; accumulation is accelerate's without a word."""
        self.setUp()
        stored, _ = self.run_loop(max_norm=max_norm, kind=st.SGD)
        self.setUp()
        release = dict(policy="compressed", accumulator="fp32", max_norm=max_norm)
        found, handle = self.run_loop(release, kind=st.SGD)
        self.assertNear(stored["weights"], found["weights"], 2e-5)
        self.assertEqual(handle.report()["steps"], 3)

    def test_released_is_stored(self):
        stored, _ = self.run_loop(steps=1, max_norm=None)
        found, _ = self.run_loop(dict(policy="released"), steps=1)
        self.assertSame(stored, found)

    def test_its_scaler(self):
        """accelerate's scaler is found and used."""
        stored, _ = self.run_loop()
        scaler = torch.amp.GradScaler(DEVICE.type, init_scale=2.0**8)
        found, handle = self.run_loop(dict(policy="compressed", accumulator="fp32", max_norm=0.2), scaler)
        self.assertNear(stored["weights"], found["weights"], 2e-5)

    def test_refused(self):
        opt = st.AdamW((model := mlp()).parameters())
        st.release_gradients(model, opt)
        with self.refused("remove()", "after prepare()", "scruple.torch.transformers"):
            accelerate.Accelerator(cpu=DEVICE.type == "cpu").prepare(model, opt)
        self.setUp()
        with self.refused("accumulate is 2", "gradient_accumulation_steps=3", "leave accumulate out"):
            self.run_loop(dict(policy="compressed", accumulate=2))
        self.setUp()
        with self.refused("3 micro-batches", "compressed"):
            self.run_loop(dict(policy="released"))

    def test_save_and_load_state(self):
        """accelerator.save_state and load_state: the bits of one go, with the handle made after loading."""
        accelerator = accelerate.Accelerator(cpu=DEVICE.type == "cpu")
        model, opt = accelerator.prepare(model := mlp(BF16), st.AdamW(model.parameters(), lr=1e-2))
        release = dict(policy="compressed", max_norm=0.2)
        handle = st.release_gradients(model, opt, **release)
        with tempfile.TemporaryDirectory() as folder:
            for step in range(6):
                if step == 3:
                    accelerator.save_state(folder)
                accelerator.backward(loss_of(model, step))
                opt.step()
            whole = picture(opt, model)
            handle.remove()
            accelerator.load_state(folder)
        st.release_gradients(model, opt, **release)
        for step in range(3, 6):
            accelerator.backward(loss_of(model, step))
            opt.step()
        self.assertSame(whole, picture(opt, model))


if __name__ == "__main__":
    unittest.main()

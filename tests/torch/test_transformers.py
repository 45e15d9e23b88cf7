"""scruple.torch under Hugging Face's Trainer and accelerate, against the real packages: gradients stored,
released and compressed, accumulation, clipping, the norm in the log, and resuming to the bit."""

import pathlib
import sys
import tempfile
import unittest

try:
    import accelerate
    import transformers
except ImportError:
    print("transformers or accelerate is not installed")
    sys.exit(77)

import torch

from scruple.torch import transformers as ours
from support import DEVICE, Case, loss_of, mlp, picture, st, tensor

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


def train(
    folder, policy=None, dtype=torch.bfloat16, resume=None, kind=st.AdamW, optimizer={}, release={}, **options
):
    """(trainer, log, picture) of 3 epochs; options are those of TrainingArguments."""
    model = Model(dtype)
    opt = kind(model.parameters(), lr=1e-2, **optimizer)
    # lr falls, so that a step at another time is seen.
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 1 / (1 + step))
    arguments = dict(
        output_dir=str(folder),
        num_train_epochs=3,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=3,
        max_grad_norm=0.2,
        logging_steps=1,
        save_steps=5,
        report_to="none",
        disable_tqdm=True,
        use_cpu=DEVICE.type == "cpu",
        save_safetensors=True,
        seed=0,
    )
    known = transformers.TrainingArguments.__dataclass_fields__
    arguments = {k: v for k, v in {**arguments, **options}.items() if k in known}
    trainer = transformers.Trainer(
        model, transformers.TrainingArguments(**arguments), train_dataset=Rows(), optimizers=(opt, schedule)
    )
    trainer.remove_callback(transformers.PrinterCallback)
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

    def assert_close(self, a, b, bound=2e-5):
        for p, q in zip(a["weights"], b["weights"]):
            self.assertLess(float((p.float() - q.float()).abs().max()), bound)

    def test_compressed_is_stored(self):
        """Clipped steps over micro-batches that the Trainer has divided, a shorter last one, the norm in the
        log: with fp32 accumulators all is as with stored gradients."""
        for limit in (0.2, 0):
            with self.subTest(max_grad_norm=limit):
                how = dict(
                    kind=st.SGD, dtype=torch.float32, optimizer=dict(recipe="fp32"), max_grad_norm=limit
                )
                _, stored_log, stored = train(self.path(f"a{limit}"), **how)
                trainer, log, found = train(
                    self.path(f"b{limit}"), "compressed", release=dict(accumulator="fp32"), **how
                )
                self.assertEqual(len(log), 12)
                self.assert_close(stored, found)
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
            self.assertAlmostEqual(a["grad_norm"] / b["grad_norm"], 1, delta=2.0**-7)  # torch's is rounded to bf16

    def test_released_over_micro_batches(self):
        how = dict(
            kind=st.SGD, dtype=torch.float32, max_grad_norm=0, optimizer=dict(momentum=0.9, recipe="fp32")
        )
        _, _, stored = train(self.path("a"), **how)
        _, log, found = train(self.path("b"), "released", release=dict(accumulation="momentum"), **how)
        self.assert_close(stored, found)
        self.assertNotIn("grad_norm", log[0])  # nobody knows it, and 0 would be wrong

    def test_resume(self):
        """From a checkpoint in the midst of an epoch, in a new Trainer: the bits of one go."""
        for policy, options in (
            (None, {}),
            ("compressed", {}),
            ("released", dict(gradient_accumulation_steps=1, max_grad_norm=0)),
        ):
            with self.subTest(policy):
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
        model = Model(torch.bfloat16)
        trainer = transformers.Trainer(
            model,
            transformers.TrainingArguments(
                output_dir=str(self.path("a")),
                max_steps=4,
                use_cpu=DEVICE.type == "cpu",
                report_to="none",
                disable_tqdm=True,
                save_strategy="no",
                logging_steps=1,
            ),
            train_dataset=Rows(),
            optimizer_cls_and_kwargs=(st.AdamW, dict(lr=1e-2, recipe="scant")),
        )
        trainer.remove_callback(transformers.PrinterCallback)
        ours.release_gradients(trainer)
        trainer.train()
        self.assertEqual({int(s["step"]) for s in trainer.optimizer.state_dict()["state"].values()}, {4})

    def test_refused(self):
        """Before a weight has moved."""
        before = picture(st.AdamW((model := Model(torch.bfloat16)).parameters()), model)["model"]
        for label, policy, options, words in (
            ("clipping", "released", dict(max_grad_norm=1.0), ("max_grad_norm", "compressed", "adagc")),
            ("accumulation", "released", dict(max_grad_norm=0), ("3 micro-batches", "compressed")),
        ):
            with self.subTest(label):
                trainer = None
                with self.refused(*words):
                    trainer, *_ = train(self.path(label), policy, **options)
                self.assertIsNone(trainer)
        self.assertSame(before, Model(torch.bfloat16).state_dict())


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

    def assert_close(self, a, b):
        for p, q in zip(a["weights"], b["weights"]):
            self.assertLess(float((p - q).abs().max()), 2e-5)

    def test_compressed_is_stored(self):
        """8 batches, 3 to a step, the last of 2; accumulation is accelerate's without a word."""
        for max_norm in (0.2, None):
            with self.subTest(max_norm=max_norm):
                stored, _ = self.run_loop(max_norm=max_norm, kind=st.SGD)
                self.setUp()
                release = dict(policy="compressed", accumulator="fp32", max_norm=max_norm)
                found, handle = self.run_loop(release, kind=st.SGD)
                self.assert_close(stored, found)
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
        self.assert_close(stored, found)

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
        model, opt = accelerator.prepare(model := mlp(torch.bfloat16), st.AdamW(model.parameters(), lr=1e-2))
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

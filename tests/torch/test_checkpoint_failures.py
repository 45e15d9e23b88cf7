"""Checkpoints that are damaged, of something else, or not written to the end: found before anything changes."""

import itertools
import json
import os
import resource
import shutil
import struct
import unittest
from unittest import mock

import torch

import scruple
from scruple.torch import checkpoint
from support import BF16, DEVICE, FP16, ModelRun, Run, each, mlp, st, take_steps
from test_checkpoint import Folder, Statistics, read, write


class Refused(Folder):
    def setUp(self):
        super().setUp()
        self.saved()
        self.into = ModelRun(seed=5).steps(1)

    def refuses(self, *words, kind=scruple.Error, name="a"):
        with self.refused_unchanged(self.into, *words, kind=kind):
            self.load(self.into, name)

    def test_bytes_that_are_no_text(self):
        """What the message quotes of them can be read."""
        for file in ("a/model.safetensors", "a/manifest.json"):
            raw = read(self.path(file))
            for at in range(10, 400, 13):
                write(self.path(file), raw[:at] + b"\x97" + raw[at + 1 :])
                self.refuses(os.path.basename(file))
            write(self.path(file), raw)
        self.load(self.into)

    def test_a_flipped_bit(self):
        raw = read(self.path("a/model.safetensors"))
        start = 8 + struct.unpack("<Q", raw[:8])[0]

        def flipped(name, places, *words):
            for at in places:
                self.flip(f"a/{name}", at)
                self.refuses(*words)
                self.flip(f"a/{name}", at)

        for name, entry in json.loads(raw[8:start]).items():
            if name != "__metadata__":
                begin, end = (start + offset for offset in entry["data_offsets"])
                flipped("model.safetensors", (begin, end - 1), f'"{name}"', "checksum", "damaged")
        flipped("model.safetensors", (0, 7, 8, 9, 100, start // 2, start - 1), "model.safetensors")
        flipped("manifest.json", range(0, len(read(self.path("a/manifest.json"))), 211), "manifest.json")
        self.load(self.into)

    @each(name=("model.safetensors", "manifest.json"))
    def test_files_that_are_not_right(self, name):
        path = self.path("a", name)
        kept = read(path)
        os.remove(path)
        self.refuses(name, kind=scruple.Error if name == "model.safetensors" else scruple.UsageError)
        for data in (kept + b" ", b""):
            write(path, data)
            self.refuses(name)
        write(path, kept)

    def test_a_newer_version(self):
        self.rewrite(lambda m: m.update(scruple_checkpoint=2, news=3))
        self.refuses("version 2", "0.1.0", "up to 1", kind=scruple.UsageError)

    def test_rules_of_the_specification(self):
        """Manifests with a right checksum and a wrong content."""

        def plane(m):
            return m["tensors"][0]["arrays"][1]["planes"][1]

        changes = {
            "a field more": lambda m: m.update(more=1),
            "a field less": lambda m: m.pop("recipe"),
            "no file": lambda m: m.update(files=[]),
            "a way out of the folder": lambda m: m["files"][0].update(name="../a/model.safetensors"),
            "a name twice": lambda m: m["tensors"][1].update(name=m["tensors"][0]["name"]),
            "a tensor twice": lambda m: m["tensors"].append(m["tensors"][0]),
            "a plane's name": lambda m: m["tensors"][1].update(name="0.weight/exp_avg"),
            "a group": lambda m: m["tensors"][0].update(group=2),
            "an id": lambda m: m["tensors"][0].update(id=1 << 32),
            "a step": lambda m: m["tensors"][0].update(step=0),
            "a true step": lambda m: m["tensors"][0].update(step=True),
            "a norm": lambda m: m["tensors"][0].update(adagc_norm="1"),
            "an infinite norm": lambda m: m["tensors"][0].update(adagc_norm=float("inf")),
            "a note": lambda m: m["trainer"].update(note=1),
            "no weight": lambda m: m["tensors"][0]["arrays"].pop(0),
            "a kind": lambda m: plane(m).update(kind="codes"),
            "a dtype": lambda m: plane(m).update(dtype="F99"),
            "another dtype": lambda m: plane(m).update(dtype="U32"),
            "another shape": lambda m: plane(m).update(shape=[4]),
            "a shape that is negative": lambda m: plane(m).update(shape=[-5, -1]),
            "a block": lambda m: plane(m).update(block_bytes=4),
            "a hole": lambda m: plane(m)["pieces"][0].__setitem__(1, 128),
            "an end": lambda m: plane(m)["pieces"][0].__setitem__(2, 128),
            "an end within a block": lambda m: plane(m)["pieces"][0].__setitem__(2, 5),
            "a file": lambda m: plane(m)["pieces"][0].__setitem__(0, 1),
            "two pieces in one file": lambda m: plane(m).update(
                pieces=[[0, 0, 128, "0" * 8], [0, 128, 288, "0" * 8]]
            ),
            "a checksum": lambda m: plane(m)["pieces"][0].__setitem__(3, "0"),
            "a tensor less": lambda m: m["tensors"].pop(),
            "a hyperparameter": lambda m: m["groups"][0]["hyperparameters"].update(lr=None),
            "a seed": lambda m: m["groups"][0].update(seed=-1),
            "groups that cannot be read": lambda m: m["trainer"].update(param_groups="["),
            "a learning rate": lambda m: m["trainer"].update(param_groups='[{"lr": "high"}]'),
            "no learning rate": lambda m: m["trainer"].update(param_groups='[{"lr": -1.0}]'),
            "groups of something else": lambda m: m["trainer"].update(param_groups='[{"lr": {"what": 1}}]'),
        }
        kept = read(self.path("a/manifest.json"))
        self.rewrite(lambda m: None)
        self.load(self.into)
        for label, change in changes.items():
            with self.subTest(label):
                write(self.path("a/manifest.json"), kept)
                self.rewrite(change)
                self.refuses(self.path("a"))

    @each(form={"bf16+8": scruple.Error, "companded8": scruple.UsageError, "x": scruple.UsageError}.items())
    def test_formats_that_do_not_fit_their_planes(self, form):
        """What the library would read by, it must not believe."""
        run = Statistics.run()
        self.save(run)

        def change(manifest):
            self.assertEqual(manifest["tensors"][-1]["name"], "norm.running_var")
            manifest["tensors"][-1]["arrays"][0].update(format=form[0])

        self.rewrite(change)
        with self.refused_unchanged(run, "norm.running_var", kind=form[1]):
            self.load(run)

    OTHERS = {
        "width": (dict(width=25), {}, ("0.weight", "(25, 12)", "(24, 12)")),
        "dtype": (dict(dtype=FP16), {}, ("fp16+8", "bf16+8", "cast")),
        "recipe": ({}, dict(recipe="flash"), ("flash8", "'scruple'", "--recipe flash", "convert")),
        "weights": ({}, dict(weights="bf16+4"), ("bf16+4", "bf16+8")),
        "stochastic": ({}, dict(rounding="stochastic"), ("(stochastic)", "(wide)")),
        "truncate": ({}, dict(rounding={"weights": "truncate"}), ("(truncate)", "(wide)")),
        "rule": ({}, dict(kind=st.SGD), ("adamw", "sgd")),
    }

    @each(case=OTHERS)
    def test_other_models_and_optimizers(self, case):
        of_model, options, words = case
        run = ModelRun(model=mlp(**{"dtype": BF16, **of_model}), **options)
        with self.refused_unchanged(run, *words):
            self.load(run)

    def test_other_parameters(self):
        model = mlp(BF16)
        ps, opt = list(model.parameters()), st.AdamW(model.parameters())
        for run, words in (
            (Run(model=torch.nn.Sequential(mlp(BF16))), ("lacks 0.0.weight", "has 0.weight", "model.module")),
            (Run(model=model, params=ps[:-1]), ("5.bias", "same parameters")),
        ):
            with self.refused_unchanged(run, *words):
                self.load(run)
        for call, name in ((scruple.load, "a"), (scruple.save, "b")):
            with self.refused("not in the model"):
                call(opt, mlp(BF16), self.path(name))
        with self.refused("those of scruple.torch"):
            scruple.save(torch.optim.AdamW(ps), model, self.path("b"))
        with self.refused("dict of strings"):
            scruple.save(opt, model, self.path("b"), notes={"epoch": 3})
        self.assertEqual(os.listdir(self.folder), ["a"])

    @each(rounding=(None, "stochastic", {"weights": "wide", "moments": "nearest"}))
    def test_another_order(self, rounding):
        model = mlp(BF16)
        self.saved(rounding=rounding)
        turned = Run(model=model, params=list(model.parameters())[::-1], rounding=rounding)
        with self.refused_unchanged(turned, "same order"):
            self.load(turned)
        self.saved(rounding="nearest")
        turned = Run(model=model, params=list(model.parameters())[::-1])
        self.load(turned)  # without random numbers the order means nothing

    def test_what_a_checkpoint_cannot_hold(self):
        class Own(torch.nn.Linear):
            def get_extra_state(self):
                return {"a": 1}

        noisy = mlp()
        noise = torch.randint(1 << 62, (1 << 20,), generator=torch.Generator().manual_seed(0))
        noisy.register_buffer("noise", noise.to(DEVICE))
        for model, words in (
            (Own(3, 3).to(DEVICE), ("get_extra_state",)),
            (noisy, ("persistent=False", "noise")),
        ):
            with self.refused(*words):
                self.save(Run(model=model), "b")
        self.assertEqual(os.listdir(self.folder), ["a"])

    def test_nowhere(self):
        self.refuses("nosuch", "manifest.json", kind=scruple.UsageError, name="nosuch")

    def test_shards_of_a_tensor(self):
        from torch.distributed.tensor import Shard, distribute_tensor

        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        self.addCleanup(torch.distributed.destroy_process_group)
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        model = torch.nn.Linear(4, 4, bias=False)
        model.weight = torch.nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Shard(0)]))
        for call in (self.save, self.load):
            with self.refused("weight", "DTensor", "torch.distributed.checkpoint"):
                call(Run(model=model))


class Writing(Folder):
    def contents(self, name="a"):
        return {file: read(self.path(name, file)) for file in os.listdir(self.path(name))}

    def test_one_replaces_another(self):
        """That it does so in one step, whatever fails, is tests/save_failures_test.cpp's matter."""
        run = self.saved()
        before = self.contents()
        self.save(run.steps(1))
        self.assertNotEqual(self.contents(), before)
        self.assertEqual(os.listdir(self.folder), ["a"])
        self.load(run)

    def test_a_save_that_fails(self):
        """Wherever in the files the disk takes no more: the old one stays, and nothing is left beside it."""
        run = self.saved()
        before, state = self.contents(), run.picture()
        self.save(run.steps(1), "whole")
        size = len(read(self.path("whole/model.safetensors")))
        self.assertLess(len(read(self.path("whole/manifest.json"))), size)
        shutil.rmtree(self.path("whole"))
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        for limit in (0, 1, 100, *range(500, size, 500), size - 1):
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limits[1]))
            try:
                with self.refused("was not saved", "File too large", "ulimit", kind=scruple.Error):
                    self.save(run)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            self.assertEqual(self.contents(), before, limit)
            self.assertEqual(os.listdir(self.folder), ["a"], limit)
        with self.refused("was not saved", "Not a directory", kind=scruple.Error):
            self.save(run, "a/manifest.json/b")
        self.assertEqual(self.contents(), before)
        self.load(run)
        self.assertSame(run.picture(), state)

    @each(kind=(RuntimeError, KeyboardInterrupt))
    def test_a_plane_that_cannot_be_copied(self, kind):
        run = self.saved()
        before, state, real = self.contents(), run.picture(), checkpoint._write
        calls = itertools.count()

        def fails(*arguments):
            if next(calls) >= 3:
                raise kind("out of memory")
            real(*arguments)

        with mock.patch.object(checkpoint, "_write", fails), self.assertRaises(kind):
            self.save(run)
        self.assertEqual(self.contents(), before)
        self.assertEqual(os.listdir(self.folder), ["a"])
        self.assertSame(run.picture(), state)

    def test_a_killed_save(self):
        model = mlp(BF16).cpu()  # CUDA does not survive a fork
        opt = st.AdamW(model.parameters())
        take_steps(opt, list(model.parameters()), 2)
        scruple.save(opt, model, self.path("a"))
        before = self.contents()
        for name, place, word in (
            ("a", checkpoint, "_write"),
            ("b", checkpoint.library, "checkpoint_commit"),
        ):  # at the first plane, and after the last
            if os.fork() == 0:
                try:
                    with mock.patch.object(place, word, lambda *_: os._exit(9)):
                        scruple.save(opt, model, self.path(name))
                finally:
                    os._exit(1)
            self.assertEqual(os.waitstatus_to_exitcode(os.wait()[1]), 9)
        self.assertEqual(self.contents(), before)
        left = sorted(name for name in os.listdir(self.folder) if "partial" in name)
        self.assertEqual(len(left), 2, left)
        scruple.load(opt, model, self.path("a"))
        for name in ("b", left[1]):
            with self.refused("did not end"):
                scruple.load(opt, model, self.path(name))
        os.makedirs(self.path("run/checkpoints"))
        os.rename(self.path(left[1]), self.path("run/checkpoints/step-00000009.partial-1-1"))
        scruple.save(opt, model, self.path("run/checkpoints/step-00000008"))
        scruple.save(opt, model, self.path("run/checkpoints/step-00000002"), notes={"old": ""})
        self.assertEqual(scruple.load(opt, model, self.path("run")), {})

    def test_what_is_no_checkpoint_is_not_replaced(self):
        run = self.saved("folder")
        write(self.path("folder/thesis.txt"), b"x")
        for name, words in (
            ("folder", "thesis.txt"),
            ("a.partial-b", ".partial-"),
            ("folder/thesis.txt", "not a folder"),
        ):
            with self.subTest(name), self.refused(words):
                self.save(run, name)
        os.mkdir(self.path("empty"))
        self.save(run, "empty")
        os.symlink(self.path("empty"), self.path("link"))
        self.save(run, "link/")
        self.assertTrue(os.path.islink(self.path("link")))
        self.save(run, "new/and/deeper")
        self.load(run, "link")

    def test_a_file_that_changes_while_it_is_loaded(self):
        """Between the checksums and the reading it is cut: an error, and the process lives."""
        run, path = self.saved(), self.path("a/model.safetensors")
        kept = read(path)
        with mock.patch.object(checkpoint, "make_state", lambda *_: os.truncate(path, len(kept) // 2)):
            with self.refused("shortened", "load again", kind=scruple.Error):
                self.load(run)
        write(path, kept)
        self.load(run)

    def test_texts(self):
        """Notes hold any text; what no file can hold is refused before anything is written."""
        run = self.saved()
        notes = {"zeros": "a\0b\0", "empty": "", "": "no name", "\u20ac": "\U0001f600\n" * 1000}
        self.save(run, notes=notes)
        self.assertEqual(self.load(run), notes)
        before = self.contents()
        for bad, words in (
            ({"x": "\ud800"}, "not valid Unicode"),
            ({"\ud800": "x"}, "not valid Unicode"),
            ({"a\0b": "x"}, "zero"),
            ({str(i): "" for i in range(1024)}, "1024"),
        ):
            with self.subTest(words), self.refused(words):
                self.save(run, notes=bad)
        for call in (self.save, self.load):
            with self.refused("zero"):
                call(run, "a\0b")
        self.assertEqual(self.contents(), before)
        self.assertEqual(os.listdir(self.folder), ["a"])


if __name__ == "__main__":
    unittest.main()

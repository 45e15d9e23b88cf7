"""evidence/: classified and generated images in their small forms."""

import sys
import tempfile
import unittest
import xml.etree.ElementTree

import torch
from test_evidence import EVIDENCE, lines_of, run
from torch.nn import functional

sys.path.insert(0, str(EVIDENCE))
import gan  # noqa: E402
import images  # noqa: E402

CPU = torch.device("cpu")


class Images(unittest.TestCase):
    def test_sgd(self):
        found = lines_of(self, "images", "^(torch fp32|scruple|lpmm's momentum)$", "--only", "SGD")
        right = {row: line["metrics"]["test accuracy"] for row, line in found.items()}
        self.assertEqual(list(right), ["torch fp32", "scruple", "lpmm's momentum"])
        self.assertGreater(right["torch fp32"], 85)  # 25 by chance
        for row in right:
            self.assertLess(abs(right[row] - right["torch fp32"]), 6, row)

    def test_adamw(self):
        found = lines_of(self, "images", "^(torch fp32|scruple|scruple, released)$", "--only", "AdamW")
        right = {row: line["metrics"]["test accuracy"] for row, line in found.items()}
        self.assertGreater(right["torch fp32"], 85)
        self.assertLess(abs(right["scruple"] - right["torch fp32"]), 6)
        self.assertEqual(found["scruple"]["metrics"], found["scruple, released"]["metrics"])
        self.assertEqual(found["scruple, released"]["bytes"]["gradients"], 0)

    def test_batches(self):
        """An epoch has each image once, moved by a pixel at most, some flipped; a new generator begins anew."""
        task = images.tasks(None, True, CPU)[0]
        task.size = 300  # 1,200 images to train with
        task.pixels = torch.zeros_like(task.pixels)
        task.pixels[:, 1:-1, 1:-1] = 200
        task.pixels[:, 1:-1, 1:7] = 255  # the left half
        task.labels = torch.arange(1200)
        generator = torch.Generator().manual_seed(1)
        epoch = [task.batch(generator) for _ in range(4)]
        self.assertEqual(sorted(torch.cat([labels for _, labels in epoch]).tolist()), list(range(1200)))
        pixels = torch.cat([pixels for pixels, _ in epoch])
        self.assertTrue(400 < int((pixels[:, 0, 6, 2] < pixels[:, 0, 6, 9]).sum()) < 800)
        black = pixels.amax(1) < 0
        self.assertFalse(black[:, 1:-1, 1:-1].any())
        self.assertTrue(all(edge.all(1).any() for edge in (black[:, 0], black[:, -1], black[:, :, 0], black[:, :, -1])))
        task.batch(generator)  # of a second epoch
        again = task.batch(torch.Generator().manual_seed(1))
        self.assertTrue(all(torch.equal(a, b) for a, b in zip(again, epoch[0])))

    def test_resnet18(self):
        task = images.Task([(torch.zeros(512, 32, 32, 3).byte(), torch.zeros(512).long())] * 2, "SGD", {}, False, CPU)
        self.assertEqual(sum(p.numel() for p in task.model().parameters()), 11_173_962)
        self.assertEqual(task.steps, 30)
        self.assertLess(task.rate(29), 0.01)

    def test_missing_data(self):
        with tempfile.TemporaryDirectory() as folder:
            for task, name in (("images", "CIFAR-10"), ("gan", "MNIST")):
                for more in ((), ("--data", folder)):
                    done = run(EVIDENCE / "run.py", task, "--device", "cpu", *more)
                    self.assertNotEqual(done.returncode, 0)
                    wanted = "Pillow is not installed" if "Pillow" in done.stderr else f"--data wants {name}"
                    self.assertIn(wanted, done.stderr)
                    self.assertNotIn("Traceback", done.stderr)


class Generated(unittest.TestCase):
    def test_rows(self):
        found = lines_of(self, "gan", "^(torch fp32|scruple|scruple, released)$")
        far = {row: line["metrics"]["Frechet distance"] for row, line in found.items()}
        self.assertLess(far["torch fp32"], 1.3)  # 2.2 before the first step, 0.02 between halves of the test shapes
        self.assertLess(far["scruple"], 1.3)
        self.assertEqual(found["scruple"]["metrics"], found["scruple, released"]["metrics"])
        self.assertEqual(found["scruple, released"]["bytes"]["gradients"], 0)

    def test_one_backward(self):
        """Each network has the gradient of its own loss alone, and the generator runs once."""
        torch.manual_seed(0)
        task = gan.Task(None, True, CPU)
        model, (real, noise) = task.model(), task.batch(torch.Generator().manual_seed(1))
        task.loss(model, (real, noise)).backward()
        self.assertEqual(int(model.generator[1].num_batches_tracked), 1)
        judge, fakes = model.discriminator, model.fakes(noise)
        parts = functional.softplus(-judge(real)).mean() + functional.softplus(judge(fakes.detach())).mean()
        for network, loss in ((judge, parts), (model.generator, functional.softplus(-judge(fakes)).mean())):
            params = list(network.parameters())
            for p, exact in zip(params, torch.autograd.grad(loss, params)):
                torch.testing.assert_close(p.grad, exact)

    def test_picture(self):
        task = gan.Task(None, True, CPU)
        model = task.model()
        self.assertGreater(task.evaluate(model)["Frechet distance"], 2)
        sheet = gan.sheet(task.drawn(model, task.noise[:32]))
        self.assertEqual(xml.etree.ElementTree.fromstring(sheet).get("viewBox"), "0 0 128 64")

    def test_distance(self):
        rows = torch.randn(500, 8, generator=torch.Generator().manual_seed(1))
        self.assertAlmostEqual(gan.frechet(rows, rows), 0, 6)
        middle = rows.mean(0)
        self.assertAlmostEqual(gan.frechet(middle + 2 * (rows - middle), rows), 1, 4)  # (2 - 1)^2 of the variance
        self.assertAlmostEqual(gan.frechet(rows + 1, rows), 8 / float(rows.var(0).sum()), 4)


if __name__ == "__main__":
    unittest.main()

"""What `scruple train` writes is a GPT-2 to Hugging Face's transformers: it loads without a missing or a spare tensor,
and computes the logits that the trainer computes.

Usage: logits_test.py PATH_TO_SCRUPLE PATH_TO_LOGITS   (logits: a small program that prints them, tests/logits.cpp)
"""
import os
import subprocess
import sys
import tempfile

try:
    import numpy
    import torch
    from transformers import GPT2LMHeadModel
except ImportError as error:
    print(f"skipped: {error}")
    sys.exit(77)


def check(scruple, logits, recipe):
    with tempfile.TemporaryDirectory() as folder:
        data, out = os.path.join(folder, "text"), os.path.join(folder, "run")
        with open(data, "w", encoding="utf-8") as file:
            file.write("It was the best of times, it was the worst of times.\n" * 100)
        subprocess.run([scruple, "train", "--data", data, "--out", out, "--steps", "30", "--recipe", recipe, "--layers", "3",
                        "--width", "64", "--heads", "4", "--context", "48", "--batch", "4"], check=True,
                       capture_output=True)
        prompt = b"It was the best of tim"
        ours = numpy.array([float(x) for x in subprocess.run([logits, out, prompt], check=True,
                                                             capture_output=True).stdout.split()])
        model, info = GPT2LMHeadModel.from_pretrained(out, dtype=torch.float32, output_loading_info=True)
        for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
            assert not info[kind], (kind, info[kind])
        with torch.no_grad():
            theirs = model(torch.tensor([list(prompt)])).logits[0, -1].numpy()
        assert ours.shape == theirs.shape == (256,)
        difference = numpy.abs(ours - theirs).max()
        print(f"{recipe}: logits from {theirs.min():.2f} to {theirs.max():.2f}, largest difference {difference:.2e}")
        assert theirs.max() - theirs.min() > 2, "the model has learned nothing"
        assert difference < 1e-4, difference


for name in ("fp32", "scruple"):
    check(sys.argv[1], sys.argv[2], name)

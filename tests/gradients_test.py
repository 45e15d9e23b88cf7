"""Every family computes what Hugging Face's transformers computes: loss, logits after every prefix, the gradient of every
parameter and the losses of 20 steps of AdamW, of tiny random models that transformers writes and the trainer reads. Of
the sequences the second has targets that do not count, and so has the third, which is two documents.

SCRUPLE_TEST_DEVICE names the trainer's device (cpu where it is not set); torch computes on the CPU, and only the CPU
generates. One process computes all, since on a GPU each would take a second to begin.

Usage: gradients_test.py PATH_TO_GRADIENTS   (a small program, tests/gradients.cpp)
"""
import os
import subprocess
import sys
import tempfile

try:
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config
    from transformers.utils import logging
except ImportError as error:
    print(f"skipped: {error}")
    sys.exit(77)

DEVICE = os.environ.get("SCRUPLE_TEST_DEVICE", "cpu")
VOCABULARY, LONGEST, SEQUENCES = 37, 70, 3  # more than one block of 64 queries, more than one chunk of 128 tokens
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32, "rope_theta": 500.0}


def gpt2(**more):
    return GPT2Config(**{**dict(n_embd=24, n_layer=2, n_head=3, n_positions=LONGEST, vocab_size=VOCABULARY, resid_pdrop=0.0,
                                embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0), **more})


def decoder(kind, **more):
    sizes = dict(hidden_size=24, intermediate_size=34, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=3,
                 head_dim=10, max_position_embeddings=LONGEST, vocab_size=VOCABULARY, bos_token_id=0, eos_token_id=0,
                 pad_token_id=None)
    chosen = {**sizes, **more}
    if chosen["head_dim"] is None:
        del chosen["head_dim"]  # hidden_size / num_attention_heads
    return kind(**chosen)


CASES = {
    "gpt2": gpt2(),
    "gpt2, untied, MLP of another width, another epsilon": gpt2(tie_word_embeddings=False, n_inner=50, layer_norm_epsilon=1e-3),
    "gpt2, more words than logits in a piece": gpt2(vocab_size=2500),
    "llama": decoder(LlamaConfig),
    "llama, more words than logits in a piece": decoder(LlamaConfig, vocab_size=1100),
    "llama, tied, without head_dim, every head its own keys": decoder(LlamaConfig, tie_word_embeddings=True, head_dim=None,
                                                                      num_attention_heads=4, num_key_value_heads=4),
    "llama, one key-value head": decoder(LlamaConfig, num_key_value_heads=1),
    "llama, biases": decoder(LlamaConfig, attention_bias=True, mlp_bias=True, rms_norm_eps=1e-3),
    "llama, stretched as Llama 3": decoder(LlamaConfig, rope_parameters=LLAMA3, tie_word_embeddings=True),
    "mistral": decoder(MistralConfig, sliding_window=None),
    "mistral, a window as long as the context": decoder(MistralConfig, sliding_window=LONGEST, tie_word_embeddings=True),
    "qwen2": decoder(Qwen2Config, head_dim=None, num_attention_heads=6, num_key_value_heads=2),
    "qwen2, tied, a large base": decoder(Qwen2Config, tie_word_embeddings=True,
                                         rope_parameters={"rope_type": "default", "rope_theta": 1e6}),
    "qwen3": decoder(Qwen3Config),
    "qwen3, tied, biases": decoder(Qwen3Config, tie_word_embeddings=True, attention_bias=True),
}


def random_model(config):
    """Far from the initial values, so that every path matters: norms and biases too."""
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            normal = torch.randn(parameter.shape)
            parameter.copy_(normal * 0.2 if parameter.dim() == 2 else 0.3 * normal + (0 if name.endswith("bias") else 1))
    return model.eval()


def losses_of(model, text):
    """Of 20 steps on one sequence; matrices decay, norms and biases do not."""
    groups = [{"params": [p for p in model.parameters() if p.dim() == 2], "weight_decay": 0.1},
              {"params": [p for p in model.parameters() if p.dim() != 2], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=3e-3)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(text[None, :-1]).logits[0], text[1:])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return torch.tensor(losses)


def prepare(folder, config, context):
    """A model's folder with tokens, and what torch needs to compute the same."""
    torch.manual_seed(1)
    model = random_model(config)
    tokens, targets = (torch.randint(0, VOCABULARY, (SEQUENCES, context)) for _ in range(2))
    targets[1:] *= config.vocab_size // VOCABULARY
    targets[1:][torch.rand(SEQUENCES - 1, context) < 0.4] = -100
    cut, starts = 2 * context // 5, torch.zeros_like(tokens)
    starts[2, cut:] = cut
    model.save_pretrained(folder)
    save_file({"tokens": tokens.int(), "targets": targets.int(), "starts": starts.int()}, os.path.join(folder, "tokens"))
    return model, tokens, targets, cut


def check(name, ours, model, tokens, targets, cut):
    model.double()  # torch's own rounding is no part of the difference
    documents = tokens[2:].split([cut, tokens.shape[1] - cut], 1)
    logits = torch.cat([model(tokens[:2]).logits, torch.cat([model(part).logits for part in documents], 1)])
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)
    loss.backward()
    off = {}
    if DEVICE == "cpu":
        off["logits"] = (ours.pop("logits") - logits[0]).abs().max().item()
    off["loss"] = abs(ours.pop("loss").item() - loss.item())
    followed = ours.pop("losses")
    worst = 0.0
    for parameter, value in model.named_parameters():
        got = ours.pop(parameter)
        assert got.shape == value.grad.shape, parameter
        error = ((got - value.grad).norm() / max(value.grad.norm(), 1e-6)).item()  # a key's bias has no gradient
        assert error < 1e-4, (name, parameter, error)
        worst = max(worst, error)
    assert not ours, f"parameters that torch does not have: {list(ours)}"
    losses = losses_of(model, torch.cat([tokens[0], targets[0, -1:]]))
    strayed = (followed - losses).abs().max().item()
    print(f"{name}: logits up to {logits.abs().max():.1f}; off by", *(f"{what} {by:.1e}," for what, by in off.items()),
          f"gradients {worst:.1e} of their norms; losses from {losses[0]:.2f} to {losses[-1]:.2f} by {strayed:.1e}")
    assert max(off.values()) < 1e-5, off
    assert losses[-1] < losses[0] - 0.5, "torch has learned nothing"
    assert strayed < 1e-4, (followed, losses)


def main(program):
    logging.disable_progress_bar()
    torch.set_num_threads(1)  # of so little work, more would wait for each other
    with tempfile.TemporaryDirectory() as root:
        cases = {f"{case}, context {length}": (settings, length) for case, settings in CASES.items() for length in (LONGEST, 9)}
        prepared = {name: prepare(os.path.join(root, name), *case) for name, case in cases.items()}
        status = subprocess.run([program, DEVICE, *(os.path.join(root, name) for name in prepared)]).returncode
        if status == 77:
            print("skipped: this machine has no GPU that the trainer could run on")
            return 77
        assert status == 0, status
        for name, torchs in prepared.items():
            check(name, load_file(os.path.join(root, name, "computed")), *torchs)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))

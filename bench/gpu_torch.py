"""PyTorch's rows of gpu_trainer.py: models, optimizers, one timed training, attention alone."""

import pathlib
import statistics
import sys
import time

from gpu_cases import GIB, WARM

ROOT = pathlib.Path(__file__).resolve().parents[1]


def torch_llama(config, recompute, compiles):
    import torch
    from torch import nn
    from torch.nn import functional
    from torch.utils.checkpoint import checkpoint

    width, heads, kv_heads = (
        config["hidden_size"],
        config["num_attention_heads"],
        config["num_key_value_heads"],
    )
    each, bias = width // heads, config["model_type"] == "qwen2"

    def turned(x, cosine, sine):
        left, right = x.chunk(2, -1)
        return x * cosine + torch.cat((-right, left), -1) * sine

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm1, self.norm2 = (nn.RMSNorm(width, config["rms_norm_eps"]) for _ in range(2))
            self.qkv = nn.Linear(width, (heads + 2 * kv_heads) * each, bias=bias)
            self.out = nn.Linear(width, width, bias=False)
            self.up = nn.Linear(width, 2 * config["intermediate_size"], bias=False)
            self.down = nn.Linear(config["intermediate_size"], width, bias=False)

        def forward(self, x, cosine, sine):
            b, t, _ = x.shape
            qkv = self.qkv(self.norm1(x)).view(b, t, heads + 2 * kv_heads, each).transpose(1, 2)
            q, k, v = qkv.split((heads, kv_heads, kv_heads), 1)
            q, k = turned(q, cosine, sine).to(v.dtype), turned(k, cosine, sine).to(v.dtype)
            y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=heads != kv_heads)
            x = x + self.out(y.transpose(1, 2).reshape(b, t, width))
            gate, up = self.up(self.norm2(x)).chunk(2, -1)
            return x + self.down(functional.silu(gate) * up)

    class Llama(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens = nn.Embedding(config["vocab_size"], width)
            self.blocks = nn.ModuleList(Block() for _ in range(config["num_hidden_layers"]))
            self.norm = nn.RMSNorm(width, config["rms_norm_eps"])
            self.head = nn.Linear(width, config["vocab_size"], bias=False)
            if config["tie_word_embeddings"]:
                self.head.weight = self.tokens.weight
            for p in self.parameters():
                nn.init.normal_(p, std=0.02) if p.dim() == 2 else None
            self.called = [
                torch.compile(b, dynamic=False) if compiles and recompute else b for b in self.blocks
            ]
            self.ended = torch.compile(self.loss, dynamic=False) if compiles and recompute else self.loss

        def loss(self, x, targets):
            logits = self.head(self.norm(x))
            return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

        def forward(self, tokens, targets):
            places = torch.arange(tokens.shape[1], device=tokens.device, dtype=torch.float32)
            steps = torch.arange(0, each, 2, device=tokens.device, dtype=torch.float32) / each
            angles = torch.outer(places, config["rope_theta"] ** -steps).repeat(1, 2)
            x = self.tokens(tokens)
            cosine, sine = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
            for block in self.called:
                x = (
                    checkpoint(block, x, cosine, sine, use_reentrant=False)
                    if recompute
                    else block(x, cosine, sine)
                )
            return self.ended(x, targets)

    return Llama()


def torch_model(case, kind, device, compiles):
    """The module, and what is called in its place."""
    import torch

    torch.manual_seed(1)
    torch.set_float32_matmul_precision("high")
    config, recompute = case.config, case.recompute != "none"
    torch.set_default_dtype(torch.float32 if kind == "autocast" else torch.bfloat16)
    with torch.device(device):
        if config["model_type"] == "gpt2":
            sys.path.insert(0, str(ROOT / "evidence"))
            from language import Gpt

            padded = -(-config["vocab_size"] // 128) * 128
            net = Gpt(padded, case.context, config["n_layer"], config["n_embd"], config["n_head"])
        else:
            net = torch_llama(config, recompute, compiles)
    torch.set_default_dtype(torch.float32)
    net.train()
    return net, torch.compile(net, dynamic=False) if compiles and not recompute else net


def torch_optimizer(case, kind, net):
    """The optimizer, and whether the steps are taken inside the backward pass."""
    import torch

    if kind != "scruple":
        return torch.optim.AdamW(net.parameters(), lr=1e-4, weight_decay=0.1, fused=True), False
    sys.path.insert(0, str(ROOT / "python"))
    from scruple.torch import AdamW, release_gradients

    opt = AdamW(net.parameters(), lr=1e-4, weight_decay=0.1, recipe=case.recipe)
    if case.gradients == "stored":
        return opt, False
    options = {"max_norm": case.clip} if case.clip else {}
    if case.accumulate > 1:
        options["accumulate"] = case.accumulate
    release_gradients(net, opt, case.gradients, **options)
    return opt, True


def torch_one(case, kind, device, compiles):
    import torch

    net, called = torch_model(case, kind, device, compiles)
    opt, inside = torch_optimizer(case, kind, net)
    vocabulary = case.config["vocab_size"]

    def step():
        for _ in range(case.accumulate):
            tokens = torch.randint(vocabulary, (case.batch, case.context + 1), device=device)
            with torch.autocast(device, torch.bfloat16, enabled=kind == "autocast"):
                loss = called(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
            (loss if inside else loss / case.accumulate).backward()
        if inside:
            return loss
        if case.clip:
            torch.nn.utils.clip_grad_norm_(net.parameters(), case.clip)
        opt.step()
        opt.zero_grad()
        return loss

    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    begin = time.perf_counter()
    times, losses = [], []
    for i in range(case.steps):
        if i == WARM and device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        loss = step()
        wait()
        times.append(1e3 * (time.perf_counter() - start))
        losses.append(loss.item())
        if i == WARM:
            warm_s = start - begin
    most = torch.cuda.max_memory_allocated() / GIB if device == "cuda" else None
    return {
        "steps": case.steps,
        "ms": round(statistics.median(times[WARM:]), 3),
        "ms_mean": round(statistics.mean(times[WARM:]), 3),
        "ms_most": round(max(times[WARM:]), 3),
        "load_s": None,
        "first_step_s": round(warm_s, 2),
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "counted_gib": most and round(most, 3),
        "torch": torch.__version__,
    }


def torch_attention(shapes, device):
    """scaled_dot_product_attention, forward and backward, of torch's own choice of kernel."""
    import torch
    from torch.nn import functional

    def timed(work, times=20):
        for _ in range(3):
            work()
        found = []
        for _ in range(times):
            if device == "cuda":
                start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                torch.cuda.synchronize()
                start.record(), work(), stop.record()
                torch.cuda.synchronize()
                found.append(start.elapsed_time(stop))
            else:
                start = time.perf_counter()
                work()
                found.append(1e3 * (time.perf_counter() - start))
        return round(statistics.median(found), 4)

    rows = []
    for sequences, length, heads, kv_heads, width in shapes:
        torch.manual_seed(1)
        q, k, v = (
            torch.randn(sequences, length, count, width, device=device, dtype=torch.bfloat16)
            .transpose(1, 2)
            .requires_grad_()
            for count in (heads, kv_heads, kv_heads)
        )

        def forward():
            return functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=heads != kv_heads
            )

        y = forward()
        dy = torch.randn_like(y)
        forward_ms = timed(forward)
        rows.append(
            {
                "forward_ms": forward_ms,
                "backward_ms": timed(lambda: torch.autograd.grad(y, (q, k, v), dy, retain_graph=True)),
                "torch": torch.__version__,
            }
        )
    return rows

"""The cases of gpu_trainer.py: models, batches, random weights and tokens, and what they cost."""

import dataclasses
import json

WARM = 4  # steps that do not count: algorithms are chosen, graphs captured, kernels compiled
GIB = 2**30


def gpt2(layers, width, heads, vocabulary=50257, context=1024):
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "n_layer": layers,
        "n_embd": width,
        "n_head": heads,
        "n_positions": context,
        "vocab_size": vocabulary,
        "activation_function": "gelu_new",
        "torch_dtype": "bfloat16",
    }


def llama(
    layers, width, heads, kv_heads, inner, vocabulary, kind="llama", theta=1e4, context=2048, tied=False
):
    return {
        "model_type": kind,
        "architectures": [kind.capitalize() + "ForCausalLM"],
        "num_hidden_layers": layers,
        "hidden_size": width,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": inner,
        "vocab_size": vocabulary,
        "max_position_embeddings": context,
        "rms_norm_eps": 1e-5,
        "rope_theta": theta,
        "hidden_act": "silu",
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
    }


@dataclasses.dataclass
class Case:
    config: dict
    batch: int
    context: int = 1024
    steps: int = 30
    recipe: str = "scruple"
    optimizer: tuple = ()  # options; none: AdamW
    gradients: str = "stored"
    recompute: str = "none"
    accumulate: int = 1
    clip: float = 0
    offload: str = ""
    limit: str = ""  # --memory-limit
    beside: str = ""  # the case whose time per token it is measured by
    torch: tuple = ("autocast", "bf16", "scruple")
    llmq: bool = False  # whether LLMQ can train it so: stored gradients, or compressed ones beside its own
    bar: str = ""
    goal: str = ""

    def tokens(self):
        return self.batch * self.context * self.accumulate

    def options(self):
        chosen = {
            "--batch": self.batch,
            "--context": self.context,
            "--steps": self.steps,
            "--recipe": self.recipe,
            "--gradients": self.gradients,
            "--recompute": self.recompute,
            "--accumulate": self.accumulate,
            "--clip": self.clip,
            "--lr": 1e-4,
            "--schedule": "constant",
            "--validation": 1e-4,
            "--validate-every": 1000000,
        }
        if self.limit:
            chosen["--memory-limit"] = self.limit
        words = [str(word) for pair in chosen.items() for word in pair]
        return words + list(self.optimizer) + (["--offload", self.offload] if self.offload else [])


LLAMA_8B = llama(32, 4096, 32, 8, 14336, 128256, theta=500000.0, context=8192)
QWEN_7B = llama(28, 3584, 28, 4, 18944, 152064, kind="qwen2", theta=1e6, context=32768)
QWEN_14B = llama(48, 5120, 40, 8, 13824, 152064, kind="qwen2", theta=1000000.0, context=32768)
LLAMA_1B = llama(22, 2048, 32, 4, 5632, 32000)
CASES = {
    "gpt2-124m": Case(gpt2(12, 768, 12), 64, steps=40, bar="510000", goal="620000"),
    "gpt2-774m": Case(gpt2(36, 1280, 20), 16, steps=30, bar="90000", goal="105000"),
    "llama-1.1b": Case(LLAMA_1B, 8, steps=30, bar="0.9 of torch", goal="1.1 of torch"),
    "llama-1.1b-lpmm": Case(
        LLAMA_1B,
        8,
        steps=30,
        recipe="lpmm",
        gradients="compressed",
        optimizer=("--optimizer", "sgd", "--set", "momentum=0.9"),
        beside="llama-1.1b",
        torch=(),
        bar="runs",
        goal="1.25 of llama-1.1b's time per token",
    ),
    "qwen-1.5b": Case(
        llama(28, 1536, 12, 2, 8960, 151936, kind="qwen2", theta=1e6, context=32768, tied=True),
        8,
        steps=24,
        torch=("bf16",),
        llmq=True,
        bar="57000",
        goal="62000",
    ),
    "qwen-7b": Case(
        QWEN_7B,
        4,
        steps=9,
        gradients="compressed",
        accumulate=8,
        torch=(),
        llmq=True,
        bar="13600",
        goal="14500",
    ),
    "qwen-7b-4-layers": Case(
        {**QWEN_7B, "num_hidden_layers": 4},
        4,
        steps=12,
        gradients="compressed",
        accumulate=8,
        torch=(),
        llmq=True,
    ),
    "llama-8b": Case(
        LLAMA_8B,
        4,
        steps=16,
        gradients="released",
        recompute="block",
        torch=("bf16", "scruple"),
        bar="9000, 45 GiB",
        goal="12000, 42 GiB",
    ),
    "llama-8b-46gib": Case(
        LLAMA_8B,
        4,
        steps=9,
        recipe="scant",  # 43.2 GiB of state; `scruple` has 46.3 before the first activation
        gradients="compressed",
        recompute="block",
        accumulate=4,
        clip=1,
        offload="activations",  # 46.1 GiB without
        limit="46GiB",
        beside="llama-8b",
        torch=("scruple",),
        bar="runs",
        goal="1.05 of llama-8b's time per token",
    ),
    "llama-8b-host": Case(
        LLAMA_8B,
        4,
        steps=14,
        gradients="released",
        recompute="block",
        offload="state",
        limit="22GiB",
        beside="llama-8b",
        torch=(),
        bar="0.6 of llama-8b",
        goal="0.75 of it",
    ),
    "qwen-14b": Case(
        QWEN_14B,
        4,
        steps=10,
        recipe="scant",
        gradients="released",
        recompute="block",
        limit="78GiB",
        torch=(),
        bar="10 steps",
    ),
    "tiny": Case(
        llama(2, 64, 4, 2, 128, 512, context=128),
        2,
        context=64,
        steps=8,
        gradients="compressed",
        recompute="block",
        accumulate=2,
        clip=1,
        bar="runs",
        beside="tiny-gpt2",
    ),
    "tiny-gpt2": Case(gpt2(2, 64, 4, vocabulary=300, context=64), 2, context=64, steps=8),
    "tiny-qwen": Case(
        llama(2, 64, 4, 2, 128, 70000, kind="qwen2", context=128),
        2,
        context=64,
        steps=8,
        recipe="scant",
        gradients="released",
        recompute="block",
    ),
}
TRIES = ("tiny", "tiny-gpt2", "tiny-qwen")  # of the script itself; not part of the table

# sequences, length, heads, kv_heads, head_width
ATTENTION = ((64, 1024, 12, 12, 64), (16, 1024, 20, 20, 64), (4, 1024, 32, 8, 128), (8, 2048, 32, 8, 128))
TINY_ATTENTION = ((2, 64, 4, 2, 16),)
ATTENTION_BAR = ("0.6 of torch", "1.0 of torch")

# Dense bf16 TFLOP/s as NVIDIA states them; --peak-tflops for others.
PEAKS = {
    "H200": 989.5,
    "H100 PCIe": 756,
    "H100": 989.5,
    "A100": 312,
    "L40S": 362,
    "RTX 4090": 165.2,
    "A6000": 154.8,
}


# ---- The model, its weights and its arithmetic ----


def shapes_of(config):
    """Hugging Face's names and shapes, in the order of the file."""
    if config["model_type"] == "gpt2":
        width = config["n_embd"]
        shapes = {
            "transformer.wte.weight": (config["vocab_size"], width),
            "transformer.wpe.weight": (config["n_positions"], width),
        }
        products = (
            ("attn.c_attn", width, 3 * width),
            ("attn.c_proj", width, width),
            ("mlp.c_fc", width, 4 * width),
            ("mlp.c_proj", 4 * width, width),
        )
        for layer in (f"transformer.h.{i}." for i in range(config["n_layer"])):
            for norm in ("ln_1", "ln_2"):
                shapes[f"{layer}{norm}.weight"] = shapes[f"{layer}{norm}.bias"] = (width,)
            for name, inputs, outputs in products:
                shapes[f"{layer}{name}.weight"], shapes[f"{layer}{name}.bias"] = (inputs, outputs), (outputs,)
        shapes["transformer.ln_f.weight"] = shapes["transformer.ln_f.bias"] = (width,)
        return shapes
    width, inner = config["hidden_size"], config["intermediate_size"]
    keys = width // config["num_attention_heads"] * config["num_key_value_heads"]
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], width)}
    for layer in (f"model.layers.{i}." for i in range(config["num_hidden_layers"])):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{layer}{norm}.weight"] = (width,)
        for name, outputs in (("q", width), ("k", keys), ("v", keys)):
            shapes[f"{layer}self_attn.{name}_proj.weight"] = (outputs, width)
            if config["model_type"] == "qwen2":
                shapes[f"{layer}self_attn.{name}_proj.bias"] = (outputs,)
        shapes[f"{layer}self_attn.o_proj.weight"] = (width, width)
        for name in ("gate", "up"):
            shapes[f"{layer}mlp.{name}_proj.weight"] = (inner, width)
        shapes[f"{layer}mlp.down_proj.weight"] = (width, inner)
    shapes["model.norm.weight"] = (width,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], width)
    return shapes


def size_of(shape):
    size = 1
    for dimension in shape:
        size *= dimension
    return size


def parameters_of(config):
    return sum(size_of(shape) for shape in shapes_of(config).values())


def flop_per_token(config, context):
    """Forward and backward; see the top of this file."""
    is_gpt2 = config["model_type"] == "gpt2"
    no_product = (
        ("wpe.weight",) if is_gpt2 else () if config["tie_word_embeddings"] else ("embed_tokens.weight",)
    )
    weights = sum(
        size_of(shape)
        for name, shape in shapes_of(config).items()
        if len(shape) == 2 and not name.endswith(no_product)
    )
    layers, width = ("n_layer", "n_embd") if is_gpt2 else ("num_hidden_layers", "hidden_size")
    return 6 * weights + 6 * config[layers] * context * config[width]


def write_weights(path, config):
    """A safetensors file: norms 1, biases 0, the rest of N(0, 0.02), the same 16 million numbers again and again."""
    import numpy

    header, offset = {}, 0
    for name, shape in shapes_of(config).items():
        end = offset + 2 * size_of(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    count = min(1 << 24, max(size_of(shape) for shape in shapes_of(config).values()))
    drawn = numpy.random.default_rng(1).standard_normal(count, dtype=numpy.float32) * numpy.float32(0.02)
    drawn = (drawn.view(numpy.uint32) >> 16).astype(numpy.uint16)  # bf16, towards zero
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, shape in shapes_of(config).items():
            left = size_of(shape)
            if len(shape) == 1:
                file.write(numpy.full(left, 0 if name.endswith("bias") else 0x3F80, numpy.uint16))
                continue
            while left > 0:
                file.write(drawn[:left])
                left -= min(left, count)


def write_tokens(path, vocabulary):
    """llm.c's form (docs/data.md)."""
    import numpy

    narrow = vocabulary <= 1 << 16
    tokens = random_tokens(vocabulary, numpy.uint16 if narrow else numpy.uint32)
    header = numpy.zeros(256, numpy.int32)
    header[:3] = (20240520, 1, tokens.size) if narrow else (20240801, 7, tokens.size)
    with open(path, "wb") as file:
        file.write(header)
        file.write(tokens)


def random_tokens(vocabulary, dtype):
    import numpy

    return numpy.random.default_rng(2).integers(vocabulary, size=1 << 22, dtype=dtype)

"""Trains a tiny Llama with Hugging Face's Trainer, which gets the optimizer from us and does the rest as
ever: accumulation, clipping, checkpoints. Gradients may be compressed as they come.

    python examples/trainer.py --output run
    python examples/trainer.py --output run --resume --steps 60 --gradients compressed

The first prints

    {'loss': '3.216', 'grad_norm': '1.469', 'learning_rate': '0.002904', 'epoch': '0.03906'}
    {'loss': '2.324', 'grad_norm': '1.734', 'learning_rate': '0.001964', 'epoch': '0.07812'}
    {'loss': '1.664', 'grad_norm': '1.664', 'learning_rate': '0.0006737', 'epoch': '0.1172'}
    {'loss': '1.448', 'grad_norm': '1.383', 'learning_rate': '6.039e-06', 'epoch': '0.1562'}
    bytes per parameter: weights 2.00, optimizer 3.12
"""

import argparse

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
    get_cosine_schedule_with_warmup,
    set_seed,
)

from scruple.torch import AdamW, cast_model
from scruple.torch.transformers import release_gradients

TOKENS, LENGTH = 32, 16


class Counting(torch.utils.data.Dataset):
    """Rows that count in steps of 1 to 5; row i is always the same."""

    def __len__(self):
        return 4096

    def __getitem__(self, i):
        row = (i + (1 + i % 5) * torch.arange(LENGTH)) % TOKENS
        return {"input_ids": row, "labels": row}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", default="run", metavar="FOLDER", help="where checkpoints go (run)")
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps, of two batches each (40)")
    parser.add_argument("--lr", type=float, default=3e-3, help="learning rate (3e-3)")
    parser.add_argument(
        "--gradients",
        choices=("stored", "compressed"),
        default="stored",
        help="what becomes of gradients until the step",
    )
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint in the folder")
    args = parser.parse_args()

    set_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=TOKENS,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=LENGTH,
        )
    )
    cast_model(model, torch.bfloat16)
    opt = AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)
    schedule = get_cosine_schedule_with_warmup(opt, num_warmup_steps=5, num_training_steps=args.steps)
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=args.output,
            max_steps=args.steps,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=2,
            max_grad_norm=1.0,
            logging_steps=10,
            save_steps=20,
            report_to="none",
            disable_tqdm=True,
            seed=0,
        ),
        train_dataset=Counting(),
        optimizers=(opt, schedule),
    )
    if args.gradients == "compressed":
        release_gradients(trainer, "compressed")  # accumulation and max_grad_norm stay the Trainer's
    trainer.train(resume_from_checkpoint=args.resume or None)
    planes = sum(
        plane.nbytes for state in opt.state.values() for plane in state.values() if torch.is_tensor(plane)
    )
    count = sum(p.numel() for p in model.parameters())
    print(f"bytes per parameter: weights 2.00, optimizer {planes / count:.2f}")


if __name__ == "__main__":
    main()

"""The Trainer of Transformers with BSAM: the Trainer clips, accumulates, schedules and logs as usual.

A small OPT, built from its configuration, learns to count from a random number.
Run: python examples/transformers_trainer.py
"""

from bsam.integrations.transformers import SharpnessAwareTrainer  # before transformers, for the sake of torchvision

# isort: split
import tempfile

import torch
from transformers import OPTConfig, OPTForCausalLM, TrainingArguments


def sentences(n):
    words = (torch.randint(0, 20, (n, 1)) + torch.arange(12)) % 20
    return [{"input_ids": row, "labels": row} for row in words]


def main():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "word_embed_proj_dim": 16, "ffn_dim": 16, "num_hidden_layers": 1}
    words = {"vocab_size": 20, "max_position_embeddings": 12, "init_std": 0.3}
    model = OPTForCausalLM(OPTConfig(num_attention_heads=2, dropout=0.1, **sizes, **words))
    with tempfile.TemporaryDirectory() as folder:
        trainer = SharpnessAwareTrainer(
            model,
            TrainingArguments(
                folder,
                num_train_epochs=3,
                per_device_train_batch_size=16,
                gradient_accumulation_steps=2,
                learning_rate=0.03,
                max_grad_norm=1.0,
                label_smoothing_factor=0.05,
                logging_steps=4,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
                use_cpu=not torch.cuda.is_available(),
            ),
            train_dataset=sentences(300),
            eval_dataset=sentences(64),
            method="bsam",
            method_kwargs={"rho_max": 0.05, "rho_min": 0.05},
        )
        trainer.train()
        loss = trainer.evaluate()["eval_loss"]
    print(f"loss on the test sentences {loss:.3f}")
    return trainer, loss


if __name__ == "__main__":
    main()

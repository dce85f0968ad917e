"""Peak memory of a step beyond AdamW's, in fine-tuning of a language model: all parameters, or LoRA's adapters alone.

The model is an OPT with random weights, which take as much memory as trained ones. Memory is counted as in memory.py.

    python benchmarks/lora_memory.py        # needs pip install -c constraints.txt '.[integrations,timm]'
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import machine
from bsam.common.timm_import import import_timm
from bsam.lab.training.trainer import TrainStep
from cases import cases
from memory import WARM_UP, counting

WIDTH, LAYERS, WORDS, LENGTH, RANK = 256, 4, 4096, 32, 8
METHODS = ("SAM", "BSAM2", "BSAM3")
MIB = 2**20


def language_model(lora: bool) -> nn.Module:
    """Return the model; with LoRA, only the adapters of the attention are trained."""
    import_timm()  # which makes torchvision work beside torch for CPUs; Transformers imports it if it is installed
    from peft import LoraConfig, get_peft_model
    from transformers import OPTConfig, OPTForCausalLM

    config = OPTConfig(
        vocab_size=WORDS,
        hidden_size=WIDTH,
        word_embed_proj_dim=WIDTH,
        ffn_dim=4 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        max_position_embeddings=LENGTH,
        dropout=0.0,
    )
    model: nn.Module = OPTForCausalLM(config)
    return get_peft_model(model, LoraConfig(r=RANK, target_modules=["q_proj", "v_proj"])) if lora else model


def losses(outputs: Tensor, batch: tuple[Tensor, ...]) -> Tensor:
    """Return the loss of each sample."""
    return F.cross_entropy(outputs[:, :-1].mT, batch[1][:, 1:], reduction="none").mean(1)


def peak(device: torch.device, lora: bool, label: str | None) -> dict[str, int]:
    """Return the bytes of the model and of its trained parameters, and the peak of a step; None is AdamW alone."""
    with counting(device) as counter:
        model = language_model(lora).to(device)
        trained = [p for p in model.parameters() if p.requires_grad]
        base = torch.optim.AdamW(trained, lr=1e-6)
        words = torch.randint(0, WORDS, (2, LENGTH), device=device)
        case = next((case for case in cases().values() if case.label == label), None)
        optimizer = base if case is None else case.train_step(base, model, batch=2, samples=2, classes=2).optimizer
        step = TrainStep(lambda x: model(input_ids=x).logits, optimizer, losses)
        for _ in range(WARM_UP + 1):
            counter.reset()
            step.step(words, words)
        return {
            "model": sum(p.numel() * p.element_size() for p in model.parameters()),
            "trained": sum(p.numel() * p.element_size() for p in trained),
            "peak": counter.peak(),
        }


def measure(device: torch.device) -> list[dict[str, Any]]:
    """Return a row for each of the two trainings."""
    rows = []
    for lora in (False, True):
        alone = peak(device, lora, None)
        extra = {label: peak(device, lora, label)["peak"] - alone["peak"] for label in METHODS}
        rows.append({"lora": lora, **alone, "extra": extra})
    return rows


def main(arguments: list[str] | None = None) -> None:
    """Run the benchmark, print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    machine.add_arguments(parser, "lora_memory")
    args = parser.parse_args(arguments)
    device = machine.pick_device(parser, args.device)
    rows = measure(device)
    print(f"{'MiB':<18}{'model':>8}{'trained':>9}{'AdamW peak':>12}" + "".join(f"{label:>9}" for label in METHODS))
    for row in rows:
        numbers = [row["model"], row["trained"], row["peak"], *row["extra"].values()]
        texts = [f"{number / MIB:>{width}.2f}" for number, width in zip(numbers, (8, 9, 12, 9, 9, 9), strict=True)]
        print(f"{'LoRA' if row['lora'] else 'all parameters':<18}{''.join(texts)}")
    sizes = {"width": WIDTH, "layers": LAYERS, "words": WORDS, "length": LENGTH, "batch": 2, "rank": RANK}
    content = {"benchmark": "lora_memory", **machine.description(device), "sizes": sizes, "results": rows}
    print(f"written to {machine.write(content, args.out, 'lora_memory')}", file=sys.stderr)


if __name__ == "__main__":
    main()

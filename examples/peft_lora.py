"""LoRA with PEFT and SAM: the optimizer gets the adapters, and perturbs only these; and what this costs.

The model is small and has random weights; everything else is the same with `from_pretrained`.
Run: python examples/peft_lora.py
"""

import bsam.integrations.torchvision  # before peft, for the sake of torchvision

# isort: split
import torch
from peft import LoraConfig, get_peft_model
from torch.nn import functional as F
from transformers import OPTConfig, OPTForCausalLM

import bsam


def main():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "word_embed_proj_dim": 16, "ffn_dim": 16, "num_hidden_layers": 1}
    words = {"vocab_size": 20, "max_position_embeddings": 12, "init_std": 0.3}
    config = OPTConfig(num_attention_heads=2, dropout=0.0, **sizes, **words)
    model = OPTForCausalLM(config)
    model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj", "fc1", "fc2"]))
    adapters = [p for p in model.parameters() if p.requires_grad]
    optimizer = bsam.SAM(torch.optim.AdamW(adapters, lr=0.05), model, rho=0.05)
    words = (torch.randint(0, 20, (32, 1)) + torch.arange(12)) % 20  # sentences that count from a random word
    losses, perturbed, passes = [], set(), 0
    before = start = {name: p.detach().clone() for name, p in model.named_parameters()}

    def closure():
        nonlocal passes
        passes += 1
        perturbed.update(name for name, p in model.named_parameters() if not torch.equal(p, start[name]))
        return F.cross_entropy(model(input_ids=words).logits[:, :-1].flatten(0, 1), words[:, 1:].flatten())

    for _ in range(40):
        start = {name: p.detach().clone() for name, p in model.named_parameters()}  # to see what a pass perturbs
        losses.append(optimizer.step(closure).item())
    frozen = [torch.equal(p, before[name]) for name, p in model.named_parameters() if not p.requires_grad]
    kib = [sum(p.nbytes for p in params) / 1024 for params in (adapters, model.parameters())]
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}; all other weights are unchanged: {all(frozen)}")
    print(f"perturbed: {len(perturbed)} tensors of adapters, such as {min(perturbed)}; {passes} passes in 40 steps")
    print(f"SAM copies the adapters ({kib[0]:.0f} KiB), not the model ({kib[1]:.0f} KiB), and keeps one more gradient")
    return losses, frozen, perturbed


if __name__ == "__main__":
    main()

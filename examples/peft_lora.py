"""LoRA with PEFT and SAM: the optimizer gets the adapters, and perturbs only these.

The model is small and has random weights; everything else is the same with `from_pretrained`.
Run: python examples/peft_lora.py
"""

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
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    adapters = [p for p in model.parameters() if p.requires_grad]
    optimizer = bsam.SAM(torch.optim.AdamW(adapters, lr=0.05), model, rho=0.05)
    words = torch.randint(0, 20, (32, 1)) + torch.arange(12)  # sentences that count from a random word
    words = words % 20
    losses = []
    for _ in range(40):
        loss = optimizer.step(
            lambda: F.cross_entropy(model(input_ids=words).logits[:, :-1].flatten(0, 1), words[:, 1:].flatten())
        )
        losses.append(loss.item())
    frozen = [torch.equal(p, before[name]) for name, p in model.named_parameters() if not p.requires_grad]
    numbers = sum(p.numel() for p in adapters), sum(p.numel() for p in model.parameters())
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}; {numbers[0]} of {numbers[1]} parameters trained")
    print(f"the others are unchanged: {all(frozen)}")
    return losses, frozen


if __name__ == "__main__":
    main()

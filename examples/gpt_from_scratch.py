"""A small GPT learns Python's language reference with AdamW, SAM and FunctionalSAM: equal numbers of gradient passes.

SAM and FunctionalSAM take two passes per step, so they take half as many steps; "half" is AdamW with as many.
Run: python examples/gpt_from_scratch.py        (about five minutes)
"""

from pydoc_data.topics import topics

import torch
from torch import nn
from torch.nn import functional as F

import bsam

CONTEXT, BATCH, WIDTH, LAYERS, HEADS = 64, 32, 64, 2, 4


class GPT(nn.Module):
    def __init__(self, characters):
        super().__init__()
        self.characters, self.places = nn.Embedding(characters, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, LAYERS, nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT))

    def forward(self, x):
        hidden = self.blocks(self.characters(x) + self.places.weight, mask=self.mask, is_causal=True)
        return hidden @ self.characters.weight.T * WIDTH**-0.5


def main(passes=2000, methods=("SAM", "FunctionalSAM", "half", "AdamW"), rho=0.05, seed=0, last=40_000):
    text, losses = torch.tensor(list("\n".join(topics[name] for name in sorted(topics)).encode())), {}
    train, held_out = text[:-last], text[-last:].view(-1, CONTEXT)
    for name in methods:
        torch.manual_seed(seed)
        model, steps = GPT(256), passes if name == "AdamW" else passes // 2
        base = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
        optimizer = base if name in ("half", "AdamW") else getattr(bsam, name)(base, model, rho=rho)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, steps, pct_start=0.1, cycle_momentum=False)

        def closure(rows, model=model, needs_outputs=name == "FunctionalSAM"):
            outputs = model(rows)[:, :-1]
            loss = F.cross_entropy(outputs.flatten(0, 1), rows[:, 1:].flatten())
            return (loss, outputs) if needs_outputs else loss

        for _ in range(steps):
            rows = train[torch.randint(len(train) - CONTEXT, (BATCH, 1)) + torch.arange(CONTEXT)]
            closure(rows).backward() if optimizer is base else optimizer.backward(lambda rows=rows: closure(rows))
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        losses[name] = closure(held_out, needs_outputs=False).item()
        print(f"{name}: {steps} steps, validation loss {losses[name]:.4f} per character", flush=True)
    return losses


if __name__ == "__main__":
    main()

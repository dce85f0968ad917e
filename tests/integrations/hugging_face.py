"""A small language model, its data, and plain loops with which the Trainer and Accelerate are compared.

As a script it is a run of two processes on gloo: python hugging_face.py FOLDER
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import bsam

if __name__ == "__main__":
    sys.modules["torchvision"] = None  # type: ignore[assignment]  # as if it were not installed: its import is slow

from accelerate import Accelerator
from transformers import OPTConfig, OPTForCausalLM, Trainer, TrainingArguments  # noqa: F401

from bsam.integrations.accelerate import backward
from bsam.integrations.transformers import SharpnessAwareTrainer
from processes import fork_ranks, group_of_two

LR, RHO, CLASSES = 0.2, 0.2, 7
Batch = dict[str, Tensor]


def network(dropout: float = 0.0, dtype: torch.dtype = torch.float64) -> OPTForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": CLASSES, "max_position_embeddings": 6, "hidden_size": 4, "ffn_dim": 4}
    words = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    model = OPTForCausalLM(
        OPTConfig(**sizes, **words, word_embed_proj_dim=4, num_hidden_layers=2, num_attention_heads=2, dropout=dropout)
    ).to(dtype)
    for p in model.parameters():
        if p.dim() > 1:
            nn.init.normal_(p, std=0.3)  # large enough for a small network to have useful gradients
    return model


def data(n: int = 14) -> list[Batch]:
    """Sentences of six words, of which different numbers of labels are masked."""
    generator = torch.Generator().manual_seed(3)
    words = torch.randint(0, CLASSES, (n, 6), generator=generator)
    labels = [row.masked_fill(torch.arange(6) < i % 4, -100) for i, row in enumerate(words)]
    return [{"input_ids": row, "labels": label} for row, label in zip(words, labels, strict=True)]


def batches(size: int, samples: list[Batch] | None = None) -> list[Batch]:
    return list(DataLoader(data() if samples is None else samples, batch_size=size))


def lm_loss(model: nn.Module, batch: Batch, items: Tensor, smoothing: float = 0.0) -> Tensor:
    """The sum over the words that are predicted, divided by their number in all micro-batches of the step."""
    logits, labels = model(input_ids=batch["input_ids"]).logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten()
    logits, labels = logits[labels != -100], labels[labels != -100]
    loss = F.cross_entropy(logits, labels, reduction="sum")
    if smoothing:  # the Trainer sums over the classes in float32
        loss = (1 - smoothing) * loss - smoothing / CLASSES * logits.log_softmax(1).sum(1, dtype=torch.float32).sum()
    return loss / items


def train_plainly(
    model: nn.Module,
    optimizer: bsam.SharpnessAware,
    micro_batches: list[Batch],
    loss_of: Callable[..., Tensor] = lm_loss,
    *,
    epochs: int = 1,
    accumulate: int = 1,
    max_norm: float = 1e9,
    no_sync: Callable[[], Any] = contextlib.nullcontext,
    total: float | None = None,
    scaler: torch.amp.GradScaler | None = None,
) -> list[float]:
    """Train with a linear schedule; return the loss of each step, summed over its micro-batches."""
    windows = [micro_batches[i : i + accumulate] for i in range(0, len(micro_batches), accumulate)] * epochs
    losses, scaler = [], scaler or torch.amp.GradScaler("cpu", enabled=False)
    for t, window in enumerate(windows):
        for group in optimizer.param_groups:
            group["lr"] = LR * (1 - t / (total or len(windows)))
        items, loss = sum((b["labels"][..., 1:] != -100).sum() for b in window), 0.0
        for i, batch in enumerate(window):
            with no_sync() if i < len(window) - 1 else contextlib.nullcontext():
                loss += float(optimizer.backward(partial(loss_of, model, batch, items), scaler))
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss)
    return losses


def sam(model: nn.Module, cls: Any = bsam.SAM, **settings: Any) -> bsam.SharpnessAware:
    params = [p for p in model.parameters() if p.requires_grad]
    return cls(torch.optim.SGD(params, lr=LR), model, **{"rho": RHO, **settings})


def arguments(folder: Path | str, **settings: Any) -> TrainingArguments:
    common = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "save_strategy": "no", "logging_steps": 1}
    steps = {"num_train_epochs": 1, "per_device_train_batch_size": 2, "train_sampling_strategy": "sequential"}
    return TrainingArguments(
        str(folder), **{"optim": "sgd", "learning_rate": LR, "max_grad_norm": 0, **common, **steps, **settings}
    )


def trainer(model: nn.Module, args: TrainingArguments, cls: Any = SharpnessAwareTrainer, **settings: Any) -> Any:
    settings = {"method": "sam", "method_kwargs": {"rho": RHO}, "train_dataset": data(), **settings}
    return cls(model, args, **settings)


def logged(run: Any) -> list[float]:
    return [entry["loss"] for entry in run.state.log_history if "loss" in entry]


def weights(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def mean_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The mean over the words of this batch."""
    return lm_loss(model, batch, (batch["labels"][:, 1:] != -100).sum())


def accelerated(
    accelerator: Accelerator, model: nn.Module, optimizer: Any, max_norm: float = 1e9, samples: int = 14
) -> list[float]:
    """Train with Accelerate; return the losses of the micro-batches."""
    prepared, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data(samples), batch_size=2))
    losses = []
    for batch in loader:
        with accelerator.accumulate(prepared):
            losses.append(float(backward(accelerator, optimizer, partial(mean_loss, prepared, batch))))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(prepared.parameters(), max_norm)
            optimizer.step()
            optimizer.zero_grad()
    return losses


def ddp_trainer(rank: int, **settings: Any) -> dict[str, Any]:
    """Train with the Trainer, and in a plain loop in the same two processes."""
    model, twin, accumulate = network(), network(), settings.get("gradient_accumulation_steps", 1)
    with tempfile.TemporaryDirectory() as folder:
        args = arguments(folder, ddp_backend="gloo", max_grad_norm=0.3, **settings)
        run = trainer(model, args, train_dataset=data(12))
        run.train()
    everything = batches(2, data(12))
    mine, window = everything[rank::2], 2 * accumulate

    def loss_of(model: nn.Module, batch: Batch, _: Tensor) -> Tensor:
        first = next(i for i, b in enumerate(mine) if b is batch) // accumulate * window
        items = sum((b["labels"][:, 1:] != -100).sum() for b in everything[first : first + window])
        return 2 * lm_loss(model, batch, items)  # items of both ranks, and DDP averages

    wrapped = nn.parallel.DistributedDataParallel(twin)
    settings = {"accumulate": accumulate, "max_norm": 0.3, "no_sync": wrapped.no_sync}
    losses = train_plainly(wrapped, sam(wrapped), mine, loss_of, **settings)
    return {"weights": weights(model), "plain": weights(twin), "logged": logged(run), "losses": losses}


def ddp_accelerate(rank: int, accumulate: int, m_sharpness: bool = False) -> dict[str, Any]:
    model, twin = network(), network()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
    prepared = accelerator.prepare(model) if m_sharpness else model
    losses = accelerated(accelerator, prepared, sam(prepared, m_sharpness=m_sharpness), 0.3, 12)
    mine, wrapped = batches(2, data(12))[rank::2], nn.parallel.DistributedDataParallel(twin)
    optimizer = sam(wrapped, m_sharpness=m_sharpness)
    for i, batch in enumerate(mine):
        last = (i + 1) % accumulate == 0 or i + 1 == len(mine)
        with contextlib.nullcontext() if last else wrapped.no_sync():
            optimizer.backward(lambda batch=batch: mean_loss(wrapped, batch) / accumulate)
        if last:
            torch.nn.utils.clip_grad_norm_(wrapped.parameters(), 0.3)
            optimizer.step()
            optimizer.zero_grad()
    return {"weights": weights(model), "plain": weights(twin), "logged": losses}


CASES: dict[str, Callable[[int], dict[str, Any]]] = {
    "accelerate": partial(ddp_accelerate, accumulate=1),
    "accelerate-accumulate": partial(ddp_accelerate, accumulate=2),  # three micro-batches: the last step has one
    "accelerate-m-sharpness": partial(ddp_accelerate, accumulate=1, m_sharpness=True),
    "trainer": ddp_trainer,
    "trainer-accumulate": partial(ddp_trainer, gradient_accumulation_steps=2),
}


def rank_in_group(rank: int, folder: Path) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}  # for Accelerate; the group exists already
    with group_of_two(rank, folder):
        torch.save({case: run(rank) for case, run in CASES.items()}, folder / f"{rank}.pt")


if __name__ == "__main__":
    fork_ranks(rank_in_group, Path(sys.argv[1]))

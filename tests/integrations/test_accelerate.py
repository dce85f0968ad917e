"""``backward`` of bsam.integrations.accelerate against plain bsam training."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

import bsam
from bsam.integrations.accelerate import backward, check_accelerator


def difference(a, b):
    return max(float((p - q).detach().abs().max()) for p, q in zip(a.parameters(), b.parameters(), strict=True))


def train_plainly(hf, model, accumulate=3, skip=0, loss_of=None, max_norm=0.3):
    """Divide by the number of micro-batches, as Accelerate does even if the last window has fewer."""
    optimizer, losses, batches = hf.sam(model), [], hf.batches(2)
    for i, batch in enumerate(batches[skip:], 1 + skip):
        closure = lambda batch=batch: (loss_of or hf.mean_loss)(model, batch) / accumulate  # noqa: E731
        losses.append(float(optimizer.backward(closure)) * accumulate)
        if i % accumulate == 0 or i == len(batches):
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
            optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("accumulate", [1, 3])
def test_accumulate_and_clip(hf, accumulate):
    model, twin, calls = hf.network(), hf.network(), []
    model.register_forward_pre_hook(lambda *_: calls.append(1))
    accelerator = hf.Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
    losses = hf.accelerated(accelerator, model, hf.sam(model), 0.3)
    assert losses == pytest.approx(train_plainly(hf, twin, accumulate), abs=1e-9)  # not divided, of the first pass
    assert difference(model, twin) < 1e-9
    assert len(calls) == 2 * 7


@pytest.mark.parametrize("accumulate", [1, 3])
def test_steps_with_a_closure(hf, accumulate):
    """Accelerate drops the closures of all micro-batches but the last, so that accumulation with them is an error."""
    model, twin = hf.network(), hf.network()
    accelerator = hf.Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
    ours = hf.sam(model)
    torch.optim.lr_scheduler.ConstantLR(ours, factor=1.0)  # wraps step
    prepared, optimizer = accelerator.prepare(model, ours)

    def train():
        for batch in hf.batches(2):
            with accelerator.accumulate(prepared):
                optimizer.step(partial(hf.mean_loss, prepared, batch))

    if accumulate == 1:
        train()
        train_plainly(hf, twin, 1, max_norm=1e9)
    else:
        with pytest.raises(bsam.BsamError, match=r"accumulates 3 batches.*integrations\.accelerate\.backward"):
            train()
    assert difference(model, twin) < 1e-9
    ours.step(partial(hf.mean_loss, model, hf.batches(2)[0]))  # not through Accelerate


def test_bf16(hf):
    def loss_of(model, batch):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(input_ids=batch["input_ids"]).logits
        return hf.mean_loss(lambda **_: SimpleNamespace(logits=logits.float()), batch)

    model, twin = hf.network(dtype=torch.float32), hf.network(dtype=torch.float32)
    hf.accelerated(hf.Accelerator(cpu=True, mixed_precision="bf16"), model, hf.sam(model), 0.3)
    train_plainly(hf, twin, 1, loss_of=loss_of)
    assert difference(model, twin) < 1e-7


def test_a_scaler_that_skips_a_step(hf, monkeypatch):
    model, twin = hf.network(dtype=torch.float32), hf.network(dtype=torch.float32)
    accelerator = hf.Accelerator(cpu=True)
    optimizer = hf.sam(model)
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, backoff_factor=2.0**-100)
    monkeypatch.setattr(accelerator, "unscale_gradients", lambda: accelerator.scaler.unscale_(optimizer))
    hf.accelerated(accelerator, model, optimizer, 0.3)
    train_plainly(hf, twin, 1, skip=1)
    assert optimizer.t == 6
    assert difference(model, twin) < 1e-6


@pytest.mark.parametrize(
    "method",
    [partial(bsam.SAM, rho=0.1), partial(bsam.KSAM, rho=0.1, k=3), partial(bsam.FunctionalSAM, rho=0.1)],
    ids=["sam", "ksam", "functional_sam"],
)
def test_closures_that_yield_and_that_choose(hf, method):
    """As in optimizer.backward: one loss per micro-batch (SAM), losses of chosen samples (K-SAM), or pairs with outputs
    (Functional SAM).
    """
    accelerator = hf.Accelerator(cpu=True, gradient_accumulation_steps=2)
    x, y = torch.randn(8, 3, dtype=torch.float64), torch.randint(0, 2, (8,))
    torch.manual_seed(1)
    model = torch.nn.Linear(3, 2).double()
    optimizer = method(torch.optim.SGD(model.parameters(), lr=0.1), model)

    factor = 1.0

    def losses(indices=slice(None)):
        return factor * F.cross_entropy(model(x[indices]), y[indices], reduction="none")

    def yielding():
        yield from (losses(slice(0, 4)).mean(), losses(slice(4, 8)).mean())

    def pairs():
        for part in (slice(0, 4), slice(4, 8)):
            outputs = model(x[part])
            yield factor * F.cross_entropy(outputs, y[part]), outputs

    closure = {bsam.SAM: yielding, bsam.KSAM: losses, bsam.FunctionalSAM: pairs}[method.func]
    loss = backward(accelerator, optimizer, closure)
    gradients = [p.grad.clone() for p in model.parameters()]
    optimizer.zero_grad()
    factor = 0.5  # as Accelerate divides
    torch.testing.assert_close(loss, 2 * optimizer.backward(closure), rtol=0, atol=1e-12)
    torch.testing.assert_close(gradients, [p.grad for p in model.parameters()], rtol=0, atol=1e-12)


def test_refusals(hf):
    """After each of them, no gradients are left."""
    accelerator, model, batch = hf.Accelerator(cpu=True, gradient_accumulation_steps=3), hf.network(), hf.batches(2)[0]
    optimizer = accelerator.prepare(hf.sam(model))
    plain = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    chooses = accelerator.prepare(bsam.KSAM(torch.optim.SGD(model.parameters(), lr=0.1), model, k=1))
    kind = type(accelerator.distributed_type)
    usual = {"distributed_type": kind.NO, "parallelism_config": None, "mixed_precision": "no"}
    check_accelerator(SimpleNamespace(**usual))

    def with_setting(**setting):
        return SimpleNamespace(**{**usual, **setting})

    def ran_backward(run):
        loss = hf.mean_loss(model, batch)
        run(loss)
        return loss

    loss = torch.ones((), requires_grad=True)
    for arguments, word in [
        ((accelerator, plain, lambda: None), "SGD"),
        ((accelerator, optimizer, 1.0), "closure"),
        ((accelerator, optimizer, lambda: None), "None"),
        ((accelerator, optimizer, lambda: {"loss": loss}), "dict"),
        ((accelerator, optimizer, lambda: iter([[loss]])), "list"),
        ((accelerator, optimizer, lambda: ran_backward(torch.Tensor.backward)), "backward"),
        ((accelerator, optimizer, lambda: ran_backward(accelerator.backward)), "backward"),
        ((accelerator, chooses, lambda: model(batch["input_ids"]).logits.mean((1, 2))), "argument"),
        ((with_setting(distributed_type=kind.DEEPSPEED), optimizer, lambda: None), "DEEPSPEED"),
        ((with_setting(distributed_type=kind.FSDP), optimizer, lambda: None), "FSDP"),
        ((with_setting(distributed_type=kind.XLA), optimizer, lambda: None), "XLA"),
        ((with_setting(parallelism_config=object()), optimizer, lambda: None), "parallelism_config"),
        ((with_setting(mixed_precision="fp8"), optimizer, lambda: None), "fp8"),
    ]:
        with pytest.raises(bsam.BsamError, match=word):
            backward(*arguments)
        assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("case", ["accelerate", "accelerate-accumulate", "accelerate-m-sharpness"])
def test_two_processes(hf, hf_ranks, case):
    """Equality with plain DDP training in the same processes, with some micro-batches under no_sync."""
    ranks = [rank[case] for rank in hf_ranks]
    for rank in ranks:
        torch.testing.assert_close(rank["weights"], rank["plain"], rtol=0, atol=1e-9)
        torch.testing.assert_close(rank["weights"], ranks[0]["weights"], rtol=0, atol=0)
    assert ranks[0]["logged"] != ranks[1]["logged"]


def test_the_example(hf, example):
    _, (losses, optimizer), out = example("accelerate_loop")
    assert len(losses) == 5 * 38
    assert optimizer.optimizer.t == 5 * 10
    assert sum(losses[-38:]) / 38 < 0.12 < losses[0] / 5
    assert len(out.splitlines()) == 5

"""``backward`` of bsam.integrations.accelerate against plain bsam training."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

import bsam
from bsam.integrations.accelerate import backward, check_accelerator


def difference(a, b):
    return max(float((p - q).detach().abs().max()) for p, q in zip(a.parameters(), b.parameters(), strict=True))


def train_plainly(hf, model, accumulate=3, skip=0, loss_of=None, max_norm=0.3, optimizer=None):
    """Accelerate divides by the number of micro-batches also where the last window has fewer."""
    optimizer, losses, batches = optimizer or hf.sam(model), [], hf.batches(2)
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


def test_what_is_not_exact(hf):
    """step(closure) leaves micro-batches out, and backward of the optimizer itself does not divide."""
    exact = hf.network()
    train_plainly(hf, exact, max_norm=1e9)
    for way in ("step(closure)", "own backward"):
        model = hf.network()
        accelerator = hf.Accelerator(cpu=True, gradient_accumulation_steps=3)
        prepared, optimizer = accelerator.prepare(model, hf.sam(model))
        for i, batch in enumerate(hf.batches(2)):
            accelerator.gradient_state._set_sync_gradients(i % 3 == 2 or i == 6)
            closure = lambda batch=batch, prepared=prepared: hf.mean_loss(prepared, batch)  # noqa: E731
            if way == "step(closure)":
                optimizer.step(closure)
            else:
                optimizer.optimizer.backward(closure)
                optimizer.step()
            optimizer.zero_grad()
        assert difference(model, exact) > 0.01


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


def test_closures_that_yield_and_that_choose(hf):
    """As in optimizer.backward: a loss per micro-batch, or losses of the samples that the method asks for."""
    accelerator = hf.Accelerator(cpu=True, gradient_accumulation_steps=2)
    x, y = torch.randn(8, 3, dtype=torch.float64), torch.randint(0, 2, (8,))
    found = []
    for divide in (False, True):
        torch.manual_seed(1)
        model = torch.nn.Linear(3, 2).double()
        base = torch.optim.SGD(model.parameters(), lr=0.1)
        for optimizer in (bsam.SAM(base, model, rho=0.1), None):
            optimizer = optimizer or bsam.KSAM(torch.optim.SGD(model.parameters(), lr=0.1), model, rho=0.1, k=3)

            def losses(indices=slice(None), factor=0.5 if divide else 1.0, model=model):
                return F.cross_entropy(model(x[indices]), y[indices], reduction="none") * factor

            def parts(losses=losses):
                yield from (losses(slice(0, 4)).mean(), losses(slice(4, 8)).mean())

            closure = parts if isinstance(optimizer, bsam.SAM) else losses
            loss = optimizer.backward(closure) * 2 if divide else backward(accelerator, optimizer, closure)
            found.append((float(loss), [p.grad.clone() for p in model.parameters()]))
            optimizer.zero_grad()
    for ours, plain in zip(found[:2], found[2:], strict=True):
        torch.testing.assert_close(ours, plain, rtol=0, atol=1e-12)


def test_what_cannot_be_exact_is_refused(hf, monkeypatch):
    accelerator, model = hf.Accelerator(cpu=True), hf.network()
    plain = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(TypeError, match=r"must be a sharpness-aware optimizer.*got SGD"):
        backward(accelerator, plain, lambda: None)
    with pytest.raises(TypeError, match="needs a closure that computes the loss, got float"):
        backward(accelerator, hf.sam(model), 1.0)
    kind = type(accelerator.distributed_type)
    usual = {"distributed_type": kind.NO, "parallelism_config": None, "mixed_precision": "no"}
    for own, message in [
        ({"distributed_type": kind.DEEPSPEED}, "Accelerate's DEEPSPEED"),
        ({"distributed_type": kind.MEGATRON_LM}, "Accelerate's MEGATRON_LM"),
        ({"distributed_type": kind.FSDP}, "Accelerate's FSDP"),
        ({"distributed_type": kind.XLA}, "Accelerate's XLA"),
        ({"parallelism_config": object()}, "parallelism_config"),
        ({"mixed_precision": "fp8"}, "mixed_precision='fp8'"),
    ]:
        with pytest.raises(bsam.BsamError, match=message):
            check_accelerator(SimpleNamespace(**{**usual, **own}))
    check_accelerator(SimpleNamespace(**usual))
    with pytest.raises(bsam.BsamError, match="mixed_precision='fp8'"):
        backward(SimpleNamespace(**{**usual, "mixed_precision": "fp8"}), hf.sam(model), lambda: None)


def test_closures_that_are_refused(hf):
    """By the messages of optimizer.backward, and nothing is left in the gradients."""
    accelerator, model, batch = hf.Accelerator(cpu=True, gradient_accumulation_steps=3), hf.network(), hf.batches(2)[0]
    optimizer = accelerator.prepare(hf.sam(model))

    def ran_backward(run):
        loss = hf.mean_loss(model, batch)
        run(loss)
        return loss

    loss = torch.ones((), requires_grad=True)
    for closure, message in [
        (lambda: None, "the closure returned None"),
        (lambda: {"loss": loss}, "must return the loss as a tensor .*, got dict"),
        (lambda: (loss, 1), "must return the loss as a tensor .*, got tuple"),
        (lambda: iter([[loss]]), "must return the loss as a tensor .*, got list"),
        (lambda: ran_backward(torch.Tensor.backward), "the closure ran backward.*: let it only return the loss"),
        (lambda: ran_backward(accelerator.backward), "the closure ran backward"),
    ]:
        with pytest.raises(bsam.BsamError, match=message):
            backward(accelerator, optimizer, closure)
        assert all(p.grad is None for p in model.parameters())
    chooses = accelerator.prepare(bsam.KSAM(torch.optim.SGD(model.parameters(), lr=0.1), model, k=1))
    with pytest.raises(bsam.BsamError, match="the closure takes no argument"):
        backward(accelerator, chooses, lambda: model(batch["input_ids"]).logits.mean((1, 2)))


@pytest.mark.parametrize("case", ["accelerate", "accelerate-accumulate", "accelerate-m-sharpness"])
def test_two_processes(hf, hf_ranks, case):
    """As plain DDP training in the same processes, where some micro-batches are under no_sync."""
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


def test_the_guide(hf, guide):
    names = guide("accelerate")
    assert names["optimizer"].optimizer.t == 3

"""SharpnessAwareTrainer against plain bsam training, one row of what the Trainer does after the other."""

from __future__ import annotations

from collections import UserDict
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import default_collate

import bsam
from bsam.flatness import sharpness

CLOSE = {"rtol": 0, "atol": 1e-6}
ROWS = {  # arguments of the Trainer, and of the plain loop
    "accumulation with a remainder": (
        {"gradient_accumulation_steps": 3, "num_train_epochs": 2},
        {"accumulate": 3, "epochs": 2},
    ),
    "gradient checkpointing": ({"gradient_checkpointing": True}, {}),
    "clip, accumulation and label smoothing": (
        {"max_grad_norm": 0.3, "gradient_accumulation_steps": 2, "label_smoothing_factor": 0.1},
        {"max_norm": 0.3, "accumulate": 2, "smoothing": 0.1},
    ),
}


def difference(a: nn.Module, b: nn.Module) -> float:
    return max(float((p - q).detach().abs().max()) for p, q in zip(a.parameters(), b.parameters(), strict=True))


@pytest.mark.parametrize("row", ROWS)
def test_settings_of_the_trainer(hf, row, tmp_path):
    """With BSAM, since clipping one of its gradients differs from clipping the direction; for SAM it does not."""
    radii = {"rho_max": 0.2, "rho_min": 0.1}
    settings, plain = ROWS[row]
    model, twin, calls = hf.network(), hf.network(), []
    model.register_forward_pre_hook(lambda *_: calls.append(1))
    run = hf.trainer(model, hf.arguments(tmp_path, **settings), method="bsam", method_kwargs=radii)
    run.train()
    plain = dict(plain)
    loss_of = partial(hf.lm_loss, smoothing=plain.pop("smoothing", 0.0))
    optimizer = bsam.BSAM(torch.optim.SGD(twin.parameters(), lr=hf.LR), twin, **radii)
    losses = hf.train_plainly(twin, optimizer, hf.batches(2), loss_of, **plain)
    assert difference(model, twin) < 1e-6
    assert difference(model, hf.network()) > 0.02
    assert hf.logged(run) == pytest.approx(losses, abs=1e-6)  # of the first pass
    assert len(calls) == 3 * 7 * plain.get("epochs", 1)  # three passes for each of seven micro-batches


def test_bf16(hf, tmp_path):
    def loss_of(model, batch, items):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(**batch, num_items_in_batch=items).loss

    model, twin = hf.network(dtype=torch.float32), hf.network(dtype=torch.float32)
    run = hf.trainer(model, hf.arguments(tmp_path, bf16=True))
    run.train()
    losses = hf.train_plainly(twin, hf.sam(twin), hf.batches(2), loss_of)
    assert difference(model, twin) < 1e-7
    assert hf.logged(run) == pytest.approx(losses, abs=1e-6)
    single = hf.network(dtype=torch.float32)
    hf.train_plainly(single, hf.sam(single), hf.batches(2))
    assert difference(single, twin) > 1e-4  # float32 gives other weights


def test_a_loss_without_num_items_is_divided(hf, tmp_path):
    """A model that takes the mean over its micro-batch: 3, 3 and 1 micro-batches in a step."""

    class Mean(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = hf.network()

        def forward(self, input_ids, labels):
            return {"loss": hf.mean_loss(self.inner, {"input_ids": input_ids, "labels": labels})}

    model, twin, batches = Mean(), hf.network(), hf.batches(2)
    run = hf.trainer(model, hf.arguments(tmp_path, gradient_accumulation_steps=3))
    run.train()

    def loss_of(model, batch, _):
        return hf.mean_loss(model, batch) / (1 if batch is batches[6] else 3)

    losses = hf.train_plainly(twin, hf.sam(twin), batches, loss_of, accumulate=3)
    assert difference(model.inner, twin) < 1e-9
    assert hf.logged(run) == pytest.approx(losses, abs=1e-6)


METHODS = {
    "looksam": (bsam.LookSAM, {"rho": 0.2, "k": 3}, 7 + 3),
    "msam": (bsam.MSAM, {"rho": 0.2}, 7),
    "aesam": (bsam.AESAM, {"rho": 0.2, "total_steps": 7}, None),
}


@pytest.mark.parametrize("name", METHODS)
def test_methods_and_a_base_of_the_user(hf, name, tmp_path):
    cls, settings, passes = METHODS[name]
    model, twin, calls = hf.network(), hf.network(), []
    model.register_forward_pre_hook(lambda *_: calls.append(1))
    bases = [torch.optim.SGD(m.parameters(), lr=hf.LR, momentum=0.5) for m in (model, twin)]
    kwargs = {k: v for k, v in settings.items() if k != "total_steps"}  # the Trainer sets it
    arguments = {"optimizers": (bases[0], None), "method": name, "method_kwargs": kwargs}
    run = hf.trainer(model, hf.arguments(tmp_path), **arguments)
    run.train()
    losses = hf.train_plainly(twin, cls(bases[1], twin, **settings), hf.batches(2))
    assert difference(model, twin) < 1e-6
    assert hf.logged(run) == pytest.approx(losses, abs=1e-6)
    assert passes is None or len(calls) == passes


def test_adamw_of_the_trainer_and_a_method_of_the_user(hf, tmp_path):
    class Mine(bsam.SAM):
        pass

    model, twin = hf.network(), hf.network()
    hf.trainer(model, hf.arguments(tmp_path, optim="adamw_torch", weight_decay=0.1), method=Mine).train()
    decays = {False: [], True: []}
    for name, p in twin.named_parameters():
        decays["bias" not in name and "norm" not in name].append(p)
    base = torch.optim.AdamW(
        [{"params": decays[True], "weight_decay": 0.1}, {"params": decays[False], "weight_decay": 0.0}], lr=hf.LR
    )
    hf.train_plainly(twin, bsam.SAM(base, twin, rho=hf.RHO), hf.batches(2))
    assert difference(model, twin) < 1e-6


def test_passes_share_their_dropout(hf, tmp_path):
    from transformers import TrainerCallback

    class Seed(TrainerCallback):
        def on_step_begin(self, *_, **__):
            torch.manual_seed(5)

    def loss_of(model, batch, items):
        torch.manual_seed(5)
        return hf.lm_loss(model.train(), batch, items)

    model, twin = hf.network(0.3), hf.network(0.3)
    hf.trainer(model, hf.arguments(tmp_path), callbacks=[Seed()]).train()
    hf.train_plainly(twin, hf.sam(twin), hf.batches(2), loss_of)
    assert difference(model, twin) < 1e-6


def test_resume_goes_on_bit_for_bit(hf, tmp_path):
    """LookSAM reuses a direction of step 3 in steps 4 and 5; with shuffled data, dropout and Adam."""
    method = {"method": "looksam", "method_kwargs": {"rho": 0.2, "k": 3}}
    settings = {"optim": "adamw_torch", "train_sampling_strategy": "random", "num_train_epochs": 2}
    args = hf.arguments(tmp_path, **settings, save_strategy="steps", save_steps=4, learning_rate=0.02)
    whole, resumed = (hf.trainer(hf.network(0.2), args, **method) for _ in range(2))
    whole.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert resumed.optimizer.optimizer.t == whole.optimizer.optimizer.t == 14
    assert difference(whole.model, resumed.model) == 0
    assert hf.logged(whole) == hf.logged(resumed)


def test_a_scaler_that_skips_a_step(hf, tmp_path, monkeypatch):
    """Accelerate allows float16 only on GPUs, so its scaler is set here. The first step overflows."""
    model, twin = hf.network(dtype=torch.float32), hf.network(dtype=torch.float32)
    run = hf.trainer(model, hf.arguments(tmp_path, max_grad_norm=0.3))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, backoff_factor=2.0**-100)
    monkeypatch.setattr(run.accelerator, "scaler", scaler)
    monkeypatch.setattr(run.accelerator, "unscale_gradients", lambda: scaler.unscale_(run.optimizer.optimizer))
    run.train()
    hf.train_plainly(twin, hf.sam(twin), hf.batches(2)[1:], max_norm=0.3, total=7)
    assert run.optimizer.optimizer.t == 6
    assert difference(model, twin) < 1e-6


def test_extra_passes_are_silent(hf, tmp_path):
    flags = []

    class Mine(hf.SharpnessAwareTrainer):
        def compute_loss(self, *args, **kwargs):
            self.log({"words": 1.0})
            flags.append(self.extra_pass)
            return super().compute_loss(*args, **kwargs)

    run = hf.trainer(hf.network(), hf.arguments(tmp_path, max_steps=2), Mine)
    run.train()
    assert flags == [False, True, False, True]
    assert sum("words" in entry for entry in run.state.log_history) == 2
    assert run.extra_pass is False


def test_every_pass_gets_new_containers(hf, tmp_path):
    """The Trainer makes them before each ``compute_loss``."""
    seen = []

    class Popping(hf.SharpnessAwareTrainer):
        def compute_loss(self, model, inputs, **kwargs):
            seen.append(inputs.pop("more").pop())
            return super().compute_loss(model, inputs, **kwargs)

    for kind in (dict, UserDict):
        collate = lambda rows, kind=kind: kind({**default_collate(rows), "more": [1.0]})  # noqa: E731
        arguments = hf.arguments(tmp_path, max_steps=1, remove_unused_columns=False)
        hf.trainer(hf.network(), arguments, Popping, data_collator=collate).train()
    assert seen == [1.0] * 4


def test_total_steps_are_those_of_the_training(hf, tmp_path):
    """Also if the optimizer already exists, and in a second training; those of the user stay."""
    run = hf.trainer(hf.network(), hf.arguments(tmp_path), method="aesam", method_kwargs={"rho": 0.1})
    run.create_optimizer_and_scheduler(7)
    for run.args.max_steps in (1, 2):  # auto_find_batch_size trains again, too, with more steps
        run.train()
        assert run.optimizer.optimizer.total_steps == run.args.max_steps
    settings = {"rho": 0.1, "total_steps": 50}
    run = hf.trainer(hf.network(), hf.arguments(tmp_path, max_steps=1), method="aesam", method_kwargs=settings)
    run.train()
    assert run.optimizer.optimizer.total_steps == 50


def test_statistics_of_batch_norm_are_of_the_first_pass(hf, tmp_path):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(1)
            self.net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)).double()

        def forward(self, input_ids, labels):
            return {"loss": F.cross_entropy(self.net(input_ids.double()), labels[:, 5] % 3)}

    model, twin = Net(), Net()
    samples = [{"input_ids": row["input_ids"], "labels": row["input_ids"]} for row in hf.data()]
    hf.trainer(model, hf.arguments(tmp_path), train_dataset=samples).train()
    loss_of = lambda model, batch, _: model(**batch)["loss"]  # noqa: E731
    hf.train_plainly(twin, hf.sam(twin), hf.batches(2, samples), loss_of)
    torch.testing.assert_close(model.state_dict(), twin.state_dict(), rtol=0, atol=1e-9)


def test_training_twice_and_an_optimizer_of_the_user(hf, tmp_path):
    model, twin = hf.network(), hf.network()
    optimizer = hf.sam(model)
    run = hf.trainer(model, hf.arguments(tmp_path), method=None, method_kwargs=None, optimizers=(optimizer, None))
    run.train()
    run.train()
    plain = hf.sam(twin)
    for _ in range(2):
        hf.train_plainly(twin, plain, hf.batches(2))
    assert run.optimizer.optimizer is optimizer
    assert difference(model, twin) < 1e-6


def test_refusals(hf, tmp_path, monkeypatch):
    model = hf.network()
    chooses = bsam.KSAM(torch.optim.SGD(model.parameters(), lr=0.1), model)
    on_a_share = bsam.SAM(torch.optim.SGD(model.parameters(), lr=0.1), model, ascent=0.5)
    for optim, arguments, word in [
        ("sgd", {"method": "sgd"}, "'sgd'"),
        ("sgd", {"method": "saf"}, "'saf'"),
        ("sgd", {"method": "ksam"}, "K-SAM"),
        ("sgd", {"method": "functional_sam"}, "outputs"),
        ("sgd", {"optimizers": (on_a_share, None), "method": None, "method_kwargs": None}, "per-sample"),
        ("sgd", {"method_kwargs": {"m_sharpness": True}}, "m_sharpness"),
        ("sgd", {"optimizers": (hf.sam(model), None), "method": "bsam", "method_kwargs": None}, "optimizers"),
        ("sgd", {"optimizers": (hf.sam(model), None), "method": None}, "optimizers"),
        ("sgd", {"optimizers": (chooses, None), "method": None, "method_kwargs": None}, "K-SAM"),
        ("adalomo", {}, "adalomo"),
        ("galore_adamw_layerwise", {}, "layerwise"),
    ]:
        with pytest.raises(bsam.BsamError, match=word):
            hf.trainer(model, hf.arguments(tmp_path, optim=optim), **arguments)
    with monkeypatch.context() as patch:
        patch.setattr(hf.Accelerator, "mixed_precision", "fp8")
        with pytest.raises(bsam.BsamError, match="fp8"):
            hf.trainer(model, hf.arguments(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(type(model), "is_distributed_loading_by_transformers", True)
        with pytest.raises(bsam.BsamError, match="sharded"):
            hf.trainer(model, hf.arguments(tmp_path))

    class Shifting(hf.SharpnessAwareTrainer):
        def compute_loss(self, model, inputs, **kwargs):
            inputs["input_ids"].add_(1).remainder_(7)
            return super().compute_loss(model, inputs, **kwargs)

    paper = {"method": "gam", "method_kwargs": {"form": "paper"}}
    collators = [{"data_collator": lambda rows, kind=kind: kind(default_collate(rows))} for kind in (dict, UserDict)]
    for cls, arguments, word in [
        (hf.SharpnessAwareTrainer, paper, "differentiates itself"),
        *((Shifting, collator, "in place") for collator in collators),
    ]:
        with pytest.raises(bsam.BsamError, match=word):
            hf.trainer(model, hf.arguments(tmp_path), cls, **arguments).train()


@pytest.mark.parametrize("case", ["trainer", "trainer-accumulate"])
def test_two_processes(hf, hf_ranks, case):
    """Equality with plain DDP training in the same processes, and without accumulation with one process."""
    ranks = [rank[case] for rank in hf_ranks]
    for rank in ranks:
        torch.testing.assert_close(rank["weights"], rank["plain"], **CLOSE)
        torch.testing.assert_close(rank["weights"], ranks[0]["weights"], rtol=0, atol=0)
    means = [sum(both) / 2 for both in zip(*(rank["losses"] for rank in ranks), strict=True)]
    assert ranks[0]["logged"] == pytest.approx(means, abs=1e-6)
    if case == "trainer":
        twin = hf.network()
        hf.train_plainly(twin, hf.sam(twin), hf.batches(4, hf.data(12)), max_norm=0.3)
        torch.testing.assert_close(ranks[0]["weights"], hf.weights(twin), **CLOSE)


def test_the_example(hf, example):
    _, (run, loss), out = example("transformers_trainer")
    assert run.optimizer.optimizer.t == 3 * 10
    assert loss < 1.2 < 0.5 * run.state.log_history[0]["loss"]
    assert out.endswith(f"loss on the test sentences {loss:.3f}\n")


def test_flatness_of_a_network(hf):
    """With batches of inputs by name and targets, as a dict and as BatchEncoding."""
    from transformers import BatchEncoding

    model = hf.network().eval()
    words = hf.batches(4)[0]["input_ids"]
    inputs = {"input_ids": words, "attention_mask": torch.ones_like(words)}

    def loss_fn(out, y):
        return F.cross_entropy(out.logits[:, :-1].mT, y[:, 1:])

    with torch.no_grad():
        expected = float(loss_fn(model(**inputs), words))
    for batch in (inputs, BatchEncoding(inputs)):
        assert sharpness(model, loss_fn, [(batch, words)]).loss == pytest.approx(expected, rel=1e-9)
    labels = [(inputs | {"labels": words}, words)]
    assert sharpness(model, lambda out, _: out.loss, labels).loss == pytest.approx(expected, rel=1e-6)

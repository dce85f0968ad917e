"""Training in the loops of frameworks in half precision on the device, against plain bsam training there."""

from __future__ import annotations

import contextlib
import copy
import importlib
import logging
import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import DataLoader

import bsam
from bsam.models.timm_import import _import_torchvision
from helpers import distance
from lightning_training import BSAM, EPOCHS, Batches, compare, network, plain, sgd

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]

DEVICE = "cuda"
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
OVERFLOW = {"init_scale": 2.0**40, "backoff_factor": 2.0**-26}  # the first step is skipped; then 2**14 suits float16
HALVES = [("fp16", {}), ("fp16", OVERFLOW), ("bf16", {})]
IDS = ["fp16", "fp16 with an overflow", "bf16"]


@pytest.fixture(autouse=True)
def _isolated():
    """Kernels that repeat their results, and no state of Accelerate from an earlier test."""
    torch.backends.cudnn.deterministic = True
    with sdpa_kernel(SDPBackend.MATH):
        yield
    torch.backends.cudnn.deterministic = False
    if state := sys.modules.get("accelerate.state"):
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()


def import_frameworks(*names):
    """Import what a test needs when it needs it, and return the last one."""
    with contextlib.suppress(ModuleNotFoundError):
        _import_torchvision()
    return [pytest.importorskip(name) for name in names][-1]


@pytest.fixture(scope="module")
def hf():
    import_frameworks("accelerate", "transformers")
    return importlib.import_module("integrations.hugging_face")


@pytest.fixture(scope="module")
def lightning():
    framework = import_frameworks("lightning.pytorch", "lightning")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    return framework


def scaler_of(half, settings):
    return torch.amp.GradScaler(DEVICE, enabled=half == "fp16", **settings)


def on_device(data, dtype=torch.float32):
    data.all = [(x.to(DEVICE, dtype), y.to(DEVICE)) for x, y in data.all]
    return data


def clip(params):
    nn.utils.clip_grad_norm_(params, 0.3)


def precision(mixed_precision, half, settings):
    """The options of a Trainer or Fabric: by name, or as a plugin with a scaler of ours."""
    name = {"fp16": "16-mixed", "bf16": "bf16-mixed"}[half]
    return {"plugins": [mixed_precision(name, DEVICE, scaler_of(half, settings))]} if settings else {"precision": name}


def check_skipped(optimizer, other, steps, settings):
    """The number of steps taken is that of the plain loop; with an overflow it is smaller than that of all steps."""
    assert optimizer.t == other.t
    assert optimizer.t < steps if settings else optimizer.t > 0


@pytest.mark.parametrize(("half", "settings"), HALVES, ids=IDS)
@pytest.mark.parametrize("manual", [False, True], ids=["automatic", "manual"])
def test_lightning(lightning, half, settings, manual):
    from lightning.pytorch.plugins import MixedPrecision

    from bsam.integrations.lightning import SharpnessAwareMixin

    class Net(SharpnessAwareMixin, lightning.LightningModule):
        def __init__(self, net):
            super().__init__()
            self.net, self.automatic_optimization = net, not manual

        def training_step(self, batch, batch_idx):
            if not manual:
                return F.cross_entropy(self.net(batch[0]), batch[1])

            def closure():
                loss = F.cross_entropy(self.net(batch[0]), batch[1])
                self.manual_backward(loss)
                return loss

            optimizer = self.optimizers()
            optimizer.zero_grad()
            loss = optimizer.backward(closure, getattr(self.trainer.precision_plugin, "scaler", None))
            optimizer.step()
            return loss

        def configure_optimizers(self):
            return BSAM(sgd(self.parameters()), self)

    net = network(torch.float32)
    module = Net(copy.deepcopy(net))
    options = precision(MixedPrecision, half, settings)
    if not manual:
        options |= {"gradient_clip_val": 0.3, "accumulate_grad_batches": 2}
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    trainer = lightning.Trainer(accelerator=DEVICE, devices=1, max_epochs=EPOCHS, **quiet, **options)
    torch.manual_seed(0)
    trainer.fit(module, Batches(torch.float32))
    net, scaler = net.to(DEVICE), scaler_of(half, settings)
    way = {} if manual else {"accumulate": 2, "clip": clip}
    autocast = partial(torch.autocast, DEVICE, dtype=DTYPES[half])
    _, other = plain(net, on_device(Batches(torch.float32)), scaler=scaler, autocast=autocast, **way)
    compare(module.net.cpu(), net.cpu(), atol=1e-6)
    check_skipped(trainer.optimizers[0], other, 10 if manual else 6, settings)
    if half == "fp16":
        assert trainer.precision_plugin.scaler.get_scale() == scaler.get_scale()


@pytest.mark.parametrize(("half", "settings"), HALVES, ids=IDS)
def test_fabric(lightning, half, settings):
    """Fabric casts the inputs of the model to half precision and its outputs back."""
    from lightning.fabric.plugins import MixedPrecision

    fabric = lightning.Fabric(accelerator=DEVICE, devices=1, **precision(MixedPrecision, half, settings))
    net, method = network(torch.float32), partial(bsam.FriendlySAM, rho=0.2)  # remembers a gradient
    ours = copy.deepcopy(net)
    model, optimizer = fabric.setup(ours, method(sgd(ours.parameters()), ours))
    torch.manual_seed(0)
    for x, y in [*on_device(Batches(torch.float32))] * EPOCHS:

        def closure(x=x, y=y):
            loss = F.cross_entropy(model(x), y)
            fabric.backward(loss)
            return loss

        optimizer.zero_grad()
        optimizer.backward(closure, scaler=getattr(fabric.strategy.precision, "scaler", None))
        fabric.clip_gradients(model, optimizer, max_norm=0.3, error_if_nonfinite=False)
        optimizer.step()
    net, autocast = net.to(DEVICE), partial(torch.autocast, DEVICE, dtype=DTYPES[half])
    with net.register_forward_hook(lambda module, args, output: output.float()):
        inputs = on_device(Batches(torch.float32), DTYPES[half])
        _, other = plain(net, inputs, method=method, scaler=scaler_of(half, settings), clip=clip, autocast=autocast)
    compare(ours.cpu(), net.cpu(), atol=1e-6)
    check_skipped(optimizer, other, 10, settings)


def train_plainly(hf, half, settings, samples, loss_of):
    """Windows of two micro-batches, the last one of one. Returns the network and the optimizer."""
    model, scaler = hf.network(dtype=torch.float32).to(DEVICE), scaler_of(half, settings)
    optimizer = BSAM(torch.optim.SGD(model.parameters(), lr=hf.LR), model)
    batches = [{name: t.to(DEVICE) for name, t in batch.items()} for batch in hf.batches(2, samples)]
    for i in range(0, len(batches), 2):
        items = sum((batch["labels"][:, 1:] != -100).sum() for batch in batches[i : i + 2])
        for batch in batches[i : i + 2]:
            optimizer.backward(partial(loss_of, model, batch, items), scaler)
        scaler.unscale_(optimizer)
        clip(model.parameters())
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return model, optimizer


def check_weights(hf, model, twin):
    found, expected, start = ([w.cpu() for w in hf.weights(m)] for m in (model, twin, hf.network(dtype=torch.float32)))
    assert distance(found, expected) < 1e-6
    assert distance(expected, start) > 0.01


@pytest.mark.parametrize(("half", "settings"), HALVES, ids=IDS)
def test_accelerate(hf, half, settings):
    from accelerate.utils import GradScalerKwargs

    def loss_of(model, batch, _):
        with torch.autocast(DEVICE, dtype=DTYPES[half]):
            logits = model(input_ids=batch["input_ids"]).logits
        return hf.mean_loss(lambda **_: SimpleNamespace(logits=logits.float()), batch) / 2

    own = {"kwargs_handlers": [GradScalerKwargs(**settings)]} if settings else {}
    accelerator = hf.Accelerator(cpu=DEVICE == "cpu", mixed_precision=half, gradient_accumulation_steps=2, **own)
    model = hf.network(dtype=torch.float32)
    optimizer = BSAM(torch.optim.SGD(model.parameters(), lr=hf.LR), model)
    hf.accelerated(accelerator, model, optimizer, 0.3)
    twin, other = train_plainly(hf, half, settings, hf.data(), loss_of)
    check_weights(hf, model, twin)
    check_skipped(optimizer, other, 4, settings)


@pytest.mark.parametrize(("half", "settings"), HALVES, ids=IDS)
@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "gradient checkpointing"])
def test_transformers(hf, half, settings, checkpointing, tmp_path):
    """Three steps that predict 16, 16 and 8 words: a division by their number is exact however it is done."""

    class Trainer(hf.SharpnessAwareTrainer):
        is_distributed_loading_by_transformers = False  # an older Trainer does not have it

        def get_train_dataloader(self):  # in order, whatever the version calls that
            return self.accelerator.prepare(DataLoader(samples, batch_size=2))

    def loss_of(model, batch, items):
        with torch.autocast(DEVICE, dtype=DTYPES[half]):
            return model(**batch, num_items_in_batch=items).loss

    words, predicted = [sample["input_ids"] for sample in hf.data(10)], [5, 5, 3, 3, 5, 5, 3, 3, 4, 4]
    labels = [row.masked_fill(torch.arange(6) < 6 - n, -100) for row, n in zip(words, predicted, strict=True)]
    samples = [{"input_ids": row, "labels": label} for row, label in zip(words, labels, strict=True)]
    own = {"gradient_accumulation_steps": 2, "max_grad_norm": 0.3, "gradient_checkpointing": checkpointing}
    own |= {"optim": "sgd", "learning_rate": hf.LR, "lr_scheduler_type": "constant", "num_train_epochs": 1}
    quiet = {"report_to": "none", "disable_tqdm": True, "save_strategy": "no", "use_cpu": DEVICE == "cpu"}
    args = hf.TrainingArguments(str(tmp_path), per_device_train_batch_size=2, **{half: True}, **own, **quiet)
    model = hf.network(dtype=torch.float32)
    run = Trainer(model, args, train_dataset=samples, method=bsam.BSAM, method_kwargs=BSAM.keywords)
    if settings:
        run.accelerator.scaler = scaler_of(half, settings)
    run.train()
    twin, other = train_plainly(hf, half, settings, samples, loss_of)
    check_weights(hf, model, twin)
    check_skipped(getattr(run.optimizer, "optimizer", run.optimizer), other, 3, settings)

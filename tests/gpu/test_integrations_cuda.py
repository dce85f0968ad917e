"""Training in half precision in the loops of frameworks, against a plain training loop on the device."""

from __future__ import annotations

import contextlib
import copy
import importlib
import math
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
from bsam.common.timm_import import import_torchvision
from bsam.integrations.lightning import SharpnessAwareMixin
from helpers import distance
from lightning_training import BSAM, EPOCHS, Batches, compare, network, plain, sgd

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]

DEVICE = "cuda"
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
OVERFLOW = {"init_scale": 2.0**40, "backoff_factor": 2.0**-26}  # the first step is skipped; then the scale is 2**14
CASES = {"fp16": ("fp16", {}), "fp16 with an overflow": ("fp16", OVERFLOW), "bf16": ("bf16", {})}
clip = partial(nn.utils.clip_grad_norm_, max_norm=0.3)
each_half = pytest.mark.parametrize(("half", "settings"), CASES.values(), ids=CASES)


@pytest.fixture(autouse=True)
def _isolated():
    """Use deterministic kernels, and clear Accelerate's state from earlier tests."""
    torch.backends.cudnn.deterministic = True
    with sdpa_kernel(SDPBackend.MATH):
        yield
    torch.backends.cudnn.deterministic = False
    if state := sys.modules.get("accelerate.state"):
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()


@pytest.fixture(scope="module")
def hf():
    import_frameworks("accelerate", "transformers")
    return importlib.import_module("integrations.hugging_face")


@pytest.fixture(scope="module")
def lightning():
    return import_frameworks("lightning.pytorch", "lightning")


def import_frameworks(*names):
    with contextlib.suppress(ModuleNotFoundError):
        import_torchvision()
    return [importlib.import_module(name) for name in names][-1]


def device_batches(dtype=torch.float32):
    return [(x.to(DEVICE, dtype), y.to(DEVICE)) for x, y in Batches(torch.float32)]


def precision(package, half, settings):
    """Return the precision option of a Trainer or Fabric: a name, or a plugin with the given scaler."""
    if settings:
        return {"plugins": [package.plugins.MixedPrecision("16-mixed", DEVICE, scaler_of(half, settings))]}
    return {"precision": {"fp16": "16-mixed", "bf16": "bf16-mixed"}[half]}


def scaler_of(half, settings):
    return torch.amp.GradScaler(DEVICE, enabled=half == "fp16", **settings)


@each_half
@pytest.mark.parametrize("manual", [False, True], ids=["automatic", "manual"])
def test_lightning(lightning, half, settings, manual):
    class Net(SharpnessAwareMixin, lightning.LightningModule):
        def __init__(self, net):
            super().__init__()
            self.net, self.automatic_optimization = net, not manual

        def loss(self, x, y):
            loss = F.cross_entropy(self.net(x), y)
            if manual:
                self.manual_backward(loss)
            return loss

        def training_step(self, batch, batch_idx):
            if not manual:
                return self.loss(*batch)
            optimizer = self.optimizers()
            optimizer.zero_grad()
            optimizer.backward(partial(self.loss, *batch), self.trainer.precision_plugin.scaler)
            return optimizer.step()

        def configure_optimizers(self):
            return BSAM(sgd(self.parameters()), self)

    net, scaler = network(torch.float32), scaler_of(half, settings)
    module, options = Net(copy.deepcopy(net)), precision(lightning.pytorch, half, settings)
    options |= dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    options |= {} if manual else {"gradient_clip_val": 0.3, "accumulate_grad_batches": 2}
    trainer = lightning.Trainer(accelerator=DEVICE, devices=1, max_epochs=EPOCHS, **options)
    torch.manual_seed(0)
    trainer.fit(module, Batches(torch.float32))
    more, autocast = {} if manual else {"accumulate": 2, "clip": clip}, partial(torch.autocast, DEVICE, DTYPES[half])
    _, other = plain(net.to(DEVICE), device_batches(), scaler=scaler, autocast=autocast, **more)
    compare(module.net.cpu(), net.cpu(), atol=1e-6)
    assert 0 < trainer.optimizers[0].t == other.t < (10 if manual else 6) + (not settings)  # fewer after an overflow
    assert half == "bf16" or trainer.precision_plugin.scaler.get_scale() == scaler.get_scale()


@each_half
def test_fabric(lightning, half, settings):
    """Fabric casts the inputs of the model to half precision and its outputs back."""
    fabric = lightning.Fabric(accelerator=DEVICE, devices=1, **precision(lightning.fabric, half, settings))
    net, method = network(torch.float32), partial(bsam.FriendlySAM, rho=0.2)  # keeps a gradient between steps
    ours = copy.deepcopy(net)
    model, optimizer = fabric.setup(ours, method(sgd(ours.parameters()), ours))
    torch.manual_seed(0)
    for x, y in device_batches() * EPOCHS:

        def closure():
            loss = F.cross_entropy(model(x), y)
            fabric.backward(loss)
            return loss

        optimizer.zero_grad()
        optimizer.backward(closure, scaler=fabric.strategy.precision.scaler)
        fabric.clip_gradients(model, optimizer, max_norm=0.3, error_if_nonfinite=False)
        optimizer.step()
    more = {"scaler": scaler_of(half, settings), "autocast": partial(torch.autocast, DEVICE, dtype=DTYPES[half])}
    with net.register_forward_hook(lambda module, args, output: output.float()):
        _, other = plain(net.to(DEVICE), device_batches(DTYPES[half]), method=method, clip=clip, **more)
    compare(ours.cpu(), net.cpu(), atol=1e-6)
    assert 0 < optimizer.t == other.t < 10 + (not settings)


def check_plain(hf, model, optimizer, samples, loss_of, half, settings):
    """Train in a plain loop with steps of two micro-batches and a last step of one, at a constant learning rate."""
    start = hf.network(dtype=torch.float32).to(DEVICE)
    twin, batches = copy.deepcopy(start), [{k: t.to(DEVICE) for k, t in b.items()} for b in hf.batches(2, samples)]
    other = BSAM(torch.optim.SGD(twin.parameters(), lr=hf.LR), twin)
    more = {"accumulate": 2, "max_norm": 1.0, "total": math.inf, "scaler": scaler_of(half, settings)}
    hf.train_plainly(twin, other, batches, loss_of, **more)
    assert distance(hf.weights(model), hf.weights(twin)) < 1e-6
    assert distance(hf.weights(twin), hf.weights(start)) > 0.01
    assert 0 < optimizer.t == other.t < (len(batches) + 1) // 2 + (not settings)


@each_half
def test_accelerate(hf, half, settings):
    def loss_of(model, batch, _):
        with torch.autocast(DEVICE, dtype=DTYPES[half]):
            logits = model(input_ids=batch["input_ids"]).logits
        return hf.mean_loss(lambda **_: SimpleNamespace(logits=logits.float()), batch) / 2

    accelerator = hf.Accelerator(cpu=DEVICE == "cpu", mixed_precision=half, gradient_accumulation_steps=2)
    if settings:
        accelerator.scaler = scaler_of(half, settings)
    model = hf.network(dtype=torch.float32)
    optimizer = BSAM(torch.optim.SGD(model.parameters(), lr=hf.LR), model)
    hf.accelerated(accelerator, model, optimizer, 1.0)  # two of four steps are clipped
    check_plain(hf, model, optimizer, hf.data(), loss_of, half, settings)


@each_half
@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "gradient checkpointing"])
def test_transformers(hf, half, settings, checkpointing, tmp_path):
    """Three steps predict 16, 16 and 8 words: any order of dividing by these numbers is exact."""

    class Trainer(hf.SharpnessAwareTrainer):
        is_distributed_loading_by_transformers = False  # missing in older versions

        def get_train_dataloader(self):  # in order, with every version
            return self.accelerator.prepare(DataLoader(samples, batch_size=2))

    def loss_of(model, batch, items):
        with torch.autocast(DEVICE, dtype=DTYPES[half]):
            return model(**batch, num_items_in_batch=items).loss

    samples = [hf.data(16)[i] for i in (1, 5, 3, 7, 9, 13, 11, 15, 2, 6)]
    more = {"gradient_accumulation_steps": 2, "max_grad_norm": 1.0, "gradient_checkpointing": checkpointing}
    more |= {"per_device_train_batch_size": 2, "num_train_epochs": 1, "lr_scheduler_type": "constant", half: True}
    more |= {"report_to": "none", "disable_tqdm": True, "save_strategy": "no", "use_cpu": DEVICE == "cpu"}
    model = hf.network(dtype=torch.float32).to(DEVICE)
    base = torch.optim.SGD(model.parameters(), lr=hf.LR)  # with one group: norms round differently with two
    method = {"optimizers": (base, None), "method": "bsam", "method_kwargs": BSAM.keywords}
    run = Trainer(model, hf.TrainingArguments(str(tmp_path), **more), train_dataset=samples, **method)
    if settings:
        run.accelerator.scaler = scaler_of(half, settings)
    run.train()
    check_plain(hf, model, getattr(run.optimizer, "optimizer", run.optimizer), samples, loss_of, half, settings)

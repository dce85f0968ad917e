"""Training on the device: captured steps equal plain steps, also with interruptions and with a probe."""

from __future__ import annotations

import gc
import warnings
from itertools import count

import pytest
import torch
from torch import nn

from bsam.core.optimizer import SharpnessAware
from bsam.lab.common.termination import Terminated
from bsam.lab.config import BASES, CAPTURABLE, Run
from bsam.lab.tasks import images
from bsam.lab.tasks.classification import Classification
from bsam.lab.training import Machine, RunCallbacks, fit
from bsam.lab.training.graphs import WARM_UP_STEPS, CapturedSteps
from bsam.lab.training.machine import DistributedContext, side_stream
from bsam.lab.training.run_dir import CHECKPOINT, RunDir
from bsam.lab.training.trainer import Trainer
from bsam.methods import METHODS
from captured_runs import ARGUMENTS, FLOOR, RUNS, SAME, kinds_of_steps, patterns

pytestmark = pytest.mark.gpu

# Relative to the distance from the start: fused steps round differently, and twenty steps amplify that. Changing the
# learning rate by 5 % makes ten times that difference.
TOLERANCE = 5e-3
# For methods that amplify rounding more: on a CPU, changing the weights by 1e-6 ends 1e-3 apart. Adam divides by
# numbers close to zero; BSAM with `every` ends up to 6e-3 apart, since cuDNN does not choose the same kernels twice.
WIDE_TOLERANCE = 2e-2
WIDE = ("gam", "asam", "msam")


@pytest.fixture(autouse=True)
def _deterministic():
    torch.backends.cudnn.deterministic = True
    yield
    torch.backends.cudnn.deterministic = False


@pytest.fixture(autouse=True)
def _data(monkeypatch):
    monkeypatch.setattr(images, "_load_arrays", lambda name, folder=None: patterns(640))


def device_of(name="cuda"):
    return torch.device(name)


def start(run, device="cuda", state=None, task=Classification):
    trainer = Trainer(run, task(run, device_of(device)), DistributedContext(device_of(device)))
    if state is not None:
        trainer.load_state_dict(state)
    return trainer


def train(run, device="cuda", epochs=(0, 1), state=None, task=Classification):
    """Return the trainer after these epochs, with their metrics and readings."""
    with side_stream(device_of(device)):
        trainer = start(run, device, state, task)
        before, metrics = len(trainer.readings), []
        for number in epochs:
            metrics.append({**trainer.train_epoch(number), **trainer.evaluate()})
        trainer.network.train()
    return trainer, metrics, trainer.readings[before:]


def weights(trainer):
    return torch.cat(
        [t.detach().double().flatten().cpu() for t in trainer.network.state_dict().values() if t.is_floating_point()]
    )


def plain(run):
    return Run.of(**{**run.settings(), "capture": False})


def apart(a, b):
    """Return the distance between two results, relative to the distance of the second from its start."""
    beginning = weights(start(b.run, b.context.device.type))
    return float((weights(a) - weights(b)).norm() / (weights(b) - beginning).norm())


def tolerance(run):
    is_wide = run.base != "sgd" or run.method in WIDE or "every" in run.arguments
    return WIDE_TOLERANCE if is_wide else TOLERANCE


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_captured_steps_are_plain_steps(run):
    captured, metrics, _ = train(run)
    reference, expected, _ = train(plain(run))
    assert type(captured.take_step) is CapturedSteps
    assert len(captured.take_step._graphs) == kinds_of_steps(run)
    assert not isinstance(reference.take_step, CapturedSteps)
    assert apart(captured, reference) < tolerance(run)
    for captured_metrics, wanted in zip(metrics, expected, strict=True):
        assert list(captured_metrics) == list(wanted)
        assert captured_metrics["train_loss"] == pytest.approx(wanted["train_loss"], rel=2e-3)
        assert captured_metrics["lr"] == wanted["lr"]
        assert captured_metrics.get("rho_min") == pytest.approx(wanted.get("rho_min"), rel=1e-5)
        assert captured_metrics["test_accuracy"] == pytest.approx(wanted["test_accuracy"], abs=0.02)
    counts = [t for name, t in captured.network.state_dict().items() if name.endswith("num_batches_tracked")]
    assert counts
    assert all(int(t) == 20 for t in counts)  # once per step, for any number of passes
    if isinstance(captured.optimizer, SharpnessAware):
        assert captured.optimizer.t == reference.optimizer.t == 20
    (lr,) = {float(group["lr"]) for group in captured.optimizer.param_groups}
    assert lr == pytest.approx(metrics[-1]["lr"], rel=1e-6)


def test_the_tolerance_detects_a_small_difference():
    """It would detect a graph that keeps an old learning rate or radius."""
    first, _, _ = train(RUNS["bsam with a floor"])
    for other in ({"lr": 0.05 * 1.05}, {"schedule": "constant"}, {"arguments": {**FLOOR, "rho_min_floor": 0.2}}):
        second, _, _ = train(Run.of(**{**RUNS["bsam with a floor"].settings(), **other}))
        assert apart(second, first) > 2 * TOLERANCE, other


def test_the_same_run_gives_the_same_numbers():
    a, first, _ = train(RUNS["bsam"])
    b, second, _ = train(RUNS["bsam"])
    assert apart(a, b) < TOLERANCE
    assert [row["train_loss"] for row in first] == pytest.approx([row["train_loss"] for row in second], rel=1e-3)


def through_a_file(trainer, folder, device="cuda"):
    torch.save(trainer.state_dict(), folder / "state")
    return torch.load(folder / "state", device_of(device), weights_only=True)


@pytest.mark.parametrize("name", ["sgd", "sam", "bsam with a floor", "bsam-2", "msam", "adamw", "bsam on adamw"])
def test_a_captured_training_continues_after_an_interruption(name, tmp_path):
    run = RUNS[name]
    whole, expected, _ = train(run)
    first, _, _ = train(run, epochs=[0])
    second, metrics, _ = train(run, epochs=[1], state=through_a_file(first, tmp_path))
    assert type(second.take_step) is CapturedSteps
    assert second.take_step._graphs
    assert apart(second, whole) < tolerance(run)
    assert metrics[-1]["train_loss"] == pytest.approx(expected[-1]["train_loss"], rel=2e-3)
    if isinstance(second.optimizer, SharpnessAware):
        assert second.optimizer.t == 20


@pytest.mark.parametrize("name", ["sgd", "bsam with a floor"])
def test_a_captured_training_continues_after_a_signal_in_an_epoch(name, tmp_path):
    run, looks = RUNS[name], count(1)
    whole, expected, _ = train(run)
    with side_stream(device_of()):
        first = start(run)
        with pytest.raises(Terminated):
            first.train_epoch(0, lambda: int(next(looks) == 7))
    assert first.take_step._graphs
    assert first.begun is not None
    assert first.begun["steps"] == 7
    second, metrics, _ = train(run, state=through_a_file(first, tmp_path))
    assert apart(second, whole) < tolerance(run)
    for ours, theirs in zip(metrics, expected, strict=True):
        assert ours["train_loss"] == pytest.approx(theirs["train_loss"], rel=2e-3)


@pytest.mark.parametrize("name", ["sgd", "bsam with a floor", "bsam on adamw"])
@pytest.mark.parametrize("elsewhere", ["cpu", "plain"])
def test_a_checkpoint_of_another_machine_continues_in_a_graph(name, elsewhere, tmp_path):
    """The learning rate was a plain number there: a graph would keep the value of its first step."""
    run = RUNS[name]
    whole, _, _ = train(run)
    first, _, _ = train(run, "cpu", epochs=[0]) if elsewhere == "cpu" else train(plain(run), epochs=[0])
    second, metrics, _ = train(run, epochs=[1], state=through_a_file(first, tmp_path))
    (group,) = second.optimizer.param_groups
    assert isinstance(group["lr"], torch.Tensor)
    assert group["lr"].is_cuda
    assert float(group["lr"]) == pytest.approx(metrics[-1]["lr"], rel=1e-6)
    assert apart(second, whole) < 4 * tolerance(run)  # convolutions on a CPU round differently, and not to TF32


def test_a_checkpoint_of_a_graph_continues_on_a_cpu(tmp_path):
    run = RUNS["bsam with a floor"]
    first, _, _ = train(run, epochs=[0])
    second, _, _ = train(run, "cpu", epochs=[1], state=through_a_file(first, tmp_path, "cpu"))
    whole, _, _ = train(run, "cpu")
    assert apart(second, whole) < 4 * TOLERANCE
    assert isinstance(second.optimizer.param_groups[0]["lr"], float)


@pytest.mark.parametrize("checkpoint", [0, 1])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_epochs_after_the_last_checkpoint_are_repeated(precision, checkpoint, tmp_path):
    run = Run.of(**{**RUNS["bsam with a floor"].settings(), "epochs": 4, "precision": precision})
    started = []

    def stopping(after, machine):
        def on_epoch(done, metrics):
            if done == after:
                raise InterruptedError

        with pytest.raises(InterruptedError):
            fit(run, tmp_path / "stopped", machine, callbacks=RunCallbacks(on_epoch=on_epoch))

    whole = fit(run, tmp_path / "whole", Machine("cuda"))
    if checkpoint:
        stopping(checkpoint, Machine("cuda", checkpoint_every=0))
    stopping(3, Machine("cuda"))
    assert len(RunDir(tmp_path / "stopped").metrics()) == 3
    assert (tmp_path / "stopped" / CHECKPOINT).exists() == bool(checkpoint)
    result = fit(
        run,
        tmp_path / "stopped",
        Machine("cuda"),
        callbacks=RunCallbacks(at_start=lambda trainer, done: started.append(done)),
    )
    assert started == [checkpoint]
    for ours, theirs in zip(result.epochs, whole.epochs, strict=True):
        assert ours.metrics["train_loss"] == pytest.approx(theirs.metrics["train_loss"], rel=2e-2)
        assert ours.metrics["lr"] == theirs.metrics["lr"]
    state = torch.load(tmp_path / "stopped" / CHECKPOINT, device_of(), weights_only=True)
    assert [epoch["epoch"] for epoch in state["epochs"]] == [1, 2, 3, 4]
    saved = RunDir(tmp_path / "stopped").weights()
    assert all(torch.equal(state["network"][name].cpu(), tensor) for name, tensor in saved.items())


def test_an_evaluation_waits_for_the_device_only_at_its_end():
    """Once: the losses and the numbers of correct predictions of all batches are read together."""
    trainer, _, _ = train(RUNS["sgd"], epochs=[0])
    trainer.task._eval_batch_size = 50  # ten batches
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            trainer.evaluate()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert sum("called a synchronizing" in str(warning.message) for warning in caught) == 1


class SumOfBatch:
    """A step whose graph contains one kernel, and during which Python collects its garbage."""

    optimizer = None

    def kind(self):
        return 0

    def step(self, x):
        gc.collect()
        return x.sum()


def test_a_graph_of_an_earlier_run_is_not_destroyed_during_a_capture():
    steps = CapturedSteps(SumOfBatch())
    with side_stream(device_of()):
        x = torch.ones(3, device="cuda")
        for _ in range(WARM_UP_STEPS):
            steps(x)
        earlier = torch.cuda.CUDAGraph()
        with torch.cuda.graph(earlier, stream=torch.cuda.current_stream()):
            _ = x + 1
        gc.disable()  # only the step collects
        try:
            cycle = [earlier]
            cycle.append(cycle)
            del cycle, earlier
            assert steps(2 * x) == 6
        finally:
            gc.enable()
        assert steps(3 * x) == 9


@pytest.mark.parametrize("every", [1, 3, 7])
@pytest.mark.parametrize("name", ["sam", "bsam with a floor"])
def test_the_probe_reads_the_same_as_in_plain_steps(name, every):
    run = Run.of(**{**RUNS[name].settings(), "probe": every})
    captured, _, readings = train(run)
    reference, _, expected = train(plain(run))
    assert (
        [reading["step"] for reading in readings]
        == [reading["step"] for reading in expected]
        == list(range(0, 20, every))
    )
    for measured, wanted in zip(readings, expected, strict=True):
        assert measured["extra_passes"] == wanted["extra_passes"]
        assert measured["loss"] == pytest.approx(wanted["loss"], rel=5e-3)
        assert measured["rho_min"] == pytest.approx(wanted["rho_min"], rel=1e-5)
        assert measured["bilateral"] == pytest.approx(wanted["bilateral"], rel=5e-2, abs=1e-3)
    assert apart(captured, reference) < TOLERANCE
    assert apart(captured, train(RUNS[name])[0]) < TOLERANCE  # with or without the probe


@pytest.mark.filterwarnings("ignore")  # of inductor
@pytest.mark.parametrize("name", ["sgd", "bsam with a floor"])
@pytest.mark.parametrize("capture", [True, False])
def test_a_compiled_network_trains_the_same(name, capture):
    run = Run.of(**{**RUNS[name].settings(), "compile": True, "capture": capture})
    compiled, metrics, _ = train(run)
    reference, expected, _ = train(plain(RUNS[name]))
    assert apart(compiled, reference) < 4 * TOLERANCE  # fused kernels sum in another order
    assert metrics[-1]["test_accuracy"] == pytest.approx(expected[-1]["test_accuracy"], abs=0.02)


@pytest.mark.parametrize("name", ["sgd", "sam", "bsam", "bsam-2", "msam", "bsam on adamw"])
def test_bfloat16_learns_in_a_graph_as_without(name):
    run = Run.of(**{**RUNS[name].settings(), "precision": "bf16", "epochs": 4})
    captured, metrics, _ = train(run, epochs=range(4))
    _, expected, _ = train(plain(run), epochs=range(4))
    assert captured.take_step._graphs
    assert metrics[-1]["test_accuracy"] > 0.8
    assert metrics[-1]["test_accuracy"] == pytest.approx(expected[-1]["test_accuracy"], abs=0.05)
    assert all(p.dtype == torch.float32 for p in captured.network.parameters())


OPTIONS = {
    "clip": {"clip_norm": 0.2},
    "accumulate": {"accumulate": 4},
    "all": {"clip_norm": 0.2, "accumulate": 2, "ema": 0.8},
}


@pytest.mark.parametrize("name", ["sgd", "sam", "bsam with a floor"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_captured_steps_clip_and_accumulate_as_plain_steps(name, options):
    run = Run.of(**{**RUNS[name].settings(), **options})
    captured, metrics, _ = train(run)
    reference, expected, _ = train(plain(run))
    assert captured.take_step._graphs
    assert apart(captured, reference) < tolerance(run)
    assert metrics[-1]["train_loss"] == pytest.approx(expected[-1]["train_loss"], rel=2e-3)
    assert apart(captured, train(RUNS[name])[0]) > 2 * tolerance(run)  # the options have an effect
    if run.ema is not None:
        ours, theirs = (
            torch.cat([t.double().flatten() for t in trainer.result_network.parameters()]).detach()
            for trainer in (captured, reference)
        )
        last = torch.cat([t.double().flatten() for t in captured.network.parameters()]).detach()
        assert (ours - theirs).norm() < 0.2 * (ours - last).norm()


@pytest.mark.parametrize("name", ["sgd", "sam", "bsam with a floor", "bsam on adamw", "saf"])
def test_fp16_is_not_captured_and_learns(name, tmp_path):
    settings = RUNS[name].settings() if name in RUNS else Run.of(name, ARGUMENTS[name], **SAME).settings()
    run = Run.of(**{**settings, "precision": "fp16", "clip_norm": 5.0, "accumulate": 2, "epochs": 4})
    trainer, metrics, _ = train(run, epochs=range(4))
    assert not isinstance(trainer.take_step, CapturedSteps)
    assert metrics[-1]["test_accuracy"] > 0.8
    state = through_a_file(trainer, tmp_path)
    assert state["scaler"]["scale"] == trainer.train_step.scaler.get_scale()
    again, _, _ = train(run, epochs=[], state=state)
    assert again.train_step.scaler.state_dict() == trainer.train_step.scaler.state_dict()


@pytest.mark.parametrize("base", [base for base in BASES if base not in CAPTURABLE])
def test_other_base_optimizers_are_not_captured_and_learn(base):
    lr = {"adadelta": 1.0, "adafactor": 0.03, "adagrad": 0.02, "asgd": 0.05}.get(base, 3e-3)
    run = Run.of("base" if base == "adadelta" else "sam", base=base, **{**SAME, "lr": lr, "epochs": 4})
    trainer, metrics, _ = train(run, epochs=range(4))
    assert not isinstance(trainer.take_step, CapturedSteps)
    assert metrics[-1]["test_accuracy"] > 0.5
    assert metrics[-1]["train_loss"] < metrics[0]["train_loss"]


@pytest.mark.parametrize("method", [name for name, method in METHODS.items() if not method.capturable])
def test_methods_whose_steps_differ_are_not_captured_and_learn(method):
    trainer, metrics, _ = train(Run.of(method, ARGUMENTS.get(method, {}), **{**SAME, "epochs": 4}), epochs=range(4))
    assert not isinstance(trainer.take_step, CapturedSteps)
    assert metrics[-1]["test_accuracy"] > 0.8


class Noted(nn.Module):
    """Keeps the mask of the last pass."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mask", torch.zeros(64))

    def forward(self, x):
        if self.training:
            self.mask.copy_(nn.functional.dropout(torch.ones_like(self.mask), 0.5))
        return x


class Dropping(Classification):
    """Records the mask of each step before the next one."""

    def network(self):
        self.noted, self.masks = Noted().to(self.device), []
        return nn.Sequential(self.noted, super().network())

    def _batch(self, x, index, on_host):
        self.masks.append(tuple(self.noted.mask.tolist()))
        return super()._batch(x, index, on_host)


def test_a_graph_draws_random_numbers_by_seed_epoch_and_step(tmp_path):
    run = RUNS["sgd"]
    whole, _, _ = train(run, task=Dropping)
    masks = whole.task.masks[1:]
    assert len(set(masks)) == len(masks) == 19
    again, _, _ = train(run, epochs=[1], task=Dropping)
    assert again.task.masks[1:] == masks[10:]  # of the second epoch, independent of the steps before it
    other, _, _ = train(Run.of(**{**run.settings(), "seed": 5}), task=Dropping)
    assert not set(other.task.masks[1:]) & set(masks)


def test_fit_trains_on_the_device_and_restores_the_callers_state():
    before = (
        torch.cuda.get_rng_state(),
        torch.random.get_rng_state(),
        torch.backends.cudnn.benchmark,
        torch.cuda.current_stream(),
    )
    seen = []
    result = fit(
        RUNS["bsam"],
        callbacks=RunCallbacks(
            at_start=lambda trainer, done: seen.append((trainer.context.device.type, trainer.captured, done))
        ),
    )
    assert seen == [("cuda", True, 0)]
    assert torch.equal(torch.cuda.get_rng_state(), before[0])
    assert torch.equal(torch.random.get_rng_state(), before[1])
    assert (torch.backends.cudnn.benchmark, torch.cuda.current_stream()) == before[2:]
    _, metrics, _ = train(RUNS["bsam"])
    assert result.last.metrics["train_loss"] == pytest.approx(metrics[-1]["train_loss"], rel=1e-3)
    assert result.score == pytest.approx(metrics[-1]["test_accuracy"], abs=0.02)


def test_consecutive_runs_do_not_affect_each_other():
    """Each has a separate graph, and the memory of earlier ones is freed."""
    first = fit(RUNS["sam"], machine=Machine("cuda")).score
    used = allocated()
    for _ in range(3):
        fit(RUNS["bsam"], machine=Machine("cuda"))
    assert fit(RUNS["sam"], machine=Machine("cuda")).score == pytest.approx(first, abs=0.02)
    assert allocated() < used + 20e6


def allocated():
    """Return the allocated bytes without reference cycles, and without the 34 MB that cuBLAS keeps for each stream."""
    gc.collect()
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    return torch.cuda.memory_allocated()

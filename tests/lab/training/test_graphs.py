"""Captured steps are plain steps, with recorded operations in place of CUDA graphs, which need a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import bsam
from adamw_reference import RUNS as ADAMW_RUNS
from adamw_reference import apart, by_hand, by_the_laboratory
from bsam.core import optimizer as optimizer_file
from bsam.core import schedule
from bsam.core.optimizer import SharpnessAware
from bsam.flatness import Probe
from bsam.lab.config import Run
from bsam.lab.tasks import images
from bsam.lab.tasks.classification import Classification
from bsam.lab.training.graphs import CapturedSteps
from bsam.lab.training.machine import DistributedContext
from bsam.lab.training.trainer import Trainer, build_run_step
from captured_runs import FLOOR, RUNS, SAME, kinds_of_steps, patterns
from recorded_steps import RecordedGraph, like_a_gpu, recording

TOLERANCE = 1e-6  # losses are computed in float32, and a checkpoint stores the step count of AdamW in float32
CPU = torch.device("cpu")
SMALL = {"batch": 16}


@pytest.fixture(autouse=True)
def _double(monkeypatch):
    torch.set_default_dtype(torch.float64)
    monkeypatch.setattr(images, "_load_arrays", lambda name, folder=None: patterns(160))
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture(autouse=True)
def _gpu(monkeypatch):
    like_a_gpu(monkeypatch)


class Small(Classification):
    """Its network has few operations to record."""

    def network(self) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(self.run.seed)
            layers = nn.Conv2d(1, 4, 3, stride=2), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(36, 10)
            return nn.Sequential(*layers)


def start(run: Run, captured: bool, change=lambda groups: None) -> Trainer:
    """Return a trainer; ``change`` may edit the parameter groups."""
    trainer = Trainer(run, Small(run, CPU), DistributedContext(CPU))
    total = trainer.steps * run.epochs
    trainer.train_step = step = build_run_step(run, trainer.task, trainer.network, total, capturable=captured)
    trainer.optimizer = step.optimizer
    if run.probe is not None:
        trainer.probe = Probe(run.probe).attach(step.optimizer)
    due = trainer.probe.due if trainer.probe is not None else lambda t: False
    trainer.take_step = CapturedSteps(step, due) if captured else step.step
    change(step.optimizer.param_groups)
    return trainer


def train(run: Run, captured: bool, epochs=(0, 1), state=None, change=lambda groups: None, steps=10) -> Trainer:
    trainer = start(run.changed(**SMALL, limit_train=16 * steps), captured, change)
    assert trainer.steps == steps
    if state is not None:
        trainer.load_state_dict(state)
    trainer.losses = [trainer.train_epoch(number)["train_loss"] for number in epochs]
    return trainer


def distance(a: Trainer, b: Trainer) -> float:
    return apart(a.network.state_dict(), b.network.state_dict())


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_captured_steps_are_plain_steps(run):
    # a kind is captured in its fourth step, and ramps must end
    several = kinds_of_steps(run) > 1 or run.rho_warmup or "ramp" in run.arguments
    epochs, per_epoch = ((0, 1), 8) if several else ((0,), 6)
    captured, plain = (train(run, is_captured, epochs, steps=per_epoch) for is_captured in (True, False))
    assert len(captured.take_step._graphs) == kinds_of_steps(run)
    assert distance(captured, plain) < TOLERANCE
    assert captured.losses == pytest.approx(plain.losses, rel=1e-6)
    steps = per_epoch * len(epochs)
    assert all(int(n) == steps for name, n in captured.network.state_dict().items() if name.endswith("batches_tracked"))
    if isinstance(captured.optimizer, SharpnessAware):
        assert captured.optimizer.t == steps


@pytest.mark.parametrize(
    ("name", "captured_before"),
    [("sam with a floor", True), ("sam, warm-up", False), ("looksam, late", True), ("bsam on adamw", False)],
)
def test_a_captured_training_continues_after_an_interruption(name, captured_before, tmp_path):
    first = train(RUNS[name], captured_before, epochs=[0])
    torch.save(first.state_dict(), tmp_path / "state")
    state = torch.load(tmp_path / "state", weights_only=True)
    second = train(RUNS[name], True, epochs=[1], state=state)
    assert second.take_step._graphs
    assert distance(second, train(RUNS[name], False)) < TOLERANCE


@pytest.mark.parametrize("method", ["sam", "looksam", "bsam"])
def test_each_group_has_its_own_warm_up_and_start(method):
    run = Run.of(method, FLOOR if method == "bsam" else {"rho": 0.4}, decay="weights", **SAME)

    def change(groups):
        for group, steps, first in zip(groups, (12, 5), (0, 3), strict=True):
            group[schedule.WARMUP], group[schedule.START] = steps, first

    captured, plain = train(run, True, change=change), train(run, False, change=change)
    assert captured.take_step._graphs
    assert distance(captured, plain) < TOLERANCE
    assert distance(plain, train(run, False)) > 1e-3


@pytest.mark.parametrize("arguments", [{"epochs_back": 2}, {}], ids=["saf", "mesa"])
def test_the_graph_of_a_loss_serves_all_epochs(arguments):
    """SAF reads and writes other logits in each of them."""
    method = "saf" if arguments else "mesa"
    run = Run.of(method, {"start_epoch": 1, **arguments}, **{**SAME, "epochs": 6})
    captured, plain = (train(run, is_captured, epochs=range(6), steps=5) for is_captured in (True, False))
    assert len(captured.take_step._graphs) == 2
    assert distance(captured, plain) < TOLERANCE
    ours, theirs = captured.train_step.loss.state_dict(), plain.train_step.loss.state_dict()
    assert all(torch.allclose(ours[name], t) for name, t in theirs.items() if isinstance(t, torch.Tensor))
    sgd = train(Run.of("sgd", **{**SAME, "epochs": 6}), False, epochs=range(6), steps=5)
    assert distance(plain, sgd) > 100 * TOLERANCE


@pytest.mark.parametrize("name", ["sam, late", "bsam with a floor"])
def test_probed_steps_are_not_captured_and_change_nothing(name):
    run = RUNS[name].changed(probe=4)
    captured, plain = train(run, True), train(run, False)
    assert captured.take_step._graphs
    steps = [[reading["step"] for reading in trainer.readings] for trainer in (captured, plain)]
    assert steps[0] == steps[1]
    assert len(steps[0]) > 2
    assert distance(captured, plain) < TOLERANCE
    assert distance(captured, train(RUNS[name], False)) < TOLERANCE


@pytest.mark.parametrize("run", ADAMW_RUNS.values(), ids=ADAMW_RUNS)
def test_captured_adamw_takes_the_steps_of_a_hand_written_loop(run):
    expected, _ = by_hand(run)
    captured, take = by_the_laboratory(run, captured=True)
    assert take._graphs
    assert apart(captured, expected) < 1e-12


def counted_by_python(group, radius):
    return radius * schedule.share_of_radius(group, group["steps_taken"])


def counted_outside_of_graphs(group):
    if not schedule.capturing():
        schedule.count_on_device(group)


FAULTS = {
    "the graph keeps the step count of its capture": ("sam, warm-up", optimizer_file, "warmed_up", counted_by_python),
    "replays do not raise their count": ("looksam, late", optimizer_file, "count_on_device", counted_outside_of_graphs),
    "replays are not counted": ("bsam every second step", SharpnessAware, "count_step", lambda method: None),
    "one graph for all kinds": ("looksam, late", SharpnessAware, "steps_since_start", property(lambda method: 0)),
}


@pytest.mark.parametrize(("name", "place", "attribute", "fault"), FAULTS.values(), ids=FAULTS)
def test_a_fault_is_found(name, place, attribute, fault, monkeypatch):
    plain = train(RUNS[name], False)
    monkeypatch.setattr(place, attribute, fault)
    assert distance(train(RUNS[name], True), plain) > 100 * TOLERANCE


WAITING = {
    "item": lambda t: t[0].item(),
    "bool": lambda t: bool(t[0] > 0),
    "tolist": lambda t: t.tolist(),
    "cpu": lambda t: t.cpu(),
    "numpy": lambda t: t.numpy(),
    "mask": lambda t: t[t > 0],
    "masked assignment": lambda t: t.__setitem__(t > 0, 0.0),
    "masked_select": lambda t: t.masked_select(t > 0),
    "nonzero": lambda t: t.nonzero(),
    "unique": lambda t: t.unique(),
    "bincount": lambda t: t.long().bincount(),
    "equal": lambda t: torch.equal(t, t + 1),
    "allclose": lambda t: torch.allclose(t, t + 1),
}


@pytest.mark.parametrize("wait", WAITING.values(), ids=WAITING)
def test_what_waits_for_the_device_cannot_be_captured(wait):
    with pytest.raises(RuntimeError, match="not permitted when stream is capturing"), recording(RecordedGraph()):
        wait(torch.ones(3))


def test_a_step_that_waits_for_the_device_cannot_be_captured(monkeypatch):
    monkeypatch.setattr(optimizer_file, "scheduled", lambda *args: float(schedule.scheduled(*args)))
    with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
        train(RUNS["sam with a floor"], True)


def test_a_graph_keeps_the_largest_learning_rate():
    """The radius follows the learning rate relative to it, and it is reached in a replay."""
    model, lr = torch.nn.Linear(3, 1), torch.tensor(0.1)
    optimizer = bsam.SAM(torch.optim.SGD(model.parameters(), lr=lr, fused=True), model, rho=0.2, rho_floor=0.0)
    (group,) = optimizer.param_groups
    optimizer.step(lambda: model(torch.ones(2, 3)).square().mean())
    graph = RecordedGraph()
    with recording(graph):
        optimizer.step(lambda: model(torch.ones(2, 3)).square().mean())
    for rate in (0.1, 0.3, 0.1):
        lr.fill_(rate)
        graph.replay()
    assert float(group[schedule.LR_SEEN]) == pytest.approx(0.3)
    assert float(optimizer.radius(group, "rho")) == pytest.approx(0.2 / 3)


def test_a_recorded_graph_acts_when_it_is_replayed():
    x, y = torch.tensor([1.0, 2.0]), torch.zeros(2)
    graph = RecordedGraph()
    with recording(graph):
        product = x * x
        y.add_(product.view(2)[1:])
    assert y.tolist() == [0.0, 0.0]
    graph.replay()
    x.fill_(3.0)
    graph.replay()
    assert (product.tolist(), y.tolist()) == ([9.0, 9.0], [13.0, 13.0])

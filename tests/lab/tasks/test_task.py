"""A second kind of training through the unchanged loop: its own data, network, loss and metric, with Adam as base."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, replace
from typing import ClassVar, Literal, Optional, get_type_hints

import numpy as np
import pytest
import torch
from torch import nn

import bsam
from bsam.lab import Machine, Preset, Run, RunCallbacks, Score, Splits, Task, TaskSettings, fit, setting
from bsam.lab.cli.run_flags import flag_kind
from bsam.lab.common import names
from bsam.lab.recipes.plan import experiment_title
from bsam.lab.tasks import TASKS, StoredTask, describe_task, task_class, task_of
from bsam.lab.tasks.task import Failure, check_members
from bsam.lab.training import run_dir
from bsam.lab.training.run_dir import RunDir, run_dir_name

CPU = torch.device("cpu")


def plane():
    """Points in the plane, and two numbers for each."""
    points = torch.rand(330, 2, generator=torch.Generator().manual_seed(0)) * 4 - 2
    targets = torch.stack((points.prod(1), points.sin().sum(1)), 1)
    return Splits(train=(points[:230], targets[:230]), test=(points[230:], targets[230:]))


def mlp(input_shape, width):
    return nn.Sequential(nn.Linear(*input_shape, width), nn.Tanh(), nn.Dropout(0.05), nn.Linear(width, 2))


@dataclass(frozen=True, kw_only=True)
class RegressionSettings(TaskSettings):
    delta: float = setting(1.0, "where the loss becomes linear")
    width: int = setting(32, "units of the hidden layer")


class Regression(Task):
    """Points, moved a little in each epoch, to two numbers: a Huber loss, judged by the share of variance explained."""

    settings_type = RegressionSettings
    score = Score("explained", "variance explained in %", 100)
    datasets: ClassVar = {"plane": plane}
    networks: ClassVar = {"mlp": mlp}
    presets = (Preset(base="adam"), Preset(when={"base": "adam"}, lr=0.02, weight_decay=0.0))

    def augment(self, x, y, *, generator):
        return x + 0.02 * torch.randn(x.shape, generator=generator), y

    def losses(self, outputs, y):
        return nn.functional.huber_loss(outputs, y, reduction="none", delta=self.settings.delta).sum(1)

    def sums(self, outputs, y):
        return {"left": (outputs - y).square(), "y": y, "yy": y.square()}

    def scores(self, means):
        return {"explained": 1 - float(means["left"].sum() / (means["yy"] - means["y"].square()).sum())}


def twelve():
    splits = plane()
    return replace(splits, train=tuple(array[:120] for array in splits.train))


RUN = Run.of("bsam", {"rho_max": 0.05, "rho_min": 0.05}, task=Regression, epochs=4, batch=50, seed=3)


def train(folder, run=RUN, stop=None):
    def each(epoch, metrics):
        if epoch == stop:
            raise InterruptedError

    return fit(run, folder, Machine("cpu", checkpoint_every=0), callbacks=RunCallbacks(on_epoch=each))


def test_another_task_learns_is_kept_and_goes_on_bit_for_bit(tmp_path):
    assert (RUN.base, RUN.lr, RUN.weight_decay, RUN.data, RUN.model) == ("adam", 0.02, 0.0, "plane", "mlp")
    result = train(tmp_path / "a")
    for stop in (1, 2, 3):
        with pytest.raises(InterruptedError):
            train(tmp_path / "b", stop=stop)
    first, second = ([{**e.metrics, "seconds": 0} for e in one.epochs] for one in (result, train(tmp_path / "b")))
    assert first == second
    assert (tmp_path / "a" / "model.safetensors").read_bytes() == (tmp_path / "b" / "model.safetensors").read_bytes()
    found = [metrics["test_explained"] for metrics in RunDir(tmp_path / "a").metrics()]
    assert found[-1] > found[0]
    task = Regression(RUN, CPU)
    network = RunDir(tmp_path / "a").load_into(task.network()).eval()
    assert task.evaluate(network)["test_explained"] == found[-1]
    x, y = plane().test
    with torch.no_grad():
        left = (network(x) - y).square().sum() / (y - y.mean(0)).square().sum()
    assert found[-1] == pytest.approx(1 - float(left), rel=1e-5)


@pytest.mark.parametrize("method", ["base", "bsam"])
def test_its_steps_are_those_of_a_plain_loop(method):
    """Adam on the Huber loss of moved points, in the order and with the dropout that the loop draws; for BSAM three of
    its own passes.
    """
    run = replace(RUN, method=method, arguments={} if method == "base" else RUN.arguments, epochs=2)
    result = fit(run, machine=Machine("cpu"))
    task = Regression(run, CPU)
    network = task.network().train()
    base = torch.optim.Adam(network.parameters(), lr=0.02, betas=(0.9, 0.999))
    optimizer = base if method == "base" else bsam.BSAM(base, network, rho_max=0.05, rho_min=0.05)
    for epoch in range(2):
        task.begin_epoch(epoch)
        network.train()
        torch.manual_seed(int(np.random.default_rng((3, epoch, 0x4E57, 0)).integers(2**63)))
        order, losses = np.random.default_rng((3, epoch, 0x0DE)).permutation(230), []
        for i in range(4):
            x, y, _ = task.batch(torch.from_numpy(order[50 * i : 50 * i + 50]))
            base.param_groups[0]["lr"] = 0.02 * math.cos(math.pi / 2 * (4 * epoch + i) / 8) ** 2

            def closure():
                optimizer.zero_grad()
                loss = nn.functional.huber_loss(network(x), y, reduction="none").sum(1).mean()
                loss.backward()
                return loss

            losses.append(optimizer.step(closure).item())
        assert result.epochs[epoch].metrics["train_loss"] == pytest.approx(sum(losses) / 4, rel=1e-5)
        assert result.epochs[epoch].metrics["test_explained"] == pytest.approx(
            task.evaluate(network.eval())["test_explained"], rel=1e-4, abs=1e-5
        )


def test_sharpness_and_the_probe_know_its_loss():
    run = replace(RUN, epochs=1, sharpness_rho=0.05, probe=1, curvature=True)
    result = fit(run, machine=Machine("cpu"))
    assert 0 < result.last.sharpness.loss < 3
    assert result.top_eigenvalue > 0


def test_a_run_goes_on_only_with_the_same_data(tmp_path, monkeypatch):
    with pytest.raises(InterruptedError):
        train(tmp_path, stop=2)
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    monkeypatch.setattr(Regression, "datasets", {"plane": twelve})
    with pytest.raises(bsam.BsamError, match="data has changed"):
        train(tmp_path)
    assert {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()} == before


@pytest.mark.parametrize("written", ["identity.json", "config.json", "task.json"])
def test_a_process_killed_between_the_first_files_leaves_a_run_that_can_be_read(written, tmp_path, monkeypatch):
    """Also where the module of the task is not imported; and the run begins again."""
    write_json = run_dir.write_json

    def killed(path, value):
        if path.name == written:
            raise InterruptedError
        write_json(path, value)

    with monkeypatch.context() as patch:
        patch.setattr(run_dir, "write_json", killed)
        with pytest.raises(InterruptedError):
            train(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(names, "_OWN", {})
        if (tmp_path / "config.json").exists():
            assert RunDir(tmp_path).run().settings() == RUN.settings()
    assert (tmp_path / "config.json").exists() == (written == "identity.json")
    with pytest.raises(InterruptedError):
        train(tmp_path, stop=1)
    assert len(RunDir(tmp_path).metrics()) == 1


def test_a_run_without_the_description_of_its_task_says_what_to_do(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**RUN.settings(), "task": "elsewhere:Lost"}))
    words = "no task.json, which describes the task elsewhere:Lost: run the training command again"
    with pytest.raises(bsam.BsamError, match=words):
        RunDir(tmp_path).run()


def test_its_settings_are_stored_and_a_run_goes_on_only_with_the_same(tmp_path):
    with pytest.raises(InterruptedError):
        train(tmp_path, stop=1)
    stored = RunDir(tmp_path).note("config")
    assert (stored["task"], stored["delta"], stored["width"]) == (RUN.task.name, 1.0, 32)
    assert not {"label_smoothing", "simcc_k"} & set(stored)
    assert RunDir(tmp_path).run() == RUN == Run.of(**RUN.settings())
    other = RUN.changed(delta=0.5)
    assert (other.task.delta, run_dir_name(other) == run_dir_name(RUN)) == (0.5, False)
    with pytest.raises(bsam.BsamError, match=r"delta 1.0 there, 0.5 here"):
        train(tmp_path, other)
    with pytest.raises(bsam.BsamError, match="simcc_k"):
        RUN.changed(simcc_k=3.0)


def test_a_setting_of_a_task_needs_a_name_that_runs_do_not_use():
    @dataclass(frozen=True)
    class Twice(TaskSettings):
        name = "twice"
        lr: float = 0.1

    with pytest.raises(bsam.BsamError, match="lr of Twice"):
        Run("sgd", task=Twice())
    for nameless in (TaskSettings(), "pose", None):
        with pytest.raises(bsam.BsamError, match="task"):
            Run("sgd", task=nameless)


METRICS = [{"explained": 0.5}, {"test_r2": 0.5}, {"test_explained": torch.tensor(0.5)}, 0.5]


@pytest.mark.parametrize("metrics", METRICS, ids=str)
def test_metrics_without_the_measure_raise_in_the_first_epoch(metrics, monkeypatch):
    monkeypatch.setattr(Regression, "evaluate", lambda self, network: metrics)
    with pytest.raises(bsam.BsamError, match="test_explained"):
        fit(replace(RUN, epochs=1), machine=Machine("cpu"))


@dataclass(frozen=True, kw_only=True)
class PlainSettings(TaskSettings):
    width: int = 8


class UndecoratedSettings(TaskSettings):
    width: int = setting(8, "width")


@dataclass(frozen=True, kw_only=True)
class TupleSettings(TaskSettings):
    widths: tuple = setting((8, 16), "widths")


@dataclass(frozen=True, kw_only=True)
class PlainTupleSettings(TaskSettings):
    widths: int = setting((8, 16), "widths")


@dataclass(frozen=True, kw_only=True)
class UnionSettings(TaskSettings):
    widths: int | str = setting(8, "widths")


WIDTHS = "widths of .* must be a str, int, float, bool or Literal, or one of them or None, got"
MEMBERS = {
    "datasets": ({"datasets": {}}, "no datasets: add it"),
    "networks": ({"networks": {}}, "no networks: add it"),
    "score": ({"score": None}, "no score: add it"),
    "losses": ({"losses": Task.losses}, r"no losses\(outputs, \*targets\): add it"),
    "sums": ({"sums": Task.sums}, r"no sums\(outputs, \*targets\): add it"),
    "plain": ({"settings_type": PlainSettings}, r"width of .* must be declared with setting\(default, help\)"),
    "tuple": ({"settings_type": TupleSettings}, rf"{WIDTHS} tuple with the default \(8, 16\)"),
    "default": ({"settings_type": PlainTupleSettings}, rf"{WIDTHS} int with the default \(8, 16\)"),
    "union": ({"settings_type": UnionSettings}, rf"{WIDTHS} int \| str with"),
    "undecorated": ({"settings_type": UndecoratedSettings}, "write @dataclass"),
}


@pytest.mark.parametrize("name", MEMBERS)
def test_a_task_without_a_member_says_which(name):
    members, words = MEMBERS[name]
    with pytest.raises(bsam.BsamError, match=words):
        check_members(type("Wrong", (Regression,), members))


@dataclass(frozen=True, kw_only=True)
class ManySettings(TaskSettings):
    name = "many"
    mode: Literal["a", "b"] | None = setting(None, "mode")
    depth: Optional[int] = setting(None, "depth")  # noqa: UP045
    steps: Literal[1, 2] = setting(1, "steps")
    share: float | None = setting(0.5, "share")
    is_deep: bool = setting(False, "deep")


def test_settings_of_every_kind_are_taken():
    check_members(type("Many", (Regression,), {"settings_type": ManySettings, "presets": ()}))
    kinds = {name: flag_kind(hint) for name, hint in get_type_hints(ManySettings).items() if name in MANY}
    assert kinds["mode"]["choices"] == ("a", "b")
    assert (kinds["depth"]["type"], kinds["steps"]["type"], kinds["share"]["type"]) == (int, int, float)


MANY = ("mode", "depth", "steps", "share")


@pytest.mark.parametrize("name", TASKS)
def test_our_tasks_keep_the_settings_that_are_declared_for_them(name):
    task = TASKS[name]
    assert (task.settings_type.name, task_class(name)) == (name, task)
    assert issubclass(task, Task)


def test_a_stored_task_answers_without_its_module():
    name = "elsewhere:Depth"
    note = {
        "settings": {"width": {"default": 8, "help": "channels"}},
        "score": asdict(Score("rmse", "RMSE in m", higher=False)),
        "groups": [asdict(Score("rmse_far", "far"))],
        "loss_title": "Huber loss",
        "chance": 2.0,
        "presets": json.loads(json.dumps([Preset(base="adam", epochs=7).to_json()])),
    }
    describe_task(name, note)
    run = Run.of("sam", task=name, data="rooms", model="unet")
    task = task_of(run)
    assert experiment_title(run) == "unet, rooms, 7 epochs"  # what presets say is no deviation
    assert experiment_title(run.changed(base="sgd")) == "unet, rooms, 7 epochs, base sgd"
    assert (task.score.higher, task.groups[0].title, task.loss_title) == (False, "far", "Huber loss")
    assert task.titles(run) == ("unet", "rooms")
    assert (task.data_words(run), task.network_words(run), task.wrong_labels(run)) == ("", "", None)
    files = {"task": note}.__getitem__
    assert task.failure(run, [{"test_rmse": 1.9}], files) is None
    assert task.failure(run, [{"test_rmse": 2.0}], files) == Failure(
        "The network is no better than the best constant answer: RMSE in m 2 and 2."
    )
    assert task.functions(run) == {"task"}
    assert task.functions(run.changed(data="rooms:read")) == {"task", "data"}
    with pytest.raises(bsam.BsamError, match="not imported"):
        task(run, torch.device("cpu"))
    assert issubclass(task, StoredTask)


def test_a_task_of_ours_is_not_described_by_files():
    describe_task("pose", json.loads('{"settings": {}, "score": {"name": "x", "title": "x"}, "groups": []}'))
    assert task_class("pose").score.name == "pck"

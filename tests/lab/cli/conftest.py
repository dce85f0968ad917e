"""Finished runs that the tests of the command line share, and commands that fail."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from bsam.lab import cli
from bsam.lab.inference.run_flatness import MeasuredModels
from bsam.lab.recipes import RECIPES
from helpers import draw_images
from pose_runs import train_pose


@pytest.fixture(scope="module", autouse=True)
def without_pictures() -> Iterator[None]:
    """Let ``bsam train`` draw no pictures, as without plotly and Pillow: they take most of the time of a short run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bsam.lab.report.figures.class_report.find_spec", lambda name: None)
        yield


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A function that trains a run for an epoch, once per session, and returns its directory."""
    place = tmp_path_factory.mktemp("trained")

    def train(name: str, *flags: object) -> Path:
        folder = place / name
        if not folder.exists():
            command = ["train", "--method", "sgd", "--device", "cpu", "--epochs", "1", *flags, "--out", folder]
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("bsam.lab.report.figures.class_report.find_spec", lambda name: None)
                assert cli.main(list(map(str, command))) == 0
        return folder

    return train


@pytest.fixture(scope="session")
def digits_run(trained: Callable[..., Path]) -> Path:
    """ResNet-8, which is not the default network of digits."""
    return trained("digits", "--model", "resnet8", "--batch", 64, "--limit-train", 64, "--limit-test", 20)


@pytest.fixture(scope="session")
def quantized_run(trained: Callable[..., Path]) -> Path:
    return trained("w4", "--weight-bits", 4, "--batch", 32, "--lr", 0.05, "--limit-train", 320, "--limit-test", 200)


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of images of three classes, for tests that do not change it."""
    return draw_images(tmp_path_factory.mktemp("data") / "images", {"train": 4, "test": 2})


@pytest.fixture(scope="session")
def images_run(trained: Callable[..., Path], images: Path) -> Path:
    settings = ("--model", "resnet8", "--weights", "random", "--image-size", 28, "--batch", 6)
    return trained("images", "--data", f"folder:{images}", *settings)


@pytest.fixture(scope="session")
def pose_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_pose(tmp_path_factory.mktemp("pose") / "run")


@pytest.fixture
def demo_in_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ``bsam demo`` train in the process of the test, where other fixtures have an effect."""
    made = RECIPES["demo"]

    def without_workers(*given: object) -> object:
        return replace(made.study_without_runs(*given), workers=1)

    monkeypatch.setitem(RECIPES, "demo", replace(made, study_without_runs=without_workers))


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[MeasuredModels]:
    """The models that ``bsam flatness`` is to measure, which it does not."""
    asked: list[MeasuredModels] = []

    def report(models: MeasuredModels, *_: object) -> list[object]:
        asked.append(models)
        return []

    monkeypatch.setattr("bsam.lab.cli.flatness.flatness_report", report)
    return asked


@pytest.fixture
def without_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a study write no page, which takes most of its time where nothing is trained."""
    monkeypatch.setattr("bsam.lab.report.recipe_results.write_page", lambda *_, **__: None)


@pytest.fixture
def error_of(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """A function that runs a command, which must fail with status 2, and returns its line on the error stream."""

    def run(*arguments: object) -> str:
        capsys.readouterr()
        assert cli.main(list(map(str, arguments))) == 2
        out, error = capsys.readouterr()
        progress, sign, message = error.rpartition("bsam: ")
        assert sign
        assert "Traceback" not in progress
        assert "epoch 1" not in out
        return message

    return run

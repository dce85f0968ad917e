"""What the tests of reports and of commands share."""

import pytest
from rich.console import Console

from bsam.lab.recipes import RECIPES
from finished_runs import finished_run, write_run


@pytest.fixture
def shown():
    """What is printed, as text."""

    def show(*printed, width=200):
        console = Console(width=width, no_color=True)
        with console.capture() as capture:
            for each in printed:
                console.print(each)
        return capture.get()

    return show


@pytest.fixture(name="finished_run")
def finished_run_fixture():
    return finished_run


@pytest.fixture
def out(tmp_path):
    """Write the directories of a recipe's finished runs; returns the experiment and the states."""

    def fill(name, seeds=2):
        experiment = RECIPES[name].experiment(seeds=seeds)
        return experiment, [write_run(plan.run, tmp_path) for plan in experiment.planned]

    return fill

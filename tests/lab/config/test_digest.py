import json
from dataclasses import dataclass, fields
from pathlib import Path

import pytest

from bsam.lab.config import DIGEST_NAMES, FROZEN_OF_RUN, FROZEN_OF_TASK, TASK_SETTINGS, Run, TaskSettings
from bsam.lab.training.run_dir import run_dir_name, stored_run

# names of run directories as version 0.3 made them: runs of the recipes, and SAM with one setting changed at a time
NAMES = json.loads(Path(__file__).with_name("run_names.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("row", NAMES, ids=lambda row: row["name"])
def test_runs_keep_their_names_and_settings(row):
    run = Run.of(**row["settings"])
    assert run_dir_name(run) == row["name"]
    assert {**run.settings(), **row["settings"]} == run.settings() == Run.of(**run.settings()).settings()


@pytest.mark.parametrize("row", NAMES, ids=lambda row: row["name"])
def test_runs_stored_with_a_radius_keep_their_names(row):
    stored = {**row["settings"], "radius": row["settings"]["sharpness_rho"]}
    del stored["sharpness_rho"]
    assert stored_run(stored) == Run.of(**row["settings"])


def test_the_names_cover_every_setting():
    """So that a changed default or a renamed setting fails above: each is both at its default and changed."""
    settings = [row["settings"] for row in NAMES]
    values = {name: {json.dumps(row.get(name)) for row in settings if name in row} for row in settings for name in row}
    assert [name for name, found in values.items() if len(found) == 1] == []


def test_every_setting_has_a_frozen_default():
    """A new setting without one would be in the digest of all runs."""
    assert {DIGEST_NAMES.get(item.name, item.name) for item in fields(Run)} == FROZEN_OF_RUN.keys() | {"method"}
    assert {name: {item.name for item in fields(kind)} for name, kind in TASK_SETTINGS.items()} == {
        name: defaults.keys() for name, defaults in FROZEN_OF_TASK.items()
    }


@dataclass(frozen=True, kw_only=True)
class OwnSettings(TaskSettings):
    name = "own"
    label_smoothing: float = 0.3
    width: int = 8


def test_the_settings_of_your_own_task_have_their_own_defaults():
    plain, wide = Run("sam", task=OwnSettings()), Run("sam", task=OwnSettings(width=9))
    assert run_dir_name(plain) == run_dir_name(Run("sam", task=OwnSettings(label_smoothing=0.3, width=8)))
    assert len({run_dir_name(run) for run in (plain, wide, Run("sam", task=OwnSettings(label_smoothing=0.1)))}) == 3

"""The guides of the frameworks run as they stand, with what the documented command installs and nothing else."""

from __future__ import annotations

import json
import tomllib
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from processes import Script

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("run_guides.py")
EXTRAS = {  # with the numbers of steps, and of batches that batch norm saw, which are fewer than passes
    "integrations": {
        "lightning": (
            "[module.trainer.global_step, module.trainer.optimizers[0].t, int(module.net[1].num_batches_tracked),"
            " trainer.optimizers[0].t]",
            [4, 4, 8, 8],
        ),
        "fabric": ("[optimizer.t, int(model.module[1].num_batches_tracked)]", [4, 4]),
        "accelerate": ("[optimizer.optimizer.t]", [3]),
        "transformers": ("[trainer.optimizer.optimizer.t, result.global_step]", [2, 2]),
        "peft": ("[optimizer.t]", [3]),
        "ignite": ("[optimizer.t]", [6]),
        # windows of three batches, also over the end of an epoch
        "skorch": ("[net.optimizer_.t, accumulating.optimizer_.t]", [10, 2 * 3]),
    },
    "timm": {"timm": ("[optimizer.t]", [2])},
}


def installed(extra: str) -> list[Distribution]:
    """Return the distributions that ``pip install '.[extra]'`` installs, as far as their metadata says."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    waiting = [*map(Requirement, project["dependencies"] + project["optional-dependencies"][extra])]
    found: dict[tuple[str, str], Distribution] = {}
    while waiting:
        requirement = waiting.pop()
        for part in ("", *requirement.extras):
            key = canonicalize_name(requirement.name), part
            if key not in found:
                found[key] = distribution(requirement.name)
                needs = map(Requirement, found[key].requires or [])
                waiting += [need for need in needs if not need.marker or need.marker.evaluate({"extra": part})]
    return list(found.values())


def environment(extra: str, folder: Path) -> list[str]:
    """Link the packages of an extra into a folder; return their names."""
    distributions = installed(extra)
    for one in distributions:
        for name in {file.parts[0] for file in one.files or []} - {"..", "__pycache__"}:
            if not (folder / name).exists():
                (folder / name).symlink_to(one.locate_file(name))
    return sorted({one.name for one in distributions})


@pytest.mark.parametrize("extra", EXTRAS)
def test_guides_run_after_the_documented_install(extra, tmp_path, monkeypatch):
    packages = tmp_path / "packages"
    packages.mkdir()
    names = environment(extra, packages)
    assert ("torchvision" in names) == (extra == "timm")  # built for CUDA, it does not fit a CPU build of torch
    command = f"Install it with `pip install -c constraints.txt '.[{extra}]'`"
    pages = (ROOT / "docs/guides").glob("*.md")
    assert {page.stem for page in pages if command in page.read_text(encoding="utf-8")} == set(EXTRAS[extra])
    guides = [f"{guide}={expression}" for guide, (expression, _) in EXTRAS[extra].items()]
    log = tmp_path / "log"
    monkeypatch.chdir(tmp_path)  # checkpoints
    done = Script(SCRIPT, packages, *guides, output=log, env={"CUDA_VISIBLE_DEVICES": ""}).wait(200)
    assert done == 0, log.read_text()
    steps = json.loads(log.read_text().splitlines()[-1])
    assert steps == {guide: expected for guide, (_, expected) in EXTRAS[extra].items()}

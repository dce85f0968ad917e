"""The guides of the frameworks run as they stand, with what the documented command installs, and torchvision."""

from __future__ import annotations

import json
import re
import tomllib
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from bsam.common.timm_import import import_torchvision
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


NEED_TORCHVISION = {"lightning", "transformers", "peft", "timm"}
CURES = {f"bsam.integrations.{name}" for name in ("torchvision", "lightning", "transformers", "timm")}


def page(guide: str) -> str:
    return (ROOT / "docs/guides" / f"{guide}.md").read_text(encoding="utf-8")


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
    """Link the packages of an extra into a folder; return their names. torchvision is there in any case, too."""
    distributions = installed(extra)
    for one in (*distributions, *map(distribution, ("torchvision", "pillow"))):
        for name in {file.parts[0] for file in one.files or []} - {"..", "__pycache__"}:
            if not (folder / name).exists():
                (folder / name).symlink_to(one.locate_file(name))
    return sorted({one.name for one in distributions})


@pytest.mark.parametrize("guide", [guide for guides in EXTRAS.values() for guide in guides])
def test_a_guide_first_makes_torchvision_importable(guide):
    """Before it imports a framework that imports torchvision, which may be built for CUDA."""
    code = re.search(r"^```python\n(.*?)^```$", page(guide), flags=re.DOTALL | re.MULTILINE)[1]
    imports = re.findall(r"^(?:import|from) ([\w.]+)", code, flags=re.MULTILINE)
    frameworks = [i for i, name in enumerate(imports) if name.split(".")[0] in NEED_TORCHVISION]
    cures = [i for i, name in enumerate(imports) if name in CURES]
    assert not frameworks or cures[0] < frameworks[0]


def test_without_torchvision_nothing_is_imported(monkeypatch):
    monkeypatch.setattr("bsam.common.timm_import.find_spec", lambda name: None)
    monkeypatch.setattr("bsam.common.timm_import._import_torchvision", pytest.fail)
    import_torchvision()


@pytest.mark.parametrize("extra", EXTRAS)
def test_guides_run_after_the_documented_install(extra, tmp_path, monkeypatch):
    packages = tmp_path / "packages"
    packages.mkdir()
    names = environment(extra, packages)
    assert ("torchvision" in names) == (extra == "timm")
    command = f"Install it with `pip install -c constraints.txt '.[{extra}]'`"
    guides = [file.stem for file in (ROOT / "docs/guides").glob("*.md")]
    assert {guide for guide in guides if command in page(guide)} == set(EXTRAS[extra])
    guides = [f"{guide}={expression}" for guide, (expression, _) in EXTRAS[extra].items()]
    log = tmp_path / "log"
    monkeypatch.chdir(tmp_path)  # checkpoints
    done = Script(SCRIPT, packages, *guides, output=log, env={"CUDA_VISIBLE_DEVICES": ""}).wait(200)
    assert done == 0, log.read_text()
    steps = json.loads(log.read_text().splitlines()[-1])
    assert steps == {guide: expected for guide, (_, expected) in EXTRAS[extra].items()}

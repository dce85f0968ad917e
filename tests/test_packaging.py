"""Wheel and sdist: what they contain, what their metadata says, and that the package works without the repository."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from packaging.metadata import Metadata
from packaging.utils import canonicalize_name

import bsam

ROOT = Path(__file__).parents[1]
FOLDERS = ("src", "examples", "tests", "benchmarks")
INFO = f"bsam-{bsam.__version__}.dist-info"
OPTIONAL = (
    "PIL",
    "matplotlib",
    "plotly",
    "rich",
    "safetensors",
    "scipy",
    "sklearn",
    "tensorboard",
    "timm",
    "torchvision",
)

TRAINING = """
import json, sys
target, packages, optional = json.loads(sys.argv[1])
sys.path = [target, *sys.path, *packages]  # without site, .pth files and so editable installations have no effect
sys.modules |= dict.fromkeys(optional)  # as if these were not installed

import os, signal
sys.modules["fcntl"] = None  # as on Windows
del os.sched_getaffinity, signal.pthread_sigmask

import importlib.metadata, torch, bsam

command = importlib.metadata.distribution("bsam").entry_points["bsam"].load()
sys.argv = ["bsam", "list", "methods"]
status = command()
assert "torch._dynamo" not in sys.modules  # whose import takes seconds

torch.manual_seed(0)
x, y = torch.randn(32, 4), torch.randint(0, 3, (32,))
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
optimizer = bsam.BSAM(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model)
losses = [optimizer.step(lambda: torch.nn.functional.cross_entropy(model(x), y)).item() for _ in range(5)]
files = [module.__file__ for name, module in sys.modules.items() if name.split(".")[0] == "bsam"]
print()
print(json.dumps([losses, int(model[1].num_batches_tracked), status, importlib.metadata.version("bsam"), files]))
"""


def run(*command, cwd):
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The sdist of a copy of the repository, and the wheel that was built from it."""
    folder = tmp_path_factory.mktemp("packaging")
    copy = folder / "copy"  # building writes beside the sources
    for name in FOLDERS:
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, copy)
    said = run(sys.executable, "-m", "build", "--no-isolation", "--outdir", "dist", "copy", cwd=folder)
    assert "deprecat" not in said.lower()
    (sdist,), (wheel,) = (folder.glob(f"dist/*.{ending}") for ending in ("tar.gz", "whl"))
    assert sdist.name == f"bsam-{bsam.__version__}.tar.gz"
    assert wheel.name == f"bsam-{bsam.__version__}-py3-none-any.whl"
    return sdist, wheel


def package():
    """The files of the package, relative to ``src``."""
    return {path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src").rglob("*.py")} | {"bsam/py.typed"}


def test_the_wheel_contains_the_package_and_nothing_else(built):
    names = "METADATA", "RECORD", "WHEEL", "entry_points.txt", "top_level.txt", "licenses/LICENSE"
    assert set(zipfile.ZipFile(built[1]).namelist()) == package() | {f"{INFO}/{name}" for name in names}


def test_the_sdist_contains_what_builds_the_package_and_the_examples(built):
    with tarfile.open(built[0]) as archive:
        files = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
    files = {name for name in files if not name.startswith("src/bsam.egg-info/")}
    top = {"CHANGELOG.md", "LICENSE", "MANIFEST.in", "PKG-INFO", "README.md", "pyproject.toml", "setup.cfg"}
    examples = {f"examples/{path.name}" for path in (ROOT / "examples").iterdir() if path.suffix in (".py", ".md")}
    assert files == top | examples | {f"src/{name}" for name in package()}


def test_the_metadata_is_complete(built):
    found = Metadata.from_email(zipfile.ZipFile(built[1]).read(f"{INFO}/METADATA"), validate=True)
    assert (found.name, str(found.version)) == ("bsam", bsam.__version__)
    assert found.author == "bsam contributors"
    assert not found.project_urls
    assert not found.home_page
    assert found.license_expression == "MIT"
    assert found.license_files == ["LICENSE"]
    assert found.summary
    assert len(found.keywords) >= 5
    assert str(found.requires_python) == ">=3.11"
    versions = [name for name in found.classifiers if name.startswith("Programming Language :: Python :: 3.")]
    assert versions == [f"Programming Language :: Python :: 3.{minor}" for minor in (11, 12, 13)]
    assert set(found.classifiers) >= {"Operating System :: OS Independent", "Typing :: Typed"}
    assert found.description_content_type == "text/markdown"
    assert found.description == (ROOT / "README.md").read_text(encoding="utf-8")

    needed = [each for each in found.requires_dist if each.marker is None]
    assert sorted(each.name for each in needed) == ["numpy", "torch"]
    extras = set(found.provides_extra)
    assert extras >= {"plot", "train", "demo", "dev"}
    own = [each for each in found.requires_dist if canonicalize_name(each.name) == "bsam"]
    assert own
    assert all(each.extras <= extras for each in own)  # pip only warns of an extra that is not there


def test_the_version_is_in_one_place(built):
    assert f'__version__ = "{bsam.__version__}"\n' in (ROOT / "src/bsam/__init__.py").read_text(encoding="utf-8")
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert 'dynamic = ["version"]' in project
    assert bsam.__version__ not in project
    assert f"## [{bsam.__version__}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_the_wheel_works_without_the_repository_without_optional_packages_and_on_any_system(built, tmp_path):
    """Five steps of training and the command, with torch and NumPy of this environment."""
    zipfile.ZipFile(built[1]).extractall(tmp_path / "target")  # as pip does with a wheel of Python files
    packages = [path for path in sys.path if path.endswith("-packages")]
    arguments = json.dumps([str(tmp_path / "target"), packages, OPTIONAL])
    out = run(sys.executable, "-I", "-S", "-W", "ignore", "-c", TRAINING, arguments, cwd=tmp_path)
    losses, batches, status, version, files = json.loads(out.splitlines()[-1])
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.97 * losses[0]
    assert (batches, status, version) == (5, 0, bsam.__version__)
    assert "Flat on both sides" in out
    assert len(files) > 20
    assert all(Path(file).is_relative_to(tmp_path / "target") for file in files)

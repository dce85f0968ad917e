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

import importlib.metadata, torch, bsam

torch.manual_seed(0)
x, y = torch.randn(32, 4), torch.randint(0, 3, (32,))
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
optimizer = bsam.BSAM(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model)
losses = [optimizer.step(lambda: torch.nn.functional.cross_entropy(model(x), y)).item() for _ in range(5)]
command = importlib.metadata.distribution("bsam").entry_points["bsam"].load()
sys.argv = ["bsam", "list", "methods"]
status = command()
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
    """The sdist, the wheel that was built from it, and a wheel that was built from a copy of the repository."""
    folder = tmp_path_factory.mktemp("packaging")
    copy = folder / "copy"  # building writes beside the sources
    for name in FOLDERS:
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, copy)
    build = (sys.executable, "-m", "build", "--no-isolation", "--outdir")
    said = run(*build, "dist", "copy", cwd=folder) + run(*build, "direct", "--wheel", "copy", cwd=folder)
    assert "deprecat" not in said.lower()
    (sdist,), (wheel,), (direct,) = (folder.glob(f) for f in ("dist/*.tar.gz", "dist/*.whl", "direct/*.whl"))
    assert sdist.name == f"bsam-{bsam.__version__}.tar.gz"
    assert wheel.name == direct.name == f"bsam-{bsam.__version__}-py3-none-any.whl"
    return sdist, wheel, direct


def package():
    """The files of the package, relative to ``src``."""
    return {path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src").rglob("*.py")} | {"bsam/py.typed"}


def test_the_wheel_contains_the_package_and_nothing_else(built):
    _, wheel, direct = built
    contents = [{entry.filename: entry.CRC for entry in zipfile.ZipFile(path).infolist()} for path in (wheel, direct)]
    assert contents[0] == contents[1]
    names = "METADATA", "RECORD", "WHEEL", "entry_points.txt", "top_level.txt", "licenses/LICENSE"
    assert set(contents[0]) == package() | {f"{INFO}/{name}" for name in names}


def test_the_sdist_contains_what_builds_the_package_and_the_examples(built):
    sdist, _, _ = built
    with tarfile.open(sdist) as archive:
        files = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
    files = {name for name in files if not name.startswith("src/bsam.egg-info/")}
    top = {"CHANGELOG.md", "LICENSE", "MANIFEST.in", "PKG-INFO", "README.md", "pyproject.toml", "setup.cfg"}
    examples = {f"examples/{path.name}" for path in (ROOT / "examples").iterdir() if path.suffix in (".py", ".md")}
    assert files == top | examples | {f"src/{name}" for name in package()}


def test_the_metadata_is_complete(built):
    _, wheel, _ = built
    found = Metadata.from_email(zipfile.ZipFile(wheel).read(f"{INFO}/METADATA"), validate=True)
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
    assert "Typing :: Typed" in found.classifiers
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


def test_the_wheel_works_without_the_repository_and_without_optional_packages(built, tmp_path):
    """Five steps of training and the command, with torch and NumPy of this environment."""
    _, wheel, _ = built
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile")
    run(*pip, "--disable-pip-version-check", "--target", "target", str(wheel), cwd=tmp_path)
    packages = [path for path in sys.path if path.endswith("-packages")]
    arguments = json.dumps([str(tmp_path / "target"), packages, OPTIONAL])
    out = run(sys.executable, "-I", "-S", "-c", TRAINING, arguments, cwd=tmp_path)
    losses, batches, status, version, files = json.loads(out.splitlines()[-1])
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.97 * losses[0]
    assert (batches, status, version) == (5, 0, bsam.__version__)
    assert "Flat on both sides" in out
    assert len(files) > 20
    assert all(Path(file).is_relative_to(tmp_path / "target") for file in files)

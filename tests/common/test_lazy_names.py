"""Names that `bsam` and `bsam.lab` import on first use."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import bsam
import bsam.lab

FRESH = """
import pickle, sys, threading, bsam
assert {"BSAM", "flatness", "__version__"} <= {*dir(bsam)}
assert not hasattr(bsam, "BSM") and not hasattr(bsam, "lab")
assert "torch" not in sys.modules

found, start = [], threading.Barrier(8)
def first_use(name):
    start.wait()
    found.append(getattr(bsam, name))
names = ["BSAM", "flatness", "SharpnessAware", "METHODS", "check", "norm_groups", "Vector", "BSAM"]
threads = [threading.Thread(target=first_use, args=(name,)) for name in names]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
assert len(found) == 8, found
assert found.count(bsam.BSAM) == 2

from bsam import *
assert BSAM is bsam.BSAM and flatness.trace is bsam.flatness.trace
assert pickle.loads(b"cbsam\\nBSAM\\n.") is BSAM and b"bsam.methods.bsam" in pickle.dumps(BSAM)
"""
CHECK = """
pickled = "pickle.loads(b'cbsam.methods.sam\\\\nSAM\\\\n.')"
for expression in ("bsam.SharpnessAware", pickled, "bsam.methods.METHODS['gsam']"):
    for name in [name for name in sys.modules if name.partition(".")[0] == "bsam"]:
        del sys.modules[name]
    import bsam
    assert eval(expression).check.__name__ == "check_loop", expression
"""


def typed_names(package):
    """The objects that type checkers see: those of the imports below ``if TYPE_CHECKING``."""
    tree = ast.parse(Path(package.__file__).read_text(encoding="utf-8"))
    (block,) = (node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    modules = {alias.asname: node.module for node in block.body for alias in node.names}
    return {
        name: import_module(f".{name}", package.__name__)
        if module is None
        else getattr(import_module(f".{module}", package.__name__), name)
        for name, module in modules.items()
    }


@pytest.mark.parametrize("package", [bsam, bsam.lab], ids=lambda package: package.__name__)
def test_type_checkers_and_the_interpreter_see_the_same_objects(package):
    typed = typed_names(package)
    parts = {"common", "core", "methods"} if package is bsam else set()  # modules are known without an import
    assert {*package.__all__} == {*typed} | parts
    assert {name: getattr(package, name) for name in typed} == typed
    assert {*typed} <= {*dir(package)}


def test_every_method_is_a_name_of_the_package():
    assert all(getattr(bsam, method.__name__) is method for method in bsam.METHODS.values())


def test_in_a_fresh_interpreter():
    """No torch before the first use, which may be in several threads; then star imports and pickles as ever. Optimizers
    have their check wherever they come from, each time after bsam is imported anew.

    One interpreter, since torch takes seconds.
    """
    program = [sys.executable, "-c", FRESH + CHECK]
    done = subprocess.run(program, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("package", [bsam, bsam.lab], ids=lambda package: package.__name__)
def test_a_misspelled_name_is_an_attribute_error(package):
    with pytest.raises(AttributeError, match=f"module '{package.__name__}' has no attribute 'fitt'") as error:
        package.fitt  # noqa: B018
    assert (error.value.name, error.value.obj) == ("fitt", package)  # of which the traceback makes a suggestion

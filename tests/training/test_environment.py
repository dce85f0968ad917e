"""``compile``: networks through torch.compile where that works, plain ones where it does not, and a sentence either
way.
"""

from __future__ import annotations

import inspect
import json
from dataclasses import replace

import pytest
import torch
from torch import nn

import bsam
from bsam.tasks.classification import Classification
from bsam.training.environment import compiler_trouble
from bsam.training.config import Run
from bsam.training.loop import fit

RUN = Run("bsam", epochs=1, batch=64, limit_train=128, limit_test=50, compile=True)


@pytest.fixture(autouse=True)
def _as_in_a_new_process():
    compiler_trouble.cache_clear()
    yield
    compiler_trouble.cache_clear()
    torch.compiler.reset()


@pytest.fixture
def backend(monkeypatch):
    """Lets torch.compile hand its graphs to another compiler; what it was asked to compile."""
    asked, genuine = [], torch.compile

    def use(compiler):
        monkeypatch.setattr(torch, "compile", lambda what: asked.append(what) or genuine(what, backend=compiler))
        return asked

    return use


def trained(folder, run=RUN):
    """The metrics, what was told, and how the machine went about it."""
    told = []
    metrics = [{**epoch.metrics, "seconds": 0} for epoch in fit(run, folder, device="cpu", tell=told.append).epochs]
    (machine,) = json.loads((folder / "environment.json").read_text())
    return metrics, told, (machine["compiled"], machine["captured"], machine["processes"])


@pytest.mark.filterwarnings("ignore")  # whatever inductor has to say
def test_without_a_c_compiler_the_run_goes_on_without(tmp_path):
    from torch._inductor import config

    with config.patch({"cpp.cxx": (None, "/bin/false")}):
        metrics, told, how = trained(tmp_path / "run")
    (sentence,) = told
    assert sentence.startswith("torch.compile does not work here (No working C++ compiler found in ")
    assert sentence.endswith("'/bin/false')): the run goes on without.")
    assert how == (False, False, 1)
    assert (metrics, [], how) == trained(tmp_path / "plain", replace(RUN, compile=False))


@pytest.mark.parametrize(
    "error", [RuntimeError("Python 3.99 is not supported\nSorry"), OSError(30, "Read-only file system"), RuntimeError()]
)
def test_so_it_does_whatever_the_compiler_lacks(error, tmp_path, monkeypatch):
    def failing(what):
        raise error

    monkeypatch.setattr(torch, "compile", failing)
    _, told, how = trained(tmp_path / "run")
    reason = str(error).partition("\n")[0] or "RuntimeError"
    assert told == [f"torch.compile does not work here ({reason}): the run goes on without."]
    assert how == (False, False, 1)


def test_where_it_works_the_network_is_compiled_and_the_compiler_tried_once(tmp_path, backend):
    asked = backend("aot_eager")
    metrics, told, how = trained(tmp_path / "run")
    assert (told, how) == ([], (True, False, 1))
    (plain,), _, _ = trained(tmp_path / "plain", replace(RUN, compile=False))
    assert metrics == [pytest.approx(plain, rel=1e-5)]
    trained(tmp_path / "again")
    assert [isinstance(what, nn.Module) for what in asked] == [False, True, True]


@pytest.mark.parametrize("part", ["forward", "backward"])
def test_a_network_that_cannot_be_compiled_is_refused(part, tmp_path, backend, monkeypatch):
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor.exc import InductorError

    def failing(graph, inputs):
        raise InductorError(ValueError("no such operation\nand a stack"), inspect.currentframe())

    def easy(graph, inputs):
        return graph.forward

    monkeypatch.setattr("bsam.training.trainer.compiler_trouble", lambda device: None)
    backend(aot_autograd(fw_compiler=failing if part == "forward" else easy, bw_compiler=failing))
    with pytest.raises(
        bsam.BsamError,
        match=r"^compile is set, and torch\.compile cannot take digits_net \(no such operation\): leave compile out$",
    ):
        fit(RUN, tmp_path / "run", device="cpu")


def test_what_goes_wrong_in_the_network_is_not_blamed_on_the_compiler(backend):
    class Odd(Classification):
        def losses(self, outputs, batch):
            raise ZeroDivisionError("by itself")

    backend("eager")
    with pytest.raises(ZeroDivisionError, match="by itself"):
        fit(RUN, device="cpu", task=Odd)

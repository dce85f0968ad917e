"""Machines without a GPU, a compiler or bf16 instructions."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from torch import nn

import bsam
from bsam.lab.config import Run
from bsam.lab.tasks.classification import Classification
from bsam.lab.training import Machine, RunCallbacks, fit
from bsam.lab.training.machine import environment_info, is_bf16_emulated, pick_device, version_of, why_compile_fails

CPU = torch.device("cpu")
RUN = Run("bsam", epochs=1, batch=64, limit_train=64, limit_test=50, compile=True)


@pytest.mark.parametrize("count", [0, 1])
def test_pick_device(count, gpus):
    gpus(count)
    assert pick_device().type == pick_device("auto").type == ("cuda" if count else "cpu")
    assert pick_device("cpu") == CPU
    for name in ("cuda:1", "abacus", "mps", "", *(["cuda"] if not count else [])):
        with pytest.raises(bsam.BsamError, match="device"):
            pick_device(name)


@pytest.fixture
def backend(monkeypatch):
    """Return a function that sets the backend of torch.compile and returns the list of what gets compiled."""
    compiled, genuine = [], torch.compile

    def use(compiler):
        monkeypatch.setattr(torch, "compile", lambda f: compiled.append(f) or genuine(f, backend=compiler))
        return compiled

    why_compile_fails.cache_clear()
    yield use
    why_compile_fails.cache_clear()
    torch.compiler.reset()


def trained(folder, run=RUN):
    """Return the metrics, the messages, and how the steps were executed."""
    messages = []
    result = fit(run, folder, Machine("cpu"), callbacks=RunCallbacks(on_message=messages.append))
    (machine,) = json.loads((folder / "environment.json").read_text())
    metrics = {**result.last.metrics, "seconds": 0}
    return metrics, messages, (machine["compiled"], machine["captured"], machine["processes"])


def fail_to_compile(*_):
    raise OSError("No working C++ compiler\nin any of these folders")


def test_where_compiling_fails_the_run_continues_without_it(tmp_path, backend):
    backend(fail_to_compile)
    metrics, messages, execution = trained(tmp_path / "run")
    reason = why_compile_fails(CPU)
    assert reason.startswith("No working C++ compiler")
    assert "\n" not in reason
    assert messages == [f"torch.compile does not work on this machine ({reason}): continuing without it."]
    assert execution == (False, False, 1)
    assert (metrics, [], execution) == trained(tmp_path / "plain", replace(RUN, compile=False))


def test_where_compiling_works_the_network_is_compiled(tmp_path, backend):
    compiled = backend("aot_eager")
    metrics, messages, execution = trained(tmp_path / "run")
    assert (messages, execution) == ([], (True, False, 1))
    plain, _, _ = trained(tmp_path / "plain", replace(RUN, compile=False))
    assert metrics == pytest.approx(plain, rel=1e-5)
    assert why_compile_fails(CPU) is None
    assert [isinstance(f, nn.Module) for f in compiled] == [False, True]  # the compiler was tried once


def test_is_bf16_emulated(monkeypatch):
    assert is_bf16_emulated(CPU) is not torch.ops.mkldnn._is_mkldnn_bf16_supported()
    for supported in (True, False):
        monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda supported=supported: supported)
        assert is_bf16_emulated(CPU) is not supported
    assert not is_bf16_emulated(torch.device("cuda"))
    monkeypatch.setattr(torch._C, "_has_mkldnn", False)  # as torch is built for some platforms
    monkeypatch.delattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported")
    assert is_bf16_emulated(CPU)


class WithoutBf16(nn.Module):
    """Behaves as torch on a CPU without bf16: warns once, and turns oneDNN off for the whole process."""

    def __init__(self, warned: list[bool]) -> None:
        super().__init__()
        self.network, self.warned = nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), warned

    def forward(self, x):
        if torch.backends.mkldnn.enabled:
            self.warned.append(self.training)
            warnings.warn("mkldnn_matmul failed, switching to BLAS gemm:\nframe #0: ...", UserWarning, stacklevel=2)
            torch.backends.mkldnn.enabled = False
        return self.network(x)


def test_emulated_bf16_is_one_message_and_onednn_stays_on(monkeypatch):
    warned, messages = [], []
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    monkeypatch.setattr(Classification, "network", lambda task: WithoutBf16(warned))
    run = Run("sam", epochs=2, batch=64, limit_train=128, limit_test=64, precision="bf16")
    before = torch.backends.mkldnn.enabled
    torch.backends.mkldnn.enabled = True
    try:
        fit(run, machine=Machine("cpu"), callbacks=RunCallbacks(on_message=messages.append))  # warnings are errors
        assert torch.backends.mkldnn.enabled
    finally:
        torch.backends.mkldnn.enabled = before
    assert len(messages) == 1
    assert "bf16" in messages[0]
    assert warned == [True, False] * 2  # oneDNN was on again in each epoch and each evaluation


def test_strings_are_folders():
    assert Machine(data_dir="data", cache_dir=Path("cache")) == Machine(data_dir=Path("data"), cache_dir="cache")
    assert Machine("cpu", cache_dir="cache").folders == {"cache_dir": Path("cache")}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"device": "tpu"}, "device must be cpu, cuda or cuda:N, got 'tpu'"),
        ({"checkpoint_every": -1.0}, "checkpoint_every"),
        ({"checkpoint_every": float("nan")}, "checkpoint_every"),
        ({"checkpoint_every": float("inf")}, "checkpoint_every"),
        ({"checkpoint_every": "60"}, "checkpoint_every"),
        ({"checkpoint_every": None}, "checkpoint_every"),
        ({"jobs": 0}, "jobs"),
        ({"jobs": 2, "ray": ""}, "--jobs.*--ray"),
        ({"gpus_per_run": 0.5}, "--gpus-per-run.*needs ray"),
        ({"ray": "", "gpus_per_run": 1.5}, "gpus_per_run must be between 0 and 1, or a whole number; got 1.5"),
        ({"ray": "", "gpus_per_run": -1}, "gpus_per_run"),
        ({"ray": "", "device": "cuda:1"}, "with Ray, device must be"),
    ],
)
def test_wrong_options_of_the_machine(fields, words):
    with pytest.raises(bsam.BsamError, match=words):
        Machine(**fields)


def test_the_versions_of_packages_are_noted():
    info = environment_info()
    assert (info["torch"], info["numpy"]) == (version("torch"), version("numpy"))
    assert version_of("no-such-package") is None

"""What a machine lacks: GPUs, a compiler, instructions for bf16."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn

import bsam
from bsam.tasks.classification import Classification
from bsam.training.config import Run
from bsam.training.environment import is_bf16_emulated, pick_device, why_compile_fails
from bsam.training.loop import fit

CPU = torch.device("cpu")


@pytest.mark.parametrize("device", ["abacus", "mps", ""])
def test_a_device_of_another_kind_is_refused(device):
    with pytest.raises(bsam.BsamError, match=f"device must be cpu, cuda or cuda:N, got '{device}'"):
        pick_device(device)


@pytest.mark.parametrize("gpus", [0, 1])
def test_a_gpu_is_taken_if_it_is_there_and_refused_if_not(gpus, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert pick_device().type == pick_device("auto").type == ("cuda" if gpus else "cpu")
    assert pick_device("cpu") == CPU
    with pytest.raises(bsam.BsamError, match=rf"device is cuda:1, and torch sees {gpus} GPU\(s\) here: choose cpu"):
        pick_device("cuda:1")
    if not gpus:
        with pytest.raises(bsam.BsamError, match="device is cuda, and torch sees 0 GPU"):
            fit(Run("sgd", epochs=1), device="cuda")


RUN = Run("bsam", epochs=1, batch=64, limit_train=128, limit_test=50, compile=True)


@pytest.fixture(autouse=True)
def _as_in_a_new_process():
    why_compile_fails.cache_clear()
    yield
    why_compile_fails.cache_clear()
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
    metrics = [
        {**epoch.metrics, "seconds": 0} for epoch in fit(run, folder, device="cpu", on_message=told.append).epochs
    ]
    (machine,) = json.loads((folder / "environment.json").read_text())
    return metrics, told, (machine["compiled"], machine["captured"], machine["processes"])


@pytest.mark.filterwarnings("ignore")  # whatever inductor has to say
def test_without_a_c_compiler_the_run_goes_on_without(tmp_path):
    from torch._inductor import config

    with config.patch({"cpp.cxx": (None, "/bin/false")}):
        reason = why_compile_fails(CPU)
    assert reason.startswith("No working C++ compiler found in ")
    metrics, told, how = trained(tmp_path / "run")  # which finds the reason in the cache
    assert told == [f"torch.compile does not work on this machine ({reason}): continuing without it."]
    assert how == (False, False, 1)
    assert (metrics, [], how) == trained(tmp_path / "plain", replace(RUN, compile=False))


def test_where_it_works_the_network_is_compiled_and_the_compiler_tried_once(tmp_path, backend):
    asked = backend("aot_eager")
    metrics, told, how = trained(tmp_path / "run")
    assert (told, how) == ([], (True, False, 1))
    (plain,), _, _ = trained(tmp_path / "plain", replace(RUN, compile=False))
    assert metrics == [pytest.approx(plain, rel=1e-5)]
    trained(tmp_path / "again")
    assert [isinstance(what, nn.Module) for what in asked] == [False, True, True]


def test_what_torch_says_of_this_cpu_decides(monkeypatch):
    assert is_bf16_emulated(CPU) is not torch.ops.mkldnn._is_mkldnn_bf16_supported()
    for supported in (True, False):
        monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda supported=supported: supported)
        assert is_bf16_emulated(CPU) is not supported
    assert not is_bf16_emulated(torch.device("cuda"))
    monkeypatch.setattr(torch._C, "_has_mkldnn", False)  # as torch is built for some platforms
    monkeypatch.delattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported")
    assert is_bf16_emulated(CPU)


BF16 = Run("sam", epochs=2, batch=64, limit_train=128, limit_test=64, precision="bf16")
SENTENCE = "This CPU has no bf16 instructions: bf16 will be many times slower than fp32 (the default)."
TORCH_SAYS = (
    "mkldnn_matmul failed, switching to BLAS gemm:"
    "mkldnn_matmul: mkldnn_matmul bf16 path needs a cpu with bf16 support\n"
    "Exception raised from mkldnn_matmul at aten/src/ATen/native/mkldnn/Matmul.cpp:286 (most recent call first):\n"
    "frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0xd4\n"
)


class Neoverse(nn.Module):
    """Multiplies as torch does on such a CPU: it warns once, and turns oneDNN off for the whole process."""

    def __init__(self, network: nn.Module, warned: list[bool]) -> None:
        super().__init__()
        self.network, self.warned = network, warned

    def forward(self, x):
        if torch.backends.mkldnn.enabled:
            self.warned.append(self.training)
            warnings.warn(TORCH_SAYS, UserWarning, stacklevel=2)
            torch.backends.mkldnn.enabled = False
        return self.network(x)


@pytest.fixture
def without_bf16(monkeypatch):
    """When the stand-in for torch warned: True in training, False in evaluation."""
    before, warned = torch.backends.mkldnn.enabled, []
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    network = Classification.network
    monkeypatch.setattr(Classification, "network", lambda task: Neoverse(network(task), warned))
    torch.backends.mkldnn.enabled = True
    yield warned
    torch.backends.mkldnn.enabled = before


def test_it_is_said_in_a_sentence_and_torch_is_silent(without_bf16):
    told = []
    fit(BF16, device="cpu", on_message=told.append)  # warnings are errors
    assert told == [SENTENCE]
    assert without_bf16 == [True, False] * 2  # each epoch and each evaluation finds oneDNN as the first one did ...
    assert torch.backends.mkldnn.enabled  # ... and so does what comes after the run

"""bf16 on CPUs without instructions for it, as Neoverse-N1: simulated where this one has them."""

import os
import platform
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import bsam
from bsam.training.bf16 import emulated, is_emulated
from bsam.tasks.classification import Classification
from bsam.training.config import Run
from bsam.training.loop import fit

CPU = torch.device("cpu")
RUN = Run("sam", epochs=2, batch=64, limit_train=128, limit_test=64, precision="bf16")
SENTENCE = "This CPU has no instructions for bf16: it is many times slower here than fp32, which is the default."
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
    fit(RUN, device="cpu", tell=told.append)  # warnings are errors
    assert told == [SENTENCE]
    assert without_bf16 == [True, False] * 2  # each epoch and each evaluation finds oneDNN as the first one did ...
    assert torch.backends.mkldnn.enabled  # ... and so does what comes after the run


def test_another_precision_is_not_told_of_and_hides_nothing(without_bf16):
    told = []
    with pytest.raises(UserWarning, match="mkldnn_matmul failed"):
        fit(Run(**{**RUN.settings(), "precision": "fp32"}), device="cpu", tell=told.append)
    assert told == []


def test_only_that_warning_is_silenced():
    with emulated(), pytest.raises(UserWarning, match="something else"):
        warnings.warn("something else", stacklevel=1)
    with emulated(on=False), pytest.raises(UserWarning, match="mkldnn_matmul failed"):
        warnings.warn(TORCH_SAYS, stacklevel=1)


def test_what_torch_says_of_this_cpu_decides(monkeypatch):
    assert is_emulated(CPU) is not torch.ops.mkldnn._is_mkldnn_bf16_supported()
    for supported in (True, False):
        monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda supported=supported: supported)
        assert is_emulated(CPU) is not supported
    assert not is_emulated(torch.device("cuda"))
    monkeypatch.setattr(torch._C, "_has_mkldnn", False)  # as torch is built for some platforms
    monkeypatch.delattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported")
    assert is_emulated(CPU)


def test_a_real_run_of_the_command_line_on_a_cpu_with_fewer_instructions(tmp_path):
    """oneDNN can be told to use AVX2 at most; elsewhere than on x86_64 that changes nothing, and the CPU decides."""
    environment = {**os.environ, "PYTHONPATH": str(Path(bsam.__file__).parents[1]), "ONEDNN_MAX_CPU_ISA": "AVX2"}
    code = (
        "import sys, torch; from bsam.cli import main; print(torch.ops.mkldnn._is_mkldnn_bf16_supported());"
        "sys.exit(main(['train', '--method', 'sgd', '--epochs', '1', '--limit-train', '16', '--limit-test', '10',"
        "'--batch', '16', '--precision', 'bf16', '--device', 'cpu', '--out', sys.argv[1]]))"
    )
    found = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    supported, *lines = found.stdout.splitlines()
    assert found.stderr == ""
    assert lines.count(SENTENCE) == (supported == "False")
    assert supported == "False" or platform.machine() != "x86_64"

"""What ``optimizer.check`` finds in the first steps of an example."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch

import bsam

# These are checked in tests/integrations, whose processes import the frameworks anyway. Lightning's example calls check
# itself: the closures of the first steps have already run.
FRAMEWORKS = ("accelerate_loop", "fabric_loop", "ignite_engine", "lightning_module", "peft_lora", "skorch_classifier")
FRAMEWORKS += ("timm_loop", "transformers_trainer")


class Checked(BaseException):
    """Ends an example after the first steps; not an Exception, which frameworks catch."""


def first_findings(path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Return what check finds in the closures of the first two steps of an example, which then ends."""
    findings, backward = [], bsam.SharpnessAware.backward

    def checked(self, closure, scaler=None):
        findings.append(self.check(closure))
        if len(findings) == 2:
            raise Checked
        return backward(self, closure, scaler)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(bsam.SharpnessAware, "backward", checked)
    try:
        with pytest.raises(Checked):
            runpy.run_path(str(path))["main"]()
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    return findings

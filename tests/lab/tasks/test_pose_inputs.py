from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest
import torch

from bsam.lab.config import Run
from bsam.lab.data.persons import LSP, MPII
from bsam.lab.models.timm_networks import RESNET50
from bsam.lab.tasks.pose import Pose, PoseInputs
from pose_runs import draw_figures

INPUTS = PoseInputs(32, 1.5, (0.1, 0.2, 0.3), (0.4, 0.5, 0.6), MPII)
RUN = Run.of("sgd", task="pose", model="simcc_resnet8", data="stick_figures")


@pytest.mark.parametrize("skeleton", [LSP, MPII])
def test_json_holds_all(skeleton):
    inputs = replace(INPUTS, skeleton=skeleton)
    written = json.loads(json.dumps(asdict(inputs)))
    assert PoseInputs.from_json(written) == inputs
    assert hash(PoseInputs.from_json(written).skeleton) == hash(skeleton)  # it is looked up


def test_the_network_is_that_of_the_settings():
    network, same, other = (INPUTS.network(replace(RUN, seed=seed)) for seed in (1, 1, 2))
    assert network(torch.zeros(2, 3, 32, 32)).shape == (2, 16, 2, 48)
    assert all(torch.equal(a, b) for a, b in zip(network.parameters(), same.parameters(), strict=True))
    assert not torch.equal(network.head.maps.weight, other.head.maps.weight)
    assert all(p.requires_grad for p in network.parameters())
    frozen = INPUTS.network(replace(RUN, freeze_backbone=True))
    assert {name.partition(".")[0] for name, p in frozen.named_parameters() if p.requires_grad} == {"head"}
    assert {name.partition(".")[0] for name, p in frozen.named_parameters() if not p.requires_grad} == {"backbone"}


def test_normalisation_is_that_of_the_backbones_pretraining(monkeypatch):
    draw_figures(4, monkeypatch)
    for model, mean in (("simcc_resnet8", (0.485, 0.456, 0.406)), ("simcc_resnet50", RESNET50.mean)):
        task = Pose(replace(RUN, model=model, image_size=32), torch.device("cpu"))
        assert task.inputs.mean == mean
        assert task.inputs.std == (0.229, 0.224, 0.225)
        assert task.inputs.augment().mean == mean

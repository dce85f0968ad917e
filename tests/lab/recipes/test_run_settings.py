"""Recipes with the weights of files."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

import bsam
from bsam.lab.recipes.image_recipes import transfer
from bsam.lab.recipes.pose_recipe import pose
from bsam.lab.recipes.run_settings import check_weights_given, with_weights
from bsam.lab.recipes.scales import scale_of

LITE = [f"timm:tf_efficientnet_lite{i}" for i in range(3)]


@pytest.fixture
def files(tmp_path):
    """Empty networks, in files that say what they are of."""
    for name in ("resnet50", "timm:resnet50", *LITE[:2], "timm:resnet18", None):
        metadata = {} if name is None else {"bsam_model": name}
        save_file({"a": torch.zeros(1)}, tmp_path / f"{name}.safetensors".replace(":", "-"), metadata)
    return tmp_path


def test_files_replace_the_networks_that_they_stand_for(files):
    runs = transfer(scale_of("short"))
    names = ["resnet50.safetensors", "timm-tf_efficientnet_lite0.safetensors", "timm-tf_efficientnet_lite1.safetensors"]
    found = with_weights(runs, names, files)
    of = {
        network: [run for run in runs if run.model == network] for network in ("timm:efficientnet_b0", "timm:resnet50")
    }
    assert found == [
        replace(run, model=model, weights=name)
        for model, name, paper in zip(
            ("resnet50", *LITE), names, ("timm:resnet50", *["timm:efficientnet_b0"] * 2), strict=False
        )
        for run in of[paper]
    ]
    assert {run.weight_decay for run in found if run.model in LITE} == {1e-5}
    own = with_weights(runs, [str(files / "timm-resnet50.safetensors")])
    assert own == [replace(run, weights=str(files / "timm-resnet50.safetensors")) for run in of["timm:resnet50"]]


@pytest.mark.parametrize(
    ("runs", "names", "word"),
    [
        (transfer(scale_of("paper")), ["resnet50.safetensors", "timm-resnet18.safetensors"], "timm:resnet18"),
        (transfer(scale_of("paper")), ["None.safetensors"], "unnamed"),
        (transfer(scale_of("paper")), ["nowhere.safetensors"], "nowhere"),
        (transfer(scale_of("smoke")), ["resnet50.safetensors"], "random"),
        (pose(scale_of("smoke")), ["resnet50.safetensors"], "random"),
        (pose(scale_of("short")), ["timm-resnet50.safetensors"], "timm:resnet50"),
        # two files for one network: their numbers would be taken for those of two seeds
        (pose(scale_of("short")), ["resnet50.safetensors", "./resnet50.safetensors"], "second"),
    ],
)
def test_files_that_do_not_fit(runs, names, word, files):
    with pytest.raises(bsam.BsamError, match=word):
        with_weights(runs, names, files)


def test_poses_begin_with_the_weights_of_their_backbone(files):
    for scale in ("short", "paper"):
        runs = pose(scale_of(scale))
        found = with_weights(runs, ["resnet50.safetensors"], files)
        assert found == [replace(run, weights="resnet50.safetensors") for run in runs]
        assert {run.model for run in found} == {"simcc_resnet50"}
        check_weights_given(found)
    for others in (pose(scale_of("smoke")), transfer(scale_of("smoke")), transfer(scale_of("paper"))):
        check_weights_given(others)

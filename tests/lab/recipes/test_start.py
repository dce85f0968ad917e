"""Recipes with the weights of files."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

import bsam
from bsam.lab.paper import of_paper
from bsam.lab.recipes import RECIPES
from bsam.lab.recipes.start import check_weights_given, weights_by_network

LITE = [f"timm:tf_efficientnet_lite{i}" for i in range(2)]


@pytest.fixture
def files(tmp_path):
    """Empty networks, in files that say what they are of."""
    for name in ("resnet50", "timm:resnet50", *LITE, "timm:resnet18", None):
        metadata = {} if name is None else {"bsam_model": name}
        save_file({"a": torch.zeros(1)}, tmp_path / f"{name}.safetensors".replace(":", "-"), metadata)
    return tmp_path


def plans_of(recipe, scale, names=(), folder=None):
    return RECIPES[recipe](scale, 1, weight_files=weights_by_network(names, folder)).plans


def test_files_replace_the_networks_that_they_stand_for(files):
    names = [f"{name}.safetensors" for name in ("resnet50", "timm-tf_efficientnet_lite0", "timm-tf_efficientnet_lite1")]
    original = [plan.run for plan in plans_of("transfer", "short")]
    found = plans_of("transfer", "short", names, files)
    stand_ins = zip(("resnet50", *LITE), names, ("timm:resnet50", *["timm:efficientnet_b0"] * 2), strict=True)
    assert [plan.run for plan in found] == [
        replace(run, model=model, weights=name)
        for model, name, paper in stand_ins
        for run in original
        if run.model == paper
    ]
    assert found[0].about["section"] == "ResNet-50"
    numbers = {of_paper(plan.run, table="transfer")["published"] for plan in found if plan.run.method == "base"}
    assert numbers == {77.11, 87.89, 86.74, 93.11}
    for scale in ("short", "paper"):  # the weights of the backbone
        poses = plans_of("pose", scale, ["resnet50.safetensors"], files)
        assert {(plan.run.model, plan.run.weights) for plan in poses} == {("simcc_resnet50", "resnet50.safetensors")}
        check_weights_given(poses)
    for others in (plans_of("pose", "smoke"), plans_of("transfer", "smoke"), plans_of("transfer", "paper")):
        check_weights_given(others)


@pytest.mark.parametrize(
    ("recipe", "scale", "names", "word"),
    [
        ("transfer", "paper", ["resnet50.safetensors", "timm-resnet18.safetensors"], "timm:resnet18"),
        ("transfer", "paper", ["None.safetensors"], "unnamed"),
        ("transfer", "paper", ["nowhere.safetensors"], "nowhere"),
        ("transfer", "smoke", ["resnet50.safetensors"], "random"),
        ("pose", "smoke", ["resnet50.safetensors"], "random"),
        ("classification", "paper", ["resnet50.safetensors"], "random"),
        ("pose", "short", ["timm-resnet50.safetensors"], "timm:resnet50"),
        # two files for one network: their numbers would be taken for those of two seeds
        ("pose", "short", ["resnet50.safetensors", "./resnet50.safetensors"], "second"),
    ],
)
def test_files_that_do_not_fit(recipe, scale, names, word, files):
    with pytest.raises(bsam.BsamError, match=word):
        plans_of(recipe, scale, names, files)

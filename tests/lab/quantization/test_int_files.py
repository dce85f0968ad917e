"""Files with packed codes."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from bsam.lab.models import build
from bsam.lab.quantization import calibrate, convert, load_quantized, quantize, save_quantized
from bsam.lab.quantization.int_files import pack, unpack


@pytest.mark.parametrize("shape", [(1,), (16,), (3, 5), (2, 3, 3, 3)])
def test_packing_round_trips(shape):
    n = torch.Size(shape).numel()
    codes = (torch.arange(n) % 16 - 8).to(torch.int8).view(shape)
    packed = pack(codes)
    assert packed.dtype == torch.uint8
    flat = [*codes.flatten().tolist(), 0]
    assert packed.tolist() == [(flat[i] & 15) | ((flat[i + 1] & 15) << 4) for i in range(0, n, 2)]
    assert torch.equal(unpack(packed, shape), codes)


def converted(name="resnet8", bits=4, **settings):
    torch.manual_seed(0)
    model = quantize(build(name, seed=0), bits, bits, **settings)
    calibrate(model, torch.randn(2, 3, 8, 8))
    return convert(model)


@pytest.mark.parametrize(("bits", "settings"), [(2, {"fold_batch_norm": True}), (4, {}), (5, {"scheme": "minmax"})])
def test_loaded_networks_are_the_same(tmp_path, bits, settings):
    model, path = converted(bits=bits, **settings), tmp_path / "net.safetensors"
    assert save_quantized(model, path) == path.stat().st_size
    other = build("resnet8", seed=1)
    before = {name: t.clone() for name, t in other.state_dict().items()}
    loaded = load_quantized(str(path), other)
    x = torch.randn(4, 3, 8, 8)
    with torch.no_grad():
        assert torch.equal(loaded(x), model(x))
    assert all(torch.equal(t, before[name]) for name, t in other.state_dict().items())
    stored = load_file(path)["stages.0.0.conv1.weight"]
    assert stored.dtype == (torch.uint8 if bits <= 4 else torch.int8)
    assert stored.numel() == 16 * 16 * 9 // (2 if bits <= 4 else 1)


def test_size_of_a_4_bit_resnet18(tmp_path):
    model = build("resnet18", seed=0)
    save_file({name: t.contiguous() for name, t in model.state_dict().items()}, tmp_path / "float.safetensors")
    quantized = quantize(model)
    calibrate(quantized, torch.randn(1, 3, 8, 8))
    size = save_quantized(convert(quantized), tmp_path / "net.safetensors")
    assert 0.12 < size / (tmp_path / "float.safetensors").stat().st_size < 0.128


def test_shared_layers_and_single_layers(tmp_path):
    conv = nn.Conv2d(2, 2, 1)
    for model in (nn.Sequential(conv, nn.ReLU(), conv), conv):
        quantized = quantize(model)
        calibrate(quantized, torch.randn(4, 2, 3, 3))
        ready = convert(quantized)
        save_quantized(ready, tmp_path / "net.safetensors")
        loaded, x = load_quantized(tmp_path / "net.safetensors", model), torch.randn(4, 2, 3, 3)
        assert torch.equal(loaded(x), ready(x))

"""Properties of every network in the registry."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bsam.lab.models import MODELS, ModelEntry, build
from bsam.lab.models.cifar import DigitsNet, MobileNetV1, PyramidNet, ResNet, WideResNet

SMALL = [name for name, entry in MODELS.items() if entry.parameters < 10**6]
SMALL_FOR_32 = [name for name in SMALL if MODELS[name].images == 32]


def images(entry: ModelEntry, side: int | None = None, n: int = 2) -> Tensor:
    side = entry.images if side is None else side
    x = torch.randn(n, entry.channels, side, side, generator=torch.Generator().manual_seed(0))
    return x.to(memory_format=entry.memory_format)


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def conv(width_in: int, width: int, size: int = 3) -> int:
    return width_in * width * size * size


def bn(width: int) -> int:
    return 2 * width


def residual(stem: int, widths: list[list[int]], classes: int, channels: int) -> int:
    """Stem, linear layer, and in each block two convolutions, two norms, and perhaps a projection with norm."""
    total, before = conv(channels, stem) + bn(stem), stem
    for width in (width for stage in widths for width in stage):
        total += conv(before, width) + bn(width) + conv(width, width) + bn(width)
        total += conv(before, width, 1) + bn(width) if before != width else 0
        before = width
    return total + (before + 1) * classes


def bottlenecks(classes: int, channels: int) -> int:
    """3, 4, 6 and 3 blocks of three convolutions with norms, and a projection with norm in each stage."""
    total, before = conv(channels, 64, 7) + bn(64), 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        total += conv(before, 4 * width, 1) + bn(4 * width)
        for _ in range(blocks):
            total += (
                conv(before, width, 1) + conv(width, width) + conv(width, 4 * width, 1) + 2 * bn(width) + bn(4 * width)
            )
            before = 4 * width
    return total + (before + 1) * classes


def wide(depth: int, widen: int, classes: int, channels: int) -> int:
    """Norms come before convolutions, projections have none, and a norm follows the last block."""
    total, before = conv(channels, 16), 16
    for width in (16 * widen, 32 * widen, 64 * widen):
        for _ in range((depth - 4) // 6):
            total += bn(before) + conv(before, width) + bn(width) + conv(width, width)
            total += conv(before, width, 1) if before != width else 0
            before = width
    return total + bn(before) + (before + 1) * classes


def pyramid(blocks: int, more: int, classes: int, channels: int) -> int:
    """Each block is ``more`` channels wider than the last and has three norms; shortcuts have no weights."""
    total = conv(channels, 16) + bn(16)
    for k in range(blocks):
        before, width = 16 + more * k, 16 + more * (k + 1)
        total += bn(before) + conv(before, width) + bn(width) + conv(width, width) + bn(width)
    last = 16 + more * blocks
    return total + bn(last) + (last + 1) * classes


def mobile(widths: list[int], classes: int, channels: int) -> int:
    """Each block has a 3x3 kernel per channel, a 1x1 convolution, and a norm after both."""
    total = conv(channels, widths[0]) + bn(widths[0])
    for before, width in itertools.pairwise(widths):
        total += conv(before, 1) + bn(before) + conv(before, width, 1) + bn(width)
    return total + (widths[-1] + 1) * classes


def vit(patch: int, width: int, depth: int, side: int, classes: int, channels: int) -> int:
    """Patches, a class token and positions; in each block two norms, queries, keys, values, a projection, and an MLP of
    four times the width; all with bias, and a norm follows the last block."""
    patches = (channels * patch**2 + 1) * width + width + (side**2 // patch**2 + 1) * width
    block = 2 * bn(width) + 4 * (width + 1) * width + (width + 1) * 4 * width + (4 * width + 1) * width
    return patches + depth * block + bn(width) + (width + 1) * classes


def simcc(features: int, width: int, cells: int, bins: int, joints: int) -> int:
    """The backbone, a convolution with bias, and two linear layers with bias."""
    return features + (width + 1) * joints + 2 * (cells + 1) * bins


def by_hand(name: str, classes: int, channels: int) -> int:
    return {
        "digits_net": lambda: conv(channels, 16) + bn(16) + conv(16, 32) + bn(32) + (32 * 16 + 1) * classes,
        "resnet8": lambda: residual(16, [[16], [32], [64]], classes, channels),
        "resnet20": lambda: residual(16, [[16] * 3, [32] * 3, [64] * 3], classes, channels),
        "resnet18": lambda: residual(64, [[64] * 2, [128] * 2, [256] * 2, [512] * 2], classes, channels),
        "resnet50": lambda: bottlenecks(classes, channels),
        "wide_resnet10_1": lambda: wide(10, 1, classes, channels),
        "wide_resnet28_10": lambda: wide(28, 10, classes, channels),
        "pyramidnet8": lambda: pyramid(3, 16, classes, channels),
        "pyramidnet110": lambda: pyramid(54, 5, classes, channels),
        "mobilenet_v1": lambda: mobile([32, 64, 128, 128, 256, 256, *[512] * 6, 1024, 1024], classes, channels),
        "mobilenet_v1_small": lambda: mobile([8, 16, 32, 32, 64], classes, channels),
        "vit-nano": lambda: vit(2, 64, 2, 16, classes, channels),
        "vit-tiny": lambda: vit(4, 192, 12, 32, classes, channels),
        "vit-small": lambda: vit(4, 384, 12, 32, classes, channels),
        "simcc_resnet8": lambda: simcc(residual(16, [[16], [32], [64]], 0, channels), 64, 16 * 16, 128, classes),
        "simcc_resnet50": lambda: simcc(bottlenecks(0, channels), 2048, 8 * 8, 512, classes),
    }[name]()


@pytest.mark.parametrize("name", MODELS)
def test_number_of_parameters(name, monkeypatch):
    for function in ("kaiming_normal_", "kaiming_uniform_", "normal_", "trunc_normal_", "uniform_"):
        monkeypatch.setattr(nn.init, function, lambda tensor, *_, **__: tensor)  # slow on the meta device
    with torch.device("meta"):
        assert count(build(name)) == by_hand(name, 10, MODELS[name].channels) == MODELS[name].parameters
        assert count(build(name, classes=7, channels=2)) == by_hand(name, 7, 2)


@pytest.mark.parametrize("name", SMALL)
def test_every_parameter_gets_a_gradient_and_every_statistic_changes(name):
    is_mobile, is_pose = name.startswith("mobilenet"), MODELS[name].backbone is not None
    model = build(name, classes=7, seed=0, **({"side": 16} if is_pose else {}))
    assert all(p.is_contiguous(memory_format=MODELS[name].memory_format) for p in model.parameters() if p.dim() == 4)
    before = copy.deepcopy(dict(model.named_buffers()))
    last_block = f"blocks.{len(model.blocks) - 1}." if is_mobile else ()
    out = model(images(MODELS[name], side=16 if is_pose else None))
    assert out.shape == ((2, 7, 2, 32) if is_pose else (2, 7))
    F.cross_entropy(out.flatten(1), torch.tensor([1, 5])).backward()
    for key, p in model.named_parameters():
        assert p.grad is not None, key
        assert p.grad.isfinite().all(), key
        # in a pyramid, every later norm cancels a shift of a whole channel
        idle = name.startswith("pyramid") and (key == "bn.bias" or key.endswith("bn3.bias"))
        # as long as biases are 0, the next norm cancels the factor of a channel and of a depthwise convolution
        idle |= is_mobile and (key == "bn.weight" or key.endswith("bn2.weight")) and not key.startswith(last_block)
        assert (p.grad.norm() > (1e-3 if is_mobile else 1e-5)) != idle, key
    assert all(not b.equal(before[key]) for key, b in model.named_buffers())


@pytest.mark.parametrize(
    ("make", "shapes"),
    [
        (lambda: ResNet((64, 128, 256, 512), 2), [(64, 32), (128, 16), (256, 8), (512, 4)]),
        (lambda: ResNet((16, 32, 64), 3), [(16, 32), (32, 16), (64, 8)]),
        (lambda: WideResNet(16, 2), [(32, 32), (64, 16), (128, 8)]),
        (lambda: PyramidNet(8, 20), [(23, 32), (29, 16), (36, 8)]),  # 16 + 6.67 k, rounded
        (lambda: PyramidNet(20, 27), [(25, 32), (34, 16), (43, 8)]),
        (MobileNetV1, [(64, 32), *[(128, 16)] * 2, *[(256, 8)] * 2, *[(512, 4)] * 6, *[(1024, 2)] * 2]),
    ],
    ids=["resnet18", "resnet20", "wide_resnet16_2", "pyramidnet8", "pyramidnet20", "mobilenet_v1"],
)
def test_shapes_after_each_stage(make, shapes):
    sizes = []
    with torch.device("meta"):
        model = make()
        for stage in model.blocks if isinstance(model, MobileNetV1) else model.stages:
            stage.register_forward_hook(lambda _module, _x, out: sizes.append(tuple(out.shape)))
        model(torch.zeros(2, 3, 32, 32))
    assert sizes == [(2, width, side, side) for width, side in shapes]


def test_widths_of_pyramidnet110():
    with torch.device("meta"):
        model = PyramidNet(110, 270)
    assert [len(stage) for stage in model.stages] == [18, 18, 18]
    assert [block.conv2.out_channels for stage in model.stages for block in stage] == list(range(21, 287, 5))
    assert [block.conv1.stride[0] for stage in model.stages for block in stage].count(2) == 2


@pytest.mark.parametrize("name", SMALL_FOR_32)
@pytest.mark.parametrize("side", [8, 33])
def test_images_of_other_sides(name, side):
    assert build(name, seed=0).eval()(images(MODELS[name], side=side)).shape == (2, 10)


@pytest.mark.parametrize("name", SMALL)
def test_seeds_decide_every_weight_and_keep_the_random_state(name, monkeypatch):
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda seed: pytest.fail("the GPUs were reseeded"))
    torch.default_generator.manual_seed(5)
    before = torch.get_rng_state()
    first = build(name, seed=3).state_dict()
    assert torch.get_rng_state().equal(before)
    torch.rand(7)
    again = build(name, seed=3).state_dict()
    other = build(name, seed=4).state_dict()
    assert all(again[key].equal(value) for key, value in first.items())
    kernels = [key for key, value in first.items() if value.dim() > 1]
    assert kernels
    assert all(not other[key].equal(first[key]) for key in kernels)


def test_global_generator_is_used_without_a_seed():
    torch.manual_seed(9)
    first, second = build("resnet8").state_dict(), build("resnet8").state_dict()
    seeded = build("resnet8", seed=9).state_dict()
    assert all(seeded[key].equal(value) for key, value in first.items())
    assert not second["conv.weight"].equal(first["conv.weight"])


def test_digits_net_equals_its_constructor_bit_for_bit():
    torch.manual_seed(3)
    plain = DigitsNet(10)
    built = build("digits_net", seed=3)
    assert isinstance(built, DigitsNet)
    for p, q in zip(plain.parameters(), built.parameters(), strict=True):
        assert p.equal(q)
        assert p.stride() == q.stride()
    x = torch.randn(4, 1, 8, 8)
    assert plain(x).equal(built(x))


def test_initial_weights():
    for name in ("resnet20", "wide_resnet10_1", "pyramidnet8", "mobilenet_v1_small"):
        model = build(name, seed=0)
        for module in model.modules():
            if isinstance(module, nn.Conv2d):
                assert module.bias is None
                # an input of a grouped convolution reaches only the outputs of its group
                w, fan_out = module.weight, module.out_channels // module.groups * module.kernel_size[0] ** 2
                off = 6 * (2 * w.numel()) ** -0.5  # six standard errors of a standard deviation
                assert float(w.detach().std()) == pytest.approx((2 / fan_out) ** 0.5, rel=off)
            if isinstance(module, nn.BatchNorm2d):
                assert bool((module.weight == 1).all())
                assert not module.bias.any()
        bound = model.linear.in_features**-0.5
        assert 0.9 * bound < float(model.linear.weight.detach().abs().max()) <= bound
        assert bool(model.linear.bias.any()) == name.startswith(("resnet", "mobilenet"))


def test_default_device():
    with torch.device("meta"):
        assert {p.device.type for seed in (None, 0) for p in build("resnet8", seed=seed).parameters()} == {"meta"}
    assert {p.device.type for p in build("resnet8", seed=0).parameters()} == {"cpu"}


@pytest.mark.parametrize("name", ["resnet8", "pyramidnet8"])
def test_networks_compile_without_graph_breaks(name):
    model = build(name, seed=0)
    x, y = images(MODELS[name], side=8), torch.tensor([1, 5])
    compiled = torch.compile(copy.deepcopy(model), backend="eager", fullgraph=True)
    for net in (model, compiled):
        F.cross_entropy(net(x), y).backward()
    for p, q in zip(model.parameters(), compiled.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-5)


def norm(name: str) -> list[str]:
    return [f"{name}.{part}" for part in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")]


def test_names_in_the_state_dict():
    residual, preactive, pyramidal = [], [], []
    for stage in range(3):
        at = f"stages.{stage}.0"
        residual += [f"{at}.conv1.weight", *norm(f"{at}.bn1"), f"{at}.conv2.weight", *norm(f"{at}.bn2")]
        residual += [f"{at}.shortcut.0.weight", *norm(f"{at}.shortcut.1")] if stage else []
        preactive += [*norm(f"{at}.bn1"), f"{at}.conv1.weight", *norm(f"{at}.bn2"), f"{at}.conv2.weight"]
        preactive += [f"{at}.projection.weight"] if stage else []
        pyramidal += [*norm(f"{at}.bn1"), f"{at}.conv1.weight", *norm(f"{at}.bn2"), f"{at}.conv2.weight"]
        pyramidal += norm(f"{at}.bn3")
    linear = ["linear.weight", "linear.bias"]
    mobile = []
    for block in range(4):
        at = f"blocks.{block}"
        mobile += [f"{at}.depthwise.weight", *norm(f"{at}.bn1"), f"{at}.pointwise.weight", *norm(f"{at}.bn2")]
    names = {
        "resnet8": ["conv.weight", *norm("bn"), *residual, *linear],
        "wide_resnet10_1": ["conv.weight", *preactive, *norm("bn"), *linear],
        "pyramidnet8": ["conv.weight", *norm("bn"), *pyramidal, *norm("bn_last"), *linear],
        "mobilenet_v1_small": ["conv.weight", *norm("bn"), *mobile, *linear],
        "digits_net": ["0.weight", *norm("1"), "3.weight", *norm("4"), "7.weight", "7.bias"],
    }
    with torch.device("meta"):
        assert {name: list(build(name).state_dict()) for name in names} == names
        assert sum(key.endswith("conv2.weight") for key in build("pyramidnet110").state_dict()) == 54
        assert list(build("resnet18").state_dict())[-8:-2] == ["stages.3.1.conv2.weight", *norm("stages.3.1.bn2")]

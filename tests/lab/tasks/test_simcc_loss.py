"""Labels, loss, decoding and flip test of SimCC against plain loops."""

from __future__ import annotations

import math

import pytest
import torch

from bsam.lab.tasks.pose_outputs import decode, flip_merge, scored_joints, simcc_labels, simcc_losses

NAN = math.nan
SIDE, K, SIGMA = 8, 2.0, 1.5


def label_loop(coordinate, bins, k, sigma):
    weights = [math.exp(-((b - coordinate * k) ** 2) / (2 * sigma**2)) for b in range(bins)]
    return [weight / sum(weights) for weight in weights]


def log_softmax_loop(values):
    top = max(values)
    total = sum(math.exp(value - top) for value in values)
    return [value - top - math.log(total) for value in values]


def losses_loop(logits, y, k, sigma):
    losses = []
    for sample, joints in zip(logits.tolist(), y.tolist(), strict=True):
        counted = []
        for axes, (x, y_, visible) in zip(sample, joints, strict=True):
            side = len(axes[0]) / k
            if not visible or not -0.5 <= x < side - 0.5 or not -0.5 <= y_ < side - 0.5:
                continue
            both = 0.0
            for values, coordinate in zip(axes, (x, y_), strict=True):
                label = label_loop(coordinate, len(values), k, sigma)
                logs = log_softmax_loop(values)
                both += sum(p * (math.log(p) - log) for p, log in zip(label, logs, strict=True) if p)
            counted.append(both)
        losses.append(sum(counted) / len(counted) if counted else 0.0)
    return losses


def random_batch(dtype=torch.float64, n=4, joints=5, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(n, joints, 2, int(SIDE * K), generator=generator, dtype=dtype)
    y = torch.rand(n, joints, 3, generator=generator, dtype=dtype) * (SIDE - 1)
    y[..., 2] = torch.rand(n, joints, generator=generator) < 0.6
    y[0, 0], y[0, 1], y[0, 2] = torch.tensor([[-0.4, 7.4, 1], [3, 99, 1], [-9, 3, 1]], dtype=dtype)
    y[1, :, 2] = 0
    y[2, 0], y[2, 1] = torch.tensor([[NAN, NAN, 0], [math.inf, 1, 0]], dtype=dtype)
    y[2, 3:, 2] = y[3, :, 2] = 1
    return logits, y


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("sigma", [SIGMA, 0.2])  # with the second, probabilities are 0
def test_losses_are_those_of_a_loop(dtype, sigma):
    logits, y = random_batch(dtype)
    found = simcc_losses(logits, y, K, sigma)
    assert (found.dtype, found.shape) == (dtype, (4,))
    assert found.tolist() == pytest.approx(losses_loop(logits, y, K, sigma), rel=1e-6, abs=1e-6)
    assert found[1] == 0
    assert found[[0, 2, 3]].gt(0).all()


def test_a_joint_counts_if_it_is_visible_and_within_the_outer_pixels():
    y = torch.tensor([[[a, b, 1.0] for a, b in ((-0.5, 3), (-0.51, 3), (3, 7.49), (3, 7.5), (NAN, 3), (3, NAN))]])
    assert scored_joints(y, 8).tolist() == [[True, False, True, False, False, False]]
    y[..., 2] = 0
    assert not scored_joints(y, 8).any()
    assert scored_joints(torch.tensor([[[1.0, 1.0, 2.0]]]), 8).all()  # any flag above 0


def test_joints_that_do_not_count_have_no_influence():
    logits, y = random_batch()
    logits.requires_grad_()
    simcc_losses(logits, y, K, SIGMA).sum().backward()
    left_out = ~scored_joints(y, SIDE)
    assert 0 < left_out.sum() < left_out.numel()
    assert logits.grad[left_out].eq(0).all()
    assert logits.grad[~left_out].ne(0).any((-1, -2)).all()
    other = torch.where(left_out[..., None], torch.tensor([NAN, -math.inf, 0.0]), y)
    assert simcc_losses(logits, other, K, SIGMA).equal(simcc_losses(logits, y, K, SIGMA))


def test_gradients_are_finite_differences():
    logits, y = random_batch()
    logits, y = logits[:3, :3].clone().requires_grad_(), y[:3, :3]
    assert torch.autograd.gradcheck(lambda z: simcc_losses(z, y, K, SIGMA), (logits,))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_cast_to_float32(dtype):
    logits, y = random_batch(torch.float32)
    half = logits.to(dtype).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        found, places, merged = (
            simcc_losses(half, y, K, SIGMA),
            decode(half, K),
            flip_merge(half, half, [1, 0, *range(2, half.shape[1])], K),
        )
        found.sum().backward()
    exact = half.detach().float()
    assert found.dtype == places.dtype == merged.dtype == torch.float32
    assert found.equal(simcc_losses(exact, y, K, SIGMA))
    assert places.equal(decode(exact, K))
    assert merged.equal(flip_merge(exact, exact, [1, 0, *range(2, exact.shape[1])], K))
    assert half.grad.dtype == dtype
    assert half.grad.isfinite().all()


def decode_loop(values, k):
    best = values.index(max(values))
    if 0 < best < len(values) - 1:
        left, middle, right = values[best - 1 : best + 2]
        a, b = (left + right) / 2 - middle, (right - left) / 2  # the parabola a t**2 + b t + middle
        if a < 0:
            return (best - b / (2 * a)) / k
    return best / k


def test_decoding_is_that_of_a_loop():
    logits, _ = random_batch(torch.float64, n=30)
    expected = [[[decode_loop(axis, K) for axis in joint] for joint in one] for one in logits.tolist()]
    torch.testing.assert_close(decode(logits, K), torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-9)
    first_or_last = logits.argmax(-1) % 15 == 0
    assert first_or_last.any()


def test_decoding_of_borders_ties_and_certain_bins():
    rows = {
        (9.0, 8, 0, 0): 0.0,
        (0.0, 0, 8, 9): 1.5,
        (5.0, 5, 5, 5): 0.0,  # the first
        (0.0, 5, 5, 0): 0.75,  # the middle of both
        (0.0, 5, 0, 5): 0.5,  # the first
        (-math.inf, 0, -math.inf, -math.inf): 0.5,
        (-math.inf, 0, -1, -math.inf): 0.5,
        (0.0, 4, 2, 0): (1 + (4 - 2) / (2 * (4 + 2))) / 2,
    }
    logits = torch.tensor(list(rows)).view(1, -1, 2, 4)
    torch.testing.assert_close(decode(logits, 2).flatten(), torch.tensor(list(rows.values())))


PAIRS = [(0, 3), (4, 1)]
MIRRORED = [3, 4, 2, 0, 1]


def flip_loop(logits, flipped, pairs, k):
    other = {**dict(pairs), **{right: left for left, right in pairs}}
    joints, bins = logits.shape[1], logits.shape[-1]
    merged = torch.zeros_like(logits)
    for n in range(len(logits)):
        for joint in range(joints):
            for axis in range(2):
                for b in range(bins):
                    target = (bins - k - b) % bins if axis == 0 else b
                    p = logits[n, joint, axis].softmax(0)[b]
                    q = flipped[n, other.get(joint, joint), axis].softmax(0)[target]
                    merged[n, joint, axis, b] = (p + q) / 2
    return merged


@pytest.mark.parametrize("k", [1, 1.5, 2, 3])
def test_the_flip_test_is_that_of_a_loop(k):
    logits, flipped = random_batch()[0][:2], random_batch(seed=1)[0][:2]
    expected = flip_loop(logits, flipped, PAIRS, round(k))
    torch.testing.assert_close(flip_merge(logits, flipped, MIRRORED, k).exp(), expected)


@pytest.mark.parametrize("k", [1, 2, 4])
def test_the_flip_test_of_a_mirrored_image_changes_no_coordinate(k):
    points = torch.rand(3, 5, 2, dtype=torch.float64) * 21 + 5
    swapped = points[:, [3, 4, 2, 0, 1]]
    mirrored = torch.stack((31 - swapped[..., 0], swapped[..., 1]), -1)
    logits, flipped = (simcc_labels(each, 32, k, 2.0).log() for each in (points, mirrored))
    torch.testing.assert_close(decode(flip_merge(logits, flipped, MIRRORED, k), k), points, rtol=0, atol=1e-9)


def test_nothing_is_read_back_and_no_shape_depends_on_values():
    logits, y = (each.to("meta") for each in random_batch())  # where both are errors
    assert simcc_losses(logits, y, K, SIGMA).shape == (4,)
    assert decode(flip_merge(logits, logits, MIRRORED)).shape == (4, 5, 2)

"""SAF and MESA: equality with transcriptions of the papers, memory, checkpoints, and DDP."""

from __future__ import annotations

import copy
import importlib.util
import io
import pickle
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import bsam
from helpers import alike, assert_close, detached, distance, same

SCRIPT = Path(__file__).with_name("two_ranks_losses.py")
spec = importlib.util.spec_from_file_location("two_ranks_losses", SCRIPT)
two_ranks = importlib.util.module_from_spec(spec)
spec.loader.exec_module(two_ranks)

SAMPLES, BATCH, EPOCHS = 21, 8, 9  # two batches an epoch, and five samples left over
LR, MOMENTUM, DECAY = 0.2, 0.9, 1e-2
SETTINGS = {"lam": 0.9, "tau": 2.0, "start_epoch": 2, "label_smoothing": 0.1}
BACK, AVERAGE = 3, 0.9

OPTIMIZERS = {
    "sgd": lambda base, _: base,
    "sam": lambda base, model: bsam.SAM(base, model, rho=0.1),
    "bsam": lambda base, model: bsam.BSAM(base, model, rho_max=0.1, rho_min=0.08),
}


def build(name: str, model: nn.Module):
    return OPTIMIZERS[name](torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM, weight_decay=DECAY), model)


def saf(**changes):
    return bsam.SAF(**{"samples": SAMPLES, "classes": 3, **SETTINGS, "epochs_back": BACK, **changes})


@pytest.fixture
def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(SAMPLES, 6, dtype=torch.float64, generator=generator)
    return x, torch.randint(0, 3, (SAMPLES,), generator=generator)


def shuffled(epoch: int) -> list[list[int]]:
    order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(100 + epoch)).tolist()
    return [order[i : i + BATCH] for i in range(0, SAMPLES - BATCH + 1, BATCH)]


SCHEDULE = [(epoch, batch) for epoch in range(EPOCHS) for batch in shuffled(epoch)]


def step(optimizer, loss_of) -> None:
    """Take a step with a closure that calls ``backward``, as torch's optimizers expect."""

    def closure():
        optimizer.zero_grad()
        loss = loss_of()
        loss.backward()
        return loss

    optimizer.step(closure)


def train(model, optimizer, loss, data, schedule=SCHEDULE) -> None:
    for epoch, batch in schedule:
        if epoch != loss.epoch:  # a checkpoint restores the epoch
            loss.set_epoch(epoch)
        x, y, index = data[0][batch], data[1][batch], torch.tensor(batch)
        step(optimizer, lambda: loss(model(x), y, inputs=x, indices=index))


# The equations, in plain loops.


def forward(w: list[Tensor], x: Tensor, statistics=None) -> tuple[Tensor, list[Tensor]]:
    """Return the logits of conftest's network, with these statistics or those of the batch, and the latter."""
    h = x @ w[0].T + w[1]
    mean, var = (h.mean(0), h.var(0, correction=0)) if statistics is None else statistics
    z = torch.tanh((h - mean) / torch.sqrt(var + 1e-5) * w[2] + w[3])
    return torch.tanh(z @ w[4].T + w[5]) @ w[6].T + w[7], [h.mean(0).detach(), h.var(0, correction=1).detach()]


def log_softmax(z: Tensor) -> Tensor:
    return z - z.exp().sum().log()


def cross_entropy(z: Tensor, y: int, smoothing: float) -> Tensor:
    log_q = log_softmax(z)
    return -(1 - smoothing) * log_q[y] - smoothing * log_q.mean()


def divergence(past: Tensor, z: Tensor, tau: float) -> Tensor:
    log_p, log_q = log_softmax(past.to(z.dtype) / tau), log_softmax(z / tau)
    return tau**2 * sum(log_p[k].exp() * (log_p[k] - log_q[k]) for k in range(len(z)))


def descend(w, v, loss_at, rho):
    """Take a step of SGD with momentum, with rho a step of SAM. ``loss_at`` is called at w first."""
    g = torch.autograd.grad(loss_at(w), w)
    if rho:
        length = sum(float((t * t).sum()) for t in g) ** 0.5
        moved = [(p + rho * t / length).detach().requires_grad_() for p, t in zip(w, g, strict=True)]
        g = torch.autograd.grad(loss_at(moved), moved)
    v = [MOMENTUM * m + t + DECAY * p.detach() for m, t, p in zip(v, g, w, strict=True)]
    return [(p.detach() - LR * m).requires_grad_() for p, m in zip(w, v, strict=True)], v


def saf_by_hand(model, x, y, rho=0.0, lam=0.9, tau=2.0, start_epoch=2, label_smoothing=0.1):
    w = [p.detach().clone().requires_grad_() for p in model.parameters()]
    v = [torch.zeros_like(p) for p in w]
    past: dict[tuple[int, int], Tensor] = {}
    seen_then = missed_then = 0
    for epoch, batch in SCHEDULE:

        def loss_at(w):
            z, _ = forward(w, x[batch])
            total = 0.0
            for row, i in enumerate(batch):
                total = total + cross_entropy(z[row], int(y[i]), label_smoothing)
                if epoch > start_epoch and (i, epoch - BACK) in past:
                    total = total + lam * divergence(past[i, epoch - BACK], z[row], tau)
                if (i, epoch) not in past:
                    past[i, epoch] = z[row].detach().float()
            return total / len(batch)

        if epoch > start_epoch:
            known = sum((i, epoch - BACK) in past for i in batch)
            seen_then, missed_then = seen_then + known, missed_then + len(batch) - known
        w, v = descend(w, v, loss_at, rho)
    return [p.detach() for p in w], past, (seen_then, missed_then)


def mesa_by_hand(model, x, y, rho=0.0, lam=0.9, tau=2.0, start_epoch=2, label_smoothing=0.1):
    w = [p.detach().clone().requires_grad_() for p in model.parameters()]
    v = [torch.zeros_like(p) for p in w]
    running = [torch.zeros(12, dtype=torch.float64), torch.ones(12, dtype=torch.float64)]
    average_w, average_running = [p.detach().clone() for p in w], list(running)
    for epoch, batch in SCHEDULE:
        past, _ = forward(average_w, x[batch], average_running)

        def loss_at(w):
            z, _ = forward(w, x[batch])
            total = 0.0
            for row, i in enumerate(batch):
                total = total + cross_entropy(z[row], int(y[i]), label_smoothing)
                if epoch > start_epoch:
                    total = total + lam * divergence(past[row], z[row], tau)
            return total / len(batch)

        _, fresh = forward(w, x[batch])
        running = [0.9 * a + 0.1 * b for a, b in zip(running, fresh, strict=True)]
        w, v = descend(w, v, loss_at, rho)
        average_w = [AVERAGE * a + (1 - AVERAGE) * p.detach() for a, p in zip(average_w, w, strict=True)]
        average_running = [AVERAGE * a + (1 - AVERAGE) * b for a, b in zip(average_running, running, strict=True)]
    return [p.detach() for p in w], average_w, average_running


@pytest.mark.parametrize(("name", "rho"), [("sgd", 0.0), ("sam", 0.1)])
def test_saf_equals_its_transcription(problem, data, name, rho):
    expected, past, (seen_then, missed_then) = saf_by_hand(problem.model, *data, rho)
    assert min(seen_then, missed_then) >= 15  # both happen often
    without = copy.deepcopy(problem.model)
    train(without, build(name, without), saf(lam=0.0), data)
    loss = saf()
    train(problem.model, build(name, problem.model), loss, data)
    assert_close(problem.weights(), expected, atol=1e-11)
    assert distance(problem.weights(), detached(without.parameters())) > 1e-3
    assert loss.table.dtype == torch.float32  # as in the released code
    for (i, epoch), logits in past.items():  # the logits of the first passes of the last epochs
        if epoch >= EPOCHS - BACK - 1:
            slots = [s for s in range(BACK + 1) if loss.stamp[s, i] == epoch]
            assert len(slots) == 1
            assert torch.equal(loss.table[slots[0], i], logits)


@pytest.mark.parametrize(("name", "rho"), [("sgd", 0.0), ("sam", 0.1)])
def test_mesa_equals_its_transcription(problem, data, name, rho):
    expected, average, running = mesa_by_hand(problem.model, *data, rho)
    without = copy.deepcopy(problem.model)
    train(without, build(name, without), saf(lam=0.0), data)
    optimizer = build(name, problem.model)
    loss = bsam.MESA(problem.model, optimizer, decay=AVERAGE, **SETTINGS)
    train(problem.model, optimizer, loss, data)
    assert_close(problem.weights(), expected, atol=1e-11)
    assert distance(problem.weights(), detached(without.parameters())) > 1e-3
    assert_close(loss.average.parameters(), average, atol=1e-11)
    mean, var, batches = loss.average.buffers()
    assert_close([mean, var], running, atol=1e-11)
    assert int(batches) == len(SCHEDULE)


def test_defaults_are_the_papers(plain):
    table = bsam.SAF(1, 1)
    average = bsam.MESA(plain.model, build("sgd", plain.model))
    assert (table.lam, table.tau, table.start_epoch, table.epochs_back) == (0.3, 5.0, 5, 3)
    assert (average.lam, average.tau, average.start_epoch, average.decay) == (0.8, 5.0, 5, 0.9998)
    for loss in (table, average):
        assert (loss.label_smoothing, loss.reduction) == (0.0, "mean")


# SAF: the table.

Y = torch.tensor([0, 1, 2, 0, 1, 2])


def logits(seed: int, rows: int = 6, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(rows, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def small(**changes):
    return saf(**{"samples": 6, "start_epoch": 0, "label_smoothing": 0.0, "reduction": "none", **changes})


def visit(loss, epoch: int, ids: list[int], z: Tensor) -> list[float]:
    """Compute the loss of a batch in an epoch; return what the second term adds to each sample."""
    loss.set_epoch(epoch)
    return (loss(z, Y[ids], indices=torch.tensor(ids)) - F.cross_entropy(z, Y[ids], reduction="none")).tolist()


def test_only_logits_of_the_right_epoch_count():
    loss = small()
    seen = {0: [0, 1], 1: [2, 3], 2: [5, 3]}
    for epoch, ids in seen.items():
        assert visit(loss, epoch, ids, logits(epoch, 2)) == [0.0, 0.0]  # no sample was seen before epoch 0
    for epoch in range(BACK, 12):
        added = visit(copy.deepcopy(loss), epoch, list(range(6)), logits(20 + epoch))
        expected = [i in seen.get(epoch - BACK, []) for i in range(6)]
        assert [a > 1e-4 for a in added] == expected
        assert [a != 0.0 for a in added] == expected


@pytest.mark.parametrize("start_epoch", [0, 4])
def test_start_epoch(start_epoch, plain):
    loss, optimizer = small(start_epoch=start_epoch, epochs_back=1), build("sgd", plain.model)
    average = bsam.MESA(plain.model, optimizer, start_epoch=start_epoch, reduction="none")
    optimizer.zero_grad()
    step(optimizer, plain.loss)  # so that the average differs from the network
    x = plain.x[:6]
    with torch.no_grad():
        z = plain.model(x)
    for epoch in range(7):
        added = visit(loss, epoch, list(range(6)), logits(epoch))
        assert all(a > 1e-4 for a in added) if epoch > start_epoch else added == [0.0] * 6
        average.set_epoch(epoch)
        added = (average(z, Y, inputs=x) - F.cross_entropy(z, Y, reduction="none")).tolist()
        assert all(a > 0 for a in added) if epoch > start_epoch else added == [0.0] * 6


@pytest.mark.parametrize("half", [False, True])
def test_reductions_and_label_smoothing(half):
    changes, dtype = {"label_smoothing": 0.2, "epochs_back": 1, "half": half}, torch.half if half else torch.float32
    means, rows = (small(reduction=reduction, **changes) for reduction in ("mean", "none"))
    for epoch in range(2):
        for loss in (means, rows):
            loss.set_epoch(epoch)
        ids, z = torch.tensor([4, 1, 0]), logits(epoch, 3).requires_grad_()
        expected = [cross_entropy(z[row], int(Y[i]), 0.2) for row, i in enumerate(ids)]
        if epoch == 1:
            expected = [
                e + 0.9 * divergence(logits(0, 3)[row].to(dtype), z[row], 2.0) for row, e in enumerate(expected)
            ]
        mean, row = means(z, Y[ids], indices=ids), rows(z, Y[ids], indices=ids)
        assert mean.dim() == 0
        torch.testing.assert_close(row, torch.stack(expected), rtol=0, atol=1e-13)
        torch.testing.assert_close(mean, row.mean(), rtol=0, atol=1e-13)
        gradients = [torch.autograd.grad(got, z, retain_graph=True)[0] for got in (mean, row.mean(), sum(expected) / 3)]
        assert_close(gradients[:2], gradients[2:] * 2, atol=1e-13)


def test_eval_mode_is_the_cross_entropy_and_stores_nothing(plain):
    loss, optimizer = small(epochs_back=1), build("sgd", plain.model)
    average = bsam.MESA(plain.model, optimizer, start_epoch=0)
    step(optimizer, plain.loss)
    visit(loss, 0, [0, 1], logits(0, 2))
    kept, moved = loss.table.clone(), copy.deepcopy(average.average.state_dict())
    loss.set_epoch(1)
    loss.eval()
    average.eval()
    z = logits(1, 2)
    # indices of another data set
    assert torch.equal(loss(z, Y[:2], indices=torch.tensor([0, 10_000])), F.cross_entropy(z, Y[:2], reduction="none"))
    assert torch.equal(average(z, Y[:2], inputs=plain.x[:2]), F.cross_entropy(z, Y[:2]))
    assert torch.equal(loss.table, kept)
    assert (loss.stamp < 1).all()
    assert alike(dict(average.average.state_dict()), dict(moved))
    loss.train()
    assert min(visit(loss, 1, [0, 1], z)) > 0


@pytest.mark.parametrize("parts", [1, 3])
def test_only_logits_at_w_are_stored(problem, parts):
    """The first pass of SAM on a share sees 4 of 13 samples; the others are seen at perturbed weights alone."""
    optimizer = bsam.SAM(torch.optim.SGD(problem.model.parameters(), lr=0.1), problem.model, rho=0.5, ascent=0.3)
    loss = saf(samples=24, start_epoch=0, epochs_back=1, reduction="none")
    optimizer.param_groups[0]["batch_size"] = 13  # as after a step
    problem.model.eval()  # the logits of a sample do not depend on the others
    expected = problem.model(problem.x[:4]).detach().float()

    def closure(indices=slice(None)):
        for ids in torch.arange(13)[indices].split(-(-13 // parts)):
            yield loss(problem.model(problem.x[ids]), problem.y[ids], indices=ids)

    loss.set_epoch(1)
    optimizer.step(closure)
    assert (loss.stamp[1] == 1).tolist() == [True] * 4 + [False] * 20
    assert torch.equal(loss.table[1, :4], expected)


@pytest.mark.parametrize(("name", "passes"), [("sam", 2), ("bsam", 3)])
def test_all_passes_have_the_second_term_and_the_first_is_stored(problem, name, passes):
    ids, optimizer = list(range(24)), build(name, problem.model)
    loss = saf(samples=24, start_epoch=0, epochs_back=1, label_smoothing=0.0)
    before: list[Tensor] = []
    for epoch in range(3):
        loss.set_epoch(epoch)
        seen: list[tuple[Tensor, Tensor]] = []

        def closure():
            z = problem.model(problem.x)
            seen.append((z.detach(), loss(z, problem.y, indices=torch.tensor(ids))))
            return seen[-1][1]

        optimizer.step(closure)
        assert len(seen) == passes
        for z, value in seen:
            second = sum(0.9 * divergence(before[i], z[i], 2.0) for i in ids) / 24 if before else 0.0
            torch.testing.assert_close(value.detach(), F.cross_entropy(z, problem.y) + second, rtol=0, atol=1e-13)
        before = list(seen[0][0].float())
        assert torch.equal(loss.table[epoch % 2], torch.stack(before))
        assert not torch.equal(seen[1][0].float(), torch.stack(before))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_beyond_the_range_of_half(dtype):
    loss = small(epochs_back=1, half=True)
    z = torch.tensor([[1e6, 0.0, -1e6], [-1e6, 3e5, 0.0]], dtype=dtype)
    visit(loss, 0, [0, 1], z)
    assert loss.table[0, :2].tolist() == [[65504.0, 0.0, -65504.0], [-65504.0, 65504.0, 0.0]]
    loss.set_epoch(1)
    again = z.clone().requires_grad_()
    value = loss(again, Y[:2], indices=torch.arange(2))
    value.sum().backward()
    assert torch.isfinite(value).all()
    assert torch.isfinite(again.grad).all()


def test_non_finite_logits_are_not_stored():
    """Those of a skipped step must not be used epochs later, and a masked class must not give NaN."""
    loss = small(epochs_back=1)
    z = logits(0)
    for row, value in enumerate([float("nan"), float("inf"), -float("inf")]):
        z[row, row - 1] = value
    loss(z, Y, indices=torch.arange(6))
    z = logits(1)
    z[5, 0] = -float("inf")
    z.requires_grad_()
    loss.set_epoch(1)
    value = loss(z, Y, indices=torch.arange(6))
    assert torch.equal(value[:3], F.cross_entropy(z[:3], Y[:3], reduction="none"))
    assert (value[3:5] > F.cross_entropy(z[3:5], Y[3:5], reduction="none")).all()
    value[:5].sum().backward()
    assert torch.isfinite(z.grad).all()


@pytest.mark.parametrize(("kind", "autocast"), [("saf", True), ("mesa", False)])
def test_bfloat16_logits_are_as_exact_as_float32(kind, autocast):
    """In bfloat16, rounding errors of the logarithms would exceed the divergence of near logits."""
    near, far = logits(0, dtype=torch.bfloat16), (logits(0) + 0.05 * logits(1)).bfloat16()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        if kind == "saf":
            loss = small(epochs_back=1)
            loss(near, Y, indices=torch.arange(6))
            loss.set_epoch(1)
            value = loss(far.requires_grad_(), Y, indices=torch.arange(6))
        else:
            model = nn.Linear(1, 1)
            loss = bsam.MESA(model, build("sgd", model), lam=0.9, tau=2.0, start_epoch=0, reduction="none")
            loss.average.forward = lambda _: near
            loss.set_epoch(1)
            value = loss(far.requires_grad_(), Y, inputs=near)
    assert value.dtype == torch.float32
    exact = [
        cross_entropy(z, int(y), 0.0) + 0.9 * divergence(past, z, 2.0)
        for past, z, y in zip(near, far.detach().double(), Y, strict=True)
    ]
    torch.testing.assert_close(value.detach().double(), torch.stack(exact), rtol=0, atol=2e-6)
    (gradient,) = torch.autograd.grad(value.sum(), far)
    assert gradient.dtype == torch.bfloat16


# Checkpoints and copies.


def losses(kind: str, model, optimizer):
    return saf() if kind == "saf" else bsam.MESA(model, optimizer, decay=AVERAGE, **SETTINGS)


@pytest.mark.parametrize(("kind", "name"), [("saf", "bsam"), ("mesa", "bsam"), ("mesa", "sgd")])
def test_resume_in_the_middle_of_an_epoch(problem, data, kind, name):
    fresh = problem.clone().model
    optimizer = build(name, problem.model)
    loss = losses(kind, problem.model, optimizer)
    middle = len(SCHEDULE) // 2
    assert SCHEDULE[middle][0] == SCHEDULE[middle - 1][0] >= BACK + 1
    train(problem.model, optimizer, loss, data, SCHEDULE[:middle])
    file = io.BytesIO()
    torch.save([part.state_dict() for part in (problem.model, optimizer, loss)], file)
    train(problem.model, optimizer, loss, data, SCHEDULE[middle:])

    file.seek(0)
    optimizer = build(name, fresh)
    resumed = losses(kind, fresh, optimizer)
    for part, state in zip((fresh, optimizer, resumed), torch.load(file, weights_only=True), strict=True):
        part.load_state_dict(state)
    assert resumed.epoch == SCHEDULE[middle][0]
    train(fresh, optimizer, resumed, data, SCHEDULE[middle:])
    assert alike(dict(fresh.state_dict()), dict(problem.model.state_dict()))
    assert alike(dict(resumed.state_dict()), dict(loss.state_dict()))


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda parts: pickle.loads(pickle.dumps(parts))], ids=["deepcopy", "pickle"]
)
@pytest.mark.parametrize(("kind", "name"), [("saf", "sgd"), ("mesa", "bsam")])
def test_copies_are_independent(problem, data, kind, name, copied):
    optimizer = build(name, problem.model)
    parts = problem.model, optimizer, losses(kind, problem.model, optimizer)
    middle = len(SCHEDULE) // 2
    train(*parts, data, SCHEDULE[:middle])
    theirs = copied(parts)
    again = copied(theirs)
    here = copy.deepcopy(parts[2].state_dict())
    train(*theirs, data, SCHEDULE[middle:])
    assert alike(dict(parts[2].state_dict()), dict(here))
    train(*parts, data, SCHEDULE[middle:])
    train(*again, data, SCHEDULE[middle:])
    for model, _, loss in (theirs, again):
        assert alike(dict(model.state_dict()), dict(parts[0].state_dict()))
        assert alike(dict(loss.state_dict()), dict(parts[2].state_dict()))
    if kind == "mesa":
        before = [here[f"average.{name}"] for name, _ in theirs[2].average.named_parameters()]
        assert distance(theirs[2].average.parameters(), before) > 1e-3  # it did move


# MESA: the average.


def by_closure(optimizer, problem):
    step(optimizer, problem.loss)


def by_backward(optimizer, problem):
    optimizer.zero_grad()
    if isinstance(optimizer, bsam.SharpnessAware):
        optimizer.backward(problem.loss)
    else:
        problem.loss().backward()
    optimizer.step()


@pytest.mark.parametrize("stepped", [by_closure, by_backward])
@pytest.mark.parametrize(("name", "followed"), [("sgd", "optimizer"), ("bsam", "optimizer"), ("bsam", "its base")])
def test_the_average_follows_each_step_once(problem, name, followed, stepped):
    optimizer = build(name, problem.model)
    target = optimizer.base if followed == "its base" else optimizer
    loss = bsam.MESA(problem.model, target, decay=0.75)
    average = [t.clone() for t in (*problem.weights(), *problem.buffers())]
    for _ in range(4):
        stepped(optimizer, problem)
        new = [*problem.weights(), *problem.buffers()]
        average = [0.75 * a + 0.25 * b if a.is_floating_point() else b for a, b in zip(average, new, strict=True)]
        assert_close([*loss.average.parameters(), *loss.average.buffers()], average, atol=1e-14)
    assert distance(average, new) > 1e-3


def test_the_average_is_not_trained(problem):
    optimizer = build("sgd", problem.model)
    loss = bsam.MESA(problem.model, optimizer, start_epoch=0)
    loss.set_epoch(1)
    step(optimizer, problem.loss)
    assert [p for p in loss.parameters() if p.requires_grad] == []
    assert not {id(p) for p in loss.parameters()} & {id(p) for p in problem.model.parameters()}
    assert not {p.data_ptr() for p in loss.parameters()} & {p.data_ptr() for p in problem.model.parameters()}
    assert all(p.requires_grad for p in problem.model.parameters())
    assert {name.partition(".")[0] for name in loss.state_dict()} == {"average", "_extra_state"}
    z, x = problem.model(problem.x).detach(), problem.x.clone().requires_grad_()
    assert not loss(z, problem.y, inputs=x).requires_grad  # no gradient passes through the average


def test_the_average_is_evaluated_in_eval_mode():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3)).double()
    optimizer = build("sgd", model)
    loss = bsam.MESA(model, optimizer, decay=0.5, start_epoch=0, lam=1.0, tau=3.0, reduction="none")
    loss.set_epoch(1)
    x = torch.randn(6, 6, dtype=torch.float64)
    for _ in range(3):
        loss.train()  # as loops do with all modules
        step(optimizer, lambda: loss(model(x), Y, inputs=x).mean())
    running = detached(loss.average.buffers())
    z = logits(0)
    added = loss(z, Y, inputs=x) - F.cross_entropy(z, Y, reduction="none")
    past = loss.average.eval()(x)
    assert_close(added, [divergence(p, q, 3.0) for p, q in zip(past, z, strict=True)], atol=1e-13)
    assert same(running, list(loss.average.buffers()))
    assert model.training


class Tied(nn.Module):
    """Shared weights, a buffer that is not in ``state_dict``, and extra state that is not a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(3, 3).double(), nn.Linear(3, 3).double()
        self.two.weight = self.one.weight
        self.register_buffer("seen", torch.zeros(3, dtype=torch.float64), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.seen + 1
        return self.two(self.one(x))

    def get_extra_state(self) -> str:
        return "not a tensor"

    def set_extra_state(self, state: str) -> None:
        assert state == "not a tensor"


def test_tied_weights_and_buffers_are_averaged_once():
    model = Tied()
    optimizer = build("sgd", model)
    loss = bsam.MESA(model, optimizer, decay=0.75)
    start = model.one.weight.detach().clone()
    step(optimizer, lambda: model(logits(0)).square().mean())
    assert_close([loss.average.one.weight], [0.75 * start + 0.25 * model.one.weight.detach()], atol=1e-15)
    assert loss.average.two.weight is loss.average.one.weight
    assert loss.average.seen.tolist() == [0.25] * 3
    loss.load_state_dict(loss.state_dict())


class Normalised(nn.Module):
    """Not a wrapper, although it stores its network under the same name."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x / 2)


def test_only_wrappers_are_removed(plain):
    compiled = torch.compile(plain.model, backend="eager")
    both = torch.compile(nn.DataParallel(plain.model), backend="eager")
    for wrapped in (compiled, nn.DataParallel(plain.model), nn.DataParallel(compiled), both):
        average = bsam.MESA(wrapped, build("sgd", plain.model)).average
        assert type(average) is nn.Sequential
        assert list(average.state_dict()) == list(plain.model.state_dict())
    normalised = Normalised(plain.model)
    average = bsam.MESA(normalised, build("sgd", plain.model)).average
    assert torch.equal(average(plain.x), normalised(plain.x))


@pytest.mark.parametrize("name", ["sgd", "sgd, fused", "bsam"])
def test_skipped_steps_do_not_move_the_average(plain, name):
    optimizer = build(name.partition(",")[0], plain.model)
    if name == "sgd, fused":  # the scaler calls it, and it skips the step itself
        optimizer = torch.optim.SGD(plain.model.parameters(), lr=LR, fused=True)
        assert optimizer._step_supports_amp_scaling
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    loss = bsam.MESA(plain.model, optimizer, decay=0.5)
    average = plain.weights()
    for factor in (1.0, float("inf"), 1.0):
        optimizer.zero_grad()
        if name == "bsam":
            optimizer.backward(lambda: plain.loss() * factor, scaler=scaler)
        else:
            scaler.scale(plain.loss() * factor).backward()
        before = plain.weights()
        scaler.step(optimizer)
        scaler.update()
        assert (distance(plain.weights(), before) == 0) == (factor != 1.0)
        if factor == 1.0:
            average = [(a + b) / 2 for a, b in zip(average, plain.weights(), strict=True)]
        assert_close(loss.average.parameters(), average, atol=1e-15)
        assert distance(average, plain.weights()) > 1e-3  # a step would have moved it


# Refusals.

WRONG = {"lam": -0.1, "tau": 0.0, "start_epoch": -1, "label_smoothing": 1.1, "reduction": "sum"}
WRONG_FOR_SAF = {**WRONG, "epochs_back": 0, "half": "yes", "samples": 2.0, "classes": 0}


def test_wrong_arguments(plain):
    optimizer = build("sgd", plain.model)
    for name, value in WRONG_FOR_SAF.items():
        with pytest.raises(ValueError, match=name):
            saf(**{name: value})
    for name, value in {**WRONG, "decay": 1.1}.items():
        with pytest.raises(ValueError, match=name):
            bsam.MESA(plain.model, optimizer, **{name: value})
    step(optimizer, plain.loss)  # no hook is left
    with pytest.raises(ValueError, match="epoch"):
        saf().set_epoch(-1)
    with pytest.raises(TypeError, match="MESA"):
        bsam.MESA(optimizer, plain.model)
    with pytest.raises(TypeError, match="SAF"):
        bsam.SAF(optimizer, plain.model)


@pytest.mark.parametrize(
    ("shape", "indices", "word"),
    [
        ((3, 3), torch.tensor([0, 1, -1]), "indices"),
        ((3, 3), torch.tensor([6, 1, 2]), "indices"),
        ((3, 3), torch.tensor([0.0, 1.0, 2.0]), "indices"),
        ((3, 3), torch.tensor([0]), "indices"),
        ((3, 4), torch.arange(3), "classes"),
        ((3, 3, 2), torch.arange(3), "classes"),
    ],
    ids=str,
)
def test_wrong_indices_and_logits(shape, indices, word):
    loss = small()
    with pytest.raises(bsam.BsamError, match=word):
        loss(torch.ones(shape), Y[:3], indices=indices)
    assert not loss.table.any()
    assert (loss.stamp < 0).all()


@pytest.mark.parametrize("kind", ["saf", "mesa"])
def test_missing_arguments(kind, plain):
    """Also before the second term begins; in eval mode nothing more is needed."""
    loss = saf(start_epoch=5) if kind == "saf" else bsam.MESA(plain.model, build("sgd", plain.model), start_epoch=5)
    name, other = ("indices", {"inputs": plain.x}) if kind == "saf" else ("inputs", {"indices": torch.arange(24)})
    z = plain.model(plain.x)
    for arguments in ({}, other):
        with pytest.raises(TypeError, match=name):
            loss(z, plain.y, **arguments)
    expected = F.cross_entropy(z, plain.y, label_smoothing=loss.label_smoothing)
    torch.testing.assert_close(loss.eval()(z, plain.y), expected)


# Two processes.


@pytest.fixture(scope="module")
def ranks(two_ranks_of, tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """The results of both ranks by case; all cases run in the same two processes."""
    return two_ranks_of(SCRIPT, tmp_path_factory.mktemp("ranks"))


def whole_batches(*, reshuffle: bool):
    """Yield epochs and the joined batches of both ranks."""
    for epoch in range(two_ranks.EPOCHS):
        ranks = (two_ranks.batches(rank, epoch, reshuffle=reshuffle) for rank in range(2))
        for ours, theirs in zip(*ranks, strict=True):
            yield epoch, *(torch.cat(pair) for pair in zip(ours, theirs, strict=True))


def saf_in_one_process(name: str, *, reshuffle: bool, tables: int):
    """Train with one table, or with one for each half of a batch."""
    model = two_ranks.network()
    optimizer, losses = two_ranks.optimizer_of(name, model), [bsam.SAF(**two_ranks.SAF) for _ in range(tables)]
    for epoch, x, y, index in whole_batches(reshuffle=reshuffle):
        for loss in losses:
            loss.set_epoch(epoch)

        def mean_loss():
            parts = zip(losses, *(t.chunk(tables) for t in (model(x), y, index)), strict=True)
            return sum(loss(z, t, indices=i) for loss, z, t, i in parts) / tables

        step(optimizer, mean_loss)
    return detached(model.parameters()), losses


@pytest.mark.parametrize("name", ["sgd", "bsam"])
def test_saf_on_ranks_that_keep_their_samples_equals_one_process(ranks, name):
    first, second = (rank[f"saf-{name}"] for rank in ranks)
    expected, (loss,) = saf_in_one_process(name, reshuffle=False, tables=1)
    assert_close(first["weights"], expected, atol=1e-12)
    assert_close(first["weights"], second["weights"], atol=0)
    assert torch.equal(torch.maximum(first["stamp"], second["stamp"]), loss.stamp)  # each rank has its samples ...
    assert ((first["stamp"] < 0) != (second["stamp"] < 0)).all()  # ... and no others


def test_saf_on_ranks_that_swap_samples_knows_only_its_own(ranks):
    first, second = (rank["saf-sgd-reshuffled"] for rank in ranks)
    expected, losses = saf_in_one_process("sgd", reshuffle=True, tables=2)
    assert_close(first["weights"], expected, atol=1e-12)
    assert_close(first["weights"], second["weights"], atol=0)
    for rank, loss in zip((first, second), losses, strict=True):
        assert torch.equal(rank["stamp"], loss.stamp)
    last = two_ranks.EPOCHS - 1
    epochs = last, last - two_ranks.SAF["epochs_back"]
    seen, then = (set((first["stamp"][epoch % 3] == epoch).nonzero().flatten().tolist()) for epoch in epochs)
    assert seen & then
    assert seen - then
    shared, _ = saf_in_one_process("sgd", reshuffle=True, tables=1)
    assert distance(first["weights"], shared) > 1e-4


@pytest.mark.parametrize("name", ["sgd", "bsam"])
def test_mesa_averages_the_same_on_both_ranks_and_in_one_process(ranks, name):
    first, second = (rank[f"mesa-{name}"] for rank in ranks)
    model = two_ranks.network()
    optimizer = two_ranks.optimizer_of(name, model)
    loss = bsam.MESA(model, optimizer, **two_ranks.MESA)
    for epoch, x, y, _ in whole_batches(reshuffle=True):
        loss.set_epoch(epoch)
        step(optimizer, lambda: loss(model(x), y, inputs=x))
    assert_close(first["weights"], detached(model.parameters()), atol=1e-12)
    assert list(first["average"]) == list(model.state_dict())
    assert_close(first["average"].values(), loss.average.state_dict().values(), atol=1e-12)
    assert_close(first["average"].values(), second["average"].values(), atol=0)
    assert distance(first["average"].values(), first["weights"]) > 1e-3


@pytest.mark.parametrize("half", [False, True])
def test_casts_leave_the_table_as_it_is(half):
    for cast in (lambda m: m.double(), lambda m: m.to(torch.bfloat16), lambda m: m.half()):
        loss = small(half=half)
        loss.table += 1 + 2**-9
        assert alike(cast(loss).table, torch.full_like(small(half=half).table, 1 + 2**-9))


def test_a_table_in_half_precision_loads():
    """As in checkpoints of version 0.3."""
    old, new = small(half=True, epochs_back=1), small(epochs_back=1)
    visit(old, 0, [4, 0], logits(0, 2))
    new.load_state_dict(old.state_dict())
    assert new.table.dtype == torch.float32
    assert visit(new, 1, [4, 0, 1], logits(1, 3)) == visit(old, 1, [4, 0, 1], logits(1, 3)) != [0.0] * 3


def test_the_average_of_a_bfloat16_network_moves():
    torch.manual_seed(0)
    model = nn.Linear(4, 3).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = bsam.MESA(model, optimizer, start_epoch=0)
    loss.set_epoch(1)
    before = [p.clone() for p in loss.average.parameters()]
    x, y = torch.randn(8, 4).bfloat16(), torch.randint(3, (8,))
    for _ in range(20):
        optimizer.zero_grad()
        loss(model(x), y, inputs=x).backward()
        optimizer.step()
    assert all(
        p.dtype == torch.float32 and not torch.equal(p, b)
        for p, b in zip(loss.average.parameters(), before, strict=True)
    )

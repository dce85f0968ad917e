"""Two processes on gloo against one process on the whole batch."""

from __future__ import annotations

import gc
import importlib.util
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from bsam.core.ranks import Ranks
from bsam.flatness import Probe
from helpers import alike, assert_close, distance

SCRIPT = Path(__file__).with_name("two_ranks.py")
spec = importlib.util.spec_from_file_location("two_ranks", SCRIPT)
two_ranks = importlib.util.module_from_spec(spec)
spec.loader.exec_module(two_ranks)


@pytest.fixture(scope="module")
def ranks(two_ranks_of, tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """The results of both ranks, by case. All cases run in one pair of processes."""
    return two_ranks_of(SCRIPT, tmp_path_factory.mktemp("ranks"))


def of_both(ranks, case: str, key: str = "weights"):
    """The results of both ranks, which must be equal bit for bit; returns the first rank's."""
    first, second = (rank[case][key] for rank in ranks)
    assert alike(first, second)
    return first


def weights_of(model) -> list[torch.Tensor]:
    return [p.detach() for p in model.parameters()]


def one_process(method: str) -> list[torch.Tensor]:
    """The weights after the same steps on the whole batch."""
    model = two_ranks.network()
    optimizer = two_ranks.build(method, model)
    for _ in range(two_ranks.STEPS):
        optimizer.step(two_ranks.closure(method, model, *two_ranks.batch()))
    return weights_of(model)


def m_sharpness_by_hand(method: str) -> list[torch.Tensor]:
    """One optimizer per rank, with its part of the batch and its memory; both step on the mean of their directions."""
    models = [two_ranks.network(), two_ranks.network()]
    optimizers = [two_ranks.build(method, model) for model in models]
    parts = list(zip(*(t.chunk(2) for t in two_ranks.batch()), strict=True))
    for _ in range(two_ranks.STEPS):
        for optimizer, model, (x, y) in zip(optimizers, models, parts, strict=True):
            optimizer.zero_grad()
            optimizer.backward(two_ranks.closure(method, model, x, y))
        for p, q in zip(*(model.parameters() for model in models), strict=True):
            p.grad = q.grad = (p.grad + q.grad) / 2
        for optimizer in optimizers:
            optimizer.step()
    return weights_of(models[0])


def accumulated_by_hand(method: str, micro_batches: int = 1) -> list[torch.Tensor]:
    """One optimizer that adds the directions of all ranks and micro-batches before each step."""
    model = two_ranks.network()
    optimizer = two_ranks.build(method, model)
    x, y = two_ranks.batch()
    for _ in range(two_ranks.STEPS):
        optimizer.zero_grad()
        for a, b in zip(x.chunk(2 * micro_batches), y.chunk(2 * micro_batches), strict=True):
            optimizer.backward(lambda: F.cross_entropy(model(a), b) / (2 * micro_batches))
        optimizer.step()
    return weights_of(model)


SELECTING = ["esam-half", "ksam-5"]  # each rank selects from its own samples, so the steps differ from one process


@pytest.mark.parametrize(
    ("case", "method"),
    [
        *((f"ddp-{method}", method) for method in two_ranks.ALL if method not in SELECTING),
        ("ddp-bucket-view", "bsam"),
        ("ddp-bucket-view-esam", "esam"),
        ("ddp-abandoned", "bsam"),
        ("inside-own", "bsam"),
        ("inside-ours", "bsam"),
    ],
)
def test_ddp_equals_one_process(case, method, ranks):
    assert_close(of_both(ranks, case), one_process(method))


@pytest.mark.parametrize(("scheme", "method"), two_ranks.QUANTIZED)
def test_quantized_networks(scheme, method, ranks):
    """Scales and ranges come from the batch of all ranks, in all passes of a step."""
    model, base = two_ranks.quantized(scheme)
    expected = two_ranks.quantized_steps(two_ranks.METHODS[method](base, model), model, model, *two_ranks.batch())
    assert_close(of_both(ranks, f"quantized-{scheme}-{method}", "state"), expected["state"])
    for rank in ranks:
        for buffers, wanted in zip(rank[f"quantized-{scheme}-{method}"]["buffers"], expected["buffers"], strict=True):
            assert_close(buffers, wanted)


@pytest.mark.parametrize("case", [*two_ranks.ROUTED, "accumulate"])
def test_ranks_may_use_different_parameters(case, ranks):
    """One process computes the mean loss over both halves of the batch, each with its head."""
    method = "bsam" if case == "accumulate" else case
    model = two_ranks.Routed()
    optimizer = two_ranks.build(method, model)
    x, y = two_ranks.batch()
    halves = torch.arange(24) >= 12
    for t in range(two_ranks.STEPS):

        def both_heads(x, t=t):
            uses_first = (halves[: len(x)] == (t % 2 == 1))[:, None]
            return torch.where(uses_first, model(x, 0), model(x, 1))

        optimizer.zero_grad()
        for rank in (0, 1) if case == "accumulate" else ():  # under no_sync, each rank has its own direction
            half = (part.chunk(2)[rank] for part in (x, y))
            optimizer.backward(two_ranks.closure(method, lambda x, h=(rank + t) % 2: model(x, h), *half, factor=0.5))
        optimizer.backward(two_ranks.closure(method, both_heads, x, y))
        optimizer.step()
    assert_close(of_both(ranks, f"routed-{case}"), weights_of(model))


def rested_by_hand(method: str, accumulate: bool = False) -> list[torch.Tensor]:
    model = two_ranks.Routed()
    optimizer = two_ranks.build(method, model)
    x, y = two_ranks.batch()
    for heads in two_ranks.HEADS:

        def network(x, heads=heads):
            if heads[0] == heads[1]:
                return model(x, heads[0])
            return torch.cat([model(half, head) for half, head in zip(x.chunk(2), heads, strict=True)])

        optimizer.zero_grad()
        for a, b, head in zip(x.chunk(2), y.chunk(2), heads, strict=True) if accumulate else ():
            optimizer.backward(two_ranks.closure(method, lambda x, head=head: model(x, head), a, b, factor=0.5))
        optimizer.backward(two_ranks.closure(method, network, x, y))
        optimizer.step()
    return weights_of(model)


@pytest.mark.parametrize("method", two_ranks.RESTED)
def test_parameters_that_no_rank_uses_in_some_steps(method, ranks):
    """They count in no length on any rank, also where DDP's reducer does not see the passes."""
    expected = rested_by_hand(method)
    for case in ("rested", "rested-inside"):
        assert_close(of_both(ranks, f"{case}-{method}"), expected)


def test_ranks_repeat_a_pass_together(ranks):
    """Under no_sync and with m_sharpness, the ranks reach different parameters and take the same passes."""
    assert_close(of_both(ranks, "rested-accumulate-msam"), rested_by_hand("msam", accumulate=True))
    for case in ("msam", "accumulate-msam", "m-sharpness-msam"):
        calls = len(two_ranks.HEADS) * (2 if "accumulate" in case else 1)
        assert of_both(ranks, f"rested-{case}", "calls") > calls

    models = [two_ranks.Routed(), two_ranks.Routed()]
    optimizers = [two_ranks.build("msam", model) for model in models]
    parts = list(zip(*(t.chunk(2) for t in two_ranks.batch()), strict=True))
    for heads in two_ranks.HEADS:
        for optimizer, model, (x, y), head in zip(optimizers, models, parts, heads, strict=True):
            optimizer.zero_grad()
            optimizer.backward(two_ranks.closure("msam", lambda x, m=model, head=head: m(x, head), x, y))
        for p, q in zip(*(model.parameters() for model in models), strict=True):
            grads = [t.grad for t in (p, q) if t.grad is not None]
            p.grad = q.grad = sum(grads) / 2 if grads else None
        for optimizer in optimizers:
            optimizer.step()
    assert_close(of_both(ranks, "rested-m-sharpness-msam"), weights_of(models[0]))


def test_buffers_that_change_the_loss(ranks):
    model = two_ranks.spectral_network()
    optimizer = two_ranks.build("bsam", model)
    for _ in range(two_ranks.STEPS):
        optimizer.step(two_ranks.closure("bsam", model, *two_ranks.batch()))
    for rank in ranks:
        assert_close(rank["spectral"]["state"], [t.detach() for t in model.state_dict().values()])


def test_check_finds_wrappers_that_the_closure_does_not_call(ranks):
    for rank in ranks:
        findings = rank["check"]
        assert findings["right"] == []
        assert findings["sharded"] == ([], True)
        assert "does not call the DistributedDataParallel wrapper" in "".join(findings["bypassed"])
        assert "no DistributedDataParallel or FSDP wrapper" in "".join(findings["not wrapped"])
    of_both(ranks, "check", "steps")  # the wrapper still reduces


@pytest.mark.parametrize("method", SELECTING)
def test_ranks_that_select_from_their_own_samples(method, ranks):
    weights = of_both(ranks, f"ddp-{method}")
    assert distance(weights, one_process(method)) > 1e-4


def test_ksam_selects_the_hardest_samples_of_each_rank(ranks):
    model = two_ranks.network()
    optimizer = two_ranks.build("sam", model)
    x, y = two_ranks.batch()
    for _ in range(two_ranks.STEPS):
        losses = F.cross_entropy(model(x), y, reduction="none").detach()
        hard = torch.cat([losses[:12].topk(5).indices, 12 + losses[12:].topk(5).indices])
        optimizer.step(lambda: F.cross_entropy(model(x[hard]), y[hard]))
    assert_close(ranks[0]["ddp-ksam-5"]["weights"], weights_of(model))


@pytest.mark.parametrize("method", two_ranks.REMEMBERING)
def test_memory_is_equal_on_both_ranks(method, ranks):
    """Values under no_sync are not remembered: AE-SAM's ranks would decide differently, and wait for each other."""
    for case in (f"ddp-{method}", f"ddp-accumulate-{method}"):
        of_both(ranks, case)
        memory = of_both(ranks, case, "memory")
        assert any(memory["vectors"]) is (method != "aesam")
        assert None not in memory["numbers"]


@pytest.mark.parametrize("method", two_ranks.ALONE)
def test_m_sharpness(method, ranks):
    """A metric, selected samples, memory, decisions: each rank has its own, and the direction is averaged once."""
    case = f"m-sharpness-{method}"
    assert_close(of_both(ranks, case), m_sharpness_by_hand(method))
    size = sum(p.numel() for p in two_ranks.network().parameters())
    assert ranks[0][case]["reductions"] == [size] * two_ranks.STEPS


@pytest.mark.parametrize(
    ("case", "method", "micro_batches"),
    [("m-sharpness", "bsam", 1), ("m-sharpness-released", "released", 1), ("m-sharpness-accumulate", "bsam", 2)],
)
def test_m_sharpness_adds_the_directions_of_the_ranks(case, method, micro_batches, ranks):
    """With start_from_min the ranks step from the mean of their minima."""
    weights = of_both(ranks, case)
    assert_close(weights, accumulated_by_hand(method, micro_batches))
    assert distance(weights, one_process(method)) > 1e-4
    reductions = 2 if method == "released" else 1
    assert len(ranks[0][case]["reductions"]) == reductions * two_ranks.STEPS


def test_m_sharpness_with_unused_parameters(ranks):
    """The last two layers: one that no rank uses, and one that only the first rank uses."""
    of_both(ranks, "m-sharpness-unused")
    *_, spare_weight, spare_bias, partial_weight, partial_bias = ranks[0]["m-sharpness-unused"]["grads"]
    assert spare_weight is spare_bias is None
    assert partial_weight.abs().sum() > 0
    assert alike(ranks[1]["m-sharpness-unused"]["grads"][-2:], [partial_weight, partial_bias])


@pytest.mark.parametrize(("case", "calls"), [("ddp-accumulate", 2), ("ddp-bucket-view-accumulate", 3)])
def test_accumulation_under_no_sync(ranks, case, calls):
    """The first call perturbs on each rank and is averaged later; later calls perturb along the mean gradient.

    With bucket views, the gradients of one call are in memory that the next call writes to.
    """
    model = two_ranks.network()
    optimizer = two_ranks.build("bsam", model)
    of_rank = [
        list(zip(x.chunk(calls), y.chunk(calls), strict=True))
        for x, y in zip(*(t.chunk(2) for t in two_ranks.batch()), strict=True)
    ]
    for _ in range(two_ranks.STEPS):
        optimizer.zero_grad()
        for a, b in (of_rank[0][0], of_rank[1][0]):  # under no_sync
            optimizer.backward(lambda: F.cross_entropy(model(a), b) / (2 * calls))
        for of_first, of_second in zip(of_rank[0][1:], of_rank[1][1:], strict=True):
            x, y = (torch.cat(pair) for pair in zip(of_first, of_second, strict=True))
            optimizer.backward(lambda: F.cross_entropy(model(x), y) / calls)
        optimizer.step()
    assert_close(of_both(ranks, case), weights_of(model))


@pytest.mark.parametrize("method", two_ranks.FSDP)
def test_fsdp(method, ranks):
    """Equal to one process, or to DDP if ranks select samples; a resumed run is identical, with sharded memory."""
    selects = method in SELECTING
    expected = ranks[0][f"ddp-{method}"]["weights"] if selects else one_process(method)
    for rank in ranks:
        result = rank[f"fsdp-{method}"]
        assert_close(result["weights"], expected)
        assert result["exact"]
        assert result["as_parameters"]
        assert result["identical"]
        assert any(result["memory"]["vectors"]) is (method == "looksam")


def readings_of_one_process(method: str, part: slice) -> list[dict]:
    model = two_ranks.network()
    optimizer = two_ranks.build(method, model)
    probe = Probe(every=2).attach(optimizer)
    x, y = two_ranks.batch()
    for _ in range(two_ranks.STEPS):
        optimizer.step(two_ranks.closure(method, model, x[part], y[part]))
    return [asdict(reading) for reading in probe]


@pytest.mark.parametrize("case", ["probe-ddp", "probe-fsdp"])
def test_a_probe_reads_the_batch_of_all_ranks(case, ranks):
    expected = [pytest.approx(reading, rel=1e-9) for reading in readings_of_one_process("bsam", slice(None))]
    assert len(expected) == 2
    for rank in ranks:
        assert rank[case]["readings"] == expected


def test_a_probe_reads_the_part_of_its_rank_with_m_sharpness(ranks):
    for rank, part in zip(ranks, (slice(0, 12), slice(12, None)), strict=True):
        start, *_ = rank["probe-m-sharpness"]["readings"]
        assert start == pytest.approx(readings_of_one_process("sam", part)[0], rel=1e-9)


@pytest.mark.parametrize(("case", "word"), [("error-fsdp", "FSDP"), ("error-static", "static_graph=False")])
def test_passes_that_the_wrapper_does_not_support_raise(case, word, ranks):
    for rank in ranks:
        assert word in rank[case]["message"]
        assert rank[case]["unchanged"]


def test_ranks_make_the_same_decisions_under_no_sync(ranks):
    assert 24 < of_both(ranks, "decisions", "calls") < 48  # some steps with a second pass, some without
    of_both(ranks, "decisions")


@pytest.mark.parametrize("case", [*two_ranks.WRAPPED_LATER, "compiled", "two-wrappers"])
def test_a_wrapper_created_after_the_optimizer_is_found(case, ranks):
    """With accumulation under no_sync; the result is that of a wrapper that the optimizer was given."""
    given = f"{case if case in two_ranks.WRAPPED_LATER else 'bsam'}-given"
    for key in ("weights", "memory", "sync"):
        assert alike(of_both(ranks, f"{case}-found", key), ranks[0][given][key])
    assert ranks[0][given]["sync"] is True


def test_ranks_without_a_wrapper(ranks):
    model = two_ranks.network()
    optimizer = two_ranks.build("bsam", model)
    for _ in range(2):
        optimizer.step(two_ranks.closure("bsam", model, *two_ranks.batch()))
    assert alike(of_both(ranks, "not-wrapped"), weights_of(model))
    for rank in ranks:
        assert rank["not-wrapped"]["hooks"] == 0
        (message,) = rank["not-wrapped"]["warnings"]  # once
        assert "2 ranks" in message


def test_shares_of_batches_whose_sizes_differ_between_ranks(ranks):
    """All ranks take the same passes, and average the gradients of their shares, and then those of their batches."""
    model, rho = two_ranks.network(), 0.1
    x, y = two_ranks.batch()
    params = list(model.parameters())

    def mean_gradient(share):
        losses = [F.cross_entropy(model(a[:k]), b[:k]) for a, b, k in share]
        return torch.autograd.grad(sum(losses) / 2, params)

    for sizes in zip(*two_ranks.SIZES, strict=True):
        parts = [(a, b, n) for a, b, n in zip(x.chunk(2), y.chunk(2), sizes, strict=True)]
        g = mean_gradient([(a, b, -(-n // 4)) for a, b, n in parts])
        norm, w = torch.cat([t.flatten() for t in g]).norm(), [p.detach().clone() for p in params]
        with torch.no_grad():
            torch._foreach_add_(params, torch._foreach_mul(g, float(rho / norm)))
        d = mean_gradient(parts)
        with torch.no_grad():
            for p, start, step in zip(params, w, d, strict=True):
                p.copy_(start - 0.1 * step)
    assert_close(of_both(ranks, "on-shares"), weights_of(model), atol=1e-12)


@pytest.mark.parametrize("case", ["inside-own-accumulate", "wrapped-again"])
def test_ranks_stay_together(ranks, case):
    weights = of_both(ranks, case)
    assert float((weights[0] - two_ranks.network().get_parameter("0.weight").detach()).abs().max()) > 1e-3


def test_a_wrapped_discriminator_keeps_its_gradients(ranks):
    of_both(ranks, "adversarial")
    for rank in ranks:
        assert rank["adversarial"]["kept"]
        assert rank["adversarial"]["tracked"] == 4  # two passes of its own, and one in each of the two steps


def test_a_wrapper_from_a_framework_is_used_while_it_exists():
    ranks = Ranks(None, m_sharpness=False)
    wrapper = torch.nn.Linear(1, 1)
    ranks.use(wrapper)
    assert ranks.ddp is wrapper
    del wrapper
    gc.collect()
    assert ranks.ddp is None

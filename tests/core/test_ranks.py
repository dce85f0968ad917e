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
from helpers import assert_close, distance

SCRIPT = Path(__file__).with_name("two_ranks.py")
spec = importlib.util.spec_from_file_location("two_ranks", SCRIPT)
two_ranks = importlib.util.module_from_spec(spec)
spec.loader.exec_module(two_ranks)


@pytest.fixture(scope="module")
def ranks(two_ranks_of, tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """What both ranks saw, case by case: all cases share one start of two processes."""
    return two_ranks_of(SCRIPT, tmp_path_factory.mktemp("ranks"))


def one_process(method: str):
    """The same steps on the whole batch: the weights, and how many gradients they took."""
    model = two_ranks.network()
    optimizer = two_ranks.build(method, model)
    losses = two_ranks.closure(method, model, *two_ranks.batch())
    gradients = 0

    def closure(*indices):
        nonlocal gradients
        gradients += torch.is_grad_enabled()
        return losses(*indices)

    for _ in range(two_ranks.STEPS):
        optimizer.step(closure)
    return [p.detach() for p in model.parameters()], gradients


def by_hand(method: str):
    """m-sharpness with one optimizer per rank, each with its own part of the batch and its own memory: the mean of
    their directions, one step.
    """
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
    return [p.detach() for p in models[0].parameters()]


def each_rank_on_its_own(method: str, micro_batches: int = 1):
    """m-sharpness by hand: a direction per rank (and micro-batch), their mean, one step."""
    model = two_ranks.network()
    optimizer = two_ranks.build(method, model)
    x, y = two_ranks.batch()
    for _ in range(two_ranks.STEPS):
        optimizer.zero_grad()
        for a, b in zip(x.chunk(2 * micro_batches), y.chunk(2 * micro_batches), strict=True):
            optimizer.backward(lambda: F.cross_entropy(model(a), b) / (2 * micro_batches))
        optimizer.step()
    return [p.detach() for p in model.parameters()]


CHOOSING_LESS = ["esam-half", "ksam-5"]  # each rank chooses among its own samples, which one process does not


@pytest.mark.parametrize(
    "case",
    [f"ddp-{method}" for method in (*two_ranks.ALL, "bucket-view", "bucket-view-esam") if method not in CHOOSING_LESS],
)
def test_ddp_equals_one_process_on_the_whole_batch(case, ranks):
    first, second = (rank[case] for rank in ranks)
    method = case.removeprefix("ddp-").replace("bucket-view-esam", "esam").replace("bucket-view", "bsam")
    weights, gradients = one_process(method)
    assert_close(first["weights"], weights)
    assert_close(first["weights"], second["weights"], atol=0)
    # passes without DDP's reducer
    by_ourselves = {"esam": 1, "gam-paper": 2}.get(method, 0) * two_ranks.STEPS
    assert first["buckets"] == gradients - by_ourselves  # one reduction a pass: the network fits into one bucket
    assert len(first["reductions"]) == gradients  # and no other


@pytest.mark.parametrize(("scheme", "method"), two_ranks.QUANTIZED)
def test_scales_and_ranges_of_a_quantized_network_are_those_of_the_batch_of_all_ranks(scheme, method, ranks):
    """Weights too; and in all passes of a step, on all ranks."""
    model, base = two_ranks.quantized(scheme)
    whole = two_ranks.quantized_steps(two_ranks.METHODS[method](base, model), model, model, *two_ranks.batch())
    first, second = (rank[f"quantized-{scheme}-{method}"] for rank in ranks)
    assert_close(first["state"], whole["state"])
    assert_close(first["state"], second["state"], atol=0)
    for expected, *found in zip(whole["buffers"], first["buffers"], second["buffers"], strict=True):
        for own in found:
            assert_close(own, expected)


@pytest.mark.parametrize("method", two_ranks.ROUTED)
def test_ranks_may_use_different_parameters(method, ranks):
    """The loss of one process is the mean over both halves of the batch, each with its head."""
    model = two_ranks.Routed()
    optimizer = two_ranks.build(method, model)
    x, y = two_ranks.batch()
    halves = torch.arange(24) >= 12
    for t in range(two_ranks.STEPS):

        def both_heads(x, t=t):
            uses_first = (halves[: len(x)] == (t % 2 == 1))[:, None]
            return torch.where(uses_first, model(x, 0), model(x, 1))

        optimizer.step(two_ranks.closure(method, both_heads, x, y))
    for rank in ranks:
        assert_close(rank[f"routed-{method}"]["weights"], [p.detach() for p in model.parameters()])


@pytest.mark.parametrize("method", ["sam", "bsam"])
def test_buffers_that_change_the_loss_are_those_of_one_process(method, ranks):
    model = two_ranks.spectral_network()
    optimizer = two_ranks.build(method, model)
    for _ in range(two_ranks.STEPS):
        optimizer.step(two_ranks.closure(method, model, *two_ranks.batch()))
    for rank in ranks:
        assert_close(rank[f"spectral-{method}"]["state"], [t.detach() for t in model.state_dict().values()])


def test_check_finds_wrappers_that_the_closure_does_not_call(ranks):
    for rank in ranks:
        found = rank["check"]
        assert found["right"] == []
        assert found["sharded"] == ([], True)
        assert "does not call the DistributedDataParallel wrapper" in "".join(found["bypassed"])
        assert "no DistributedDataParallel or FSDP wrapper" in "".join(found["not wrapped"])
    first, second = (rank["check"]["steps"] for rank in ranks)
    assert_close(first, second, atol=0)  # the wrapper still reduces


@pytest.mark.parametrize("method", CHOOSING_LESS)
def test_ranks_that_choose_their_own_samples_stay_together(method, ranks):
    first, second = (rank[f"ddp-{method}"] for rank in ranks)
    assert_close(first["weights"], second["weights"], atol=0)
    whole, _ = one_process(method)
    assert distance(first["weights"], whole) > 1e-4


def test_ksam_on_two_ranks_is_sam_on_the_hardest_samples_of_each(ranks):
    model = two_ranks.network()
    optimizer = two_ranks.build("sam", model)
    x, y = two_ranks.batch()
    for _ in range(two_ranks.STEPS):
        losses = F.cross_entropy(model(x), y, reduction="none").detach()
        hard = torch.cat([losses[:12].topk(5).indices, 12 + losses[12:].topk(5).indices])
        optimizer.step(lambda: F.cross_entropy(model(x[hard]), y[hard]))
    assert_close(ranks[0]["ddp-ksam-5"]["weights"], [p.detach() for p in model.parameters()])


@pytest.mark.parametrize("method", two_ranks.REMEMBERING)
def test_memory_is_the_same_on_both_ranks_and_with_no_sync_before_it(method, ranks):
    """What a rank saw alone under no_sync is not remembered: AE-SAM's ranks would else come to different decisions, and
    wait for each other for ever.
    """
    for case in (f"ddp-{method}", f"ddp-accumulate-{method}"):
        first, second = (rank[case] for rank in ranks)
        assert_close(first["weights"], second["weights"], atol=0)
        assert first["memory"]["numbers"] == second["memory"]["numbers"]
        for a, b in zip(first["memory"]["vectors"], second["memory"]["vectors"], strict=True):
            assert a.keys() == b.keys()
            assert all(torch.equal(a[k], b[k]) for k in a)
        assert any(first["memory"]["vectors"]) is (method != "aesam")
        assert (None in first["memory"]["numbers"]) is False


def two_ranks_size() -> int:
    return sum(p.numel() for p in two_ranks.network().parameters())


def test_m_sharpness_perturbs_on_each_rank_and_reduces_once(ranks):
    first, second = (rank["m-sharpness"] for rank in ranks)
    assert_close(first["weights"], each_rank_on_its_own("bsam"))
    assert_close(first["weights"], second["weights"], atol=0)
    assert first["buckets"] == 0
    assert first["reductions"] == [two_ranks_size()] * two_ranks.STEPS
    whole, _ = one_process("bsam")
    assert distance(first["weights"], whole) > 1e-4  # it is another method


@pytest.mark.parametrize("method", two_ranks.ALONE)
def test_m_sharpness_of_each_kind_of_method(method, ranks):
    """A metric, chosen samples, memory, and a decision that differs between the ranks: each stays on its rank."""
    first, second = (rank[f"m-sharpness-{method}"] for rank in ranks)
    assert_close(first["weights"], by_hand(method))
    assert_close(first["weights"], second["weights"], atol=0)
    assert first["buckets"] == 0
    assert first["reductions"] == [two_ranks_size()] * two_ranks.STEPS


def test_ranks_that_perturb_on_their_own_start_from_the_mean_of_their_minima(ranks):
    """Ranks that step from their own minima would drift apart: start_from_min takes the mean of their perturbations."""
    first, second = (rank["m-sharpness-released"] for rank in ranks)
    assert_close(first["weights"], second["weights"], atol=0)
    assert_close(first["weights"], each_rank_on_its_own("released"))


def test_what_was_abandoned_under_no_sync_is_not_averaged_later(ranks):
    first, second = (rank["ddp-abandoned"] for rank in ranks)
    assert_close(first["weights"], one_process("bsam")[0])
    assert_close(first["weights"], second["weights"], atol=0)
    assert len(first["reductions"]) == first["buckets"] == two_ranks.STEPS * 3


@pytest.mark.parametrize(("case", "calls"), [("ddp-accumulate", 2), ("ddp-bucket-view-accumulate", 3)])
def test_accumulation_under_no_sync_is_averaged_later(ranks, case, calls):
    """The first call is left on its rank by no_sync, perturbed there, and averaged with the next. Later calls perturb
    along the mean of both ranks.

    With bucket views, the gradients of one call lie in memory that the next one writes to.
    """
    first, second = (rank[case] for rank in ranks)
    assert_close(first["weights"], second["weights"], atol=0)
    model = two_ranks.network()
    optimizer = two_ranks.build("bsam", model)
    of_rank = [
        list(zip(x.chunk(calls), y.chunk(calls), strict=True))
        for x, y in zip(*(t.chunk(2) for t in two_ranks.batch()), strict=True)
    ]
    for _ in range(two_ranks.STEPS):
        optimizer.zero_grad()
        for a, b in (of_rank[0][0], of_rank[1][0]):  # the first of each rank, under no_sync
            optimizer.backward(lambda: F.cross_entropy(model(a), b) / (2 * calls))
        for ours, theirs in zip(of_rank[0][1:], of_rank[1][1:], strict=True):
            x, y = (torch.cat(pair) for pair in zip(ours, theirs, strict=True))
            optimizer.backward(lambda: F.cross_entropy(model(x), y) / calls)
        optimizer.step()
    assert_close(first["weights"], [p.detach() for p in model.parameters()])
    assert first["buckets"] == two_ranks.STEPS * 3 * (calls - 1)
    assert len(first["reductions"]) == first["buckets"] + two_ranks.STEPS  # what no_sync left is averaged once


def test_m_sharpness_with_accumulation_reduces_once_a_step(ranks):
    first, second = (rank["m-sharpness-accumulate"] for rank in ranks)
    assert_close(first["weights"], second["weights"], atol=0)
    assert_close(first["weights"], each_rank_on_its_own("bsam", micro_batches=2))
    assert first["reductions"] == [2 * two_ranks_size()] * two_ranks.STEPS  # what was held and what is new, together


def test_m_sharpness_with_parameters_that_one_rank_or_none_reaches(ranks):
    first, second = (rank["m-sharpness-unused"] for rank in ranks)
    assert_close(first["weights"], second["weights"], atol=0)
    *_, spare_weight, spare_bias, partial_weight, partial_bias = first["grads"]
    assert spare_weight is None
    assert spare_bias is None
    assert partial_weight.abs().sum() > 0
    assert_close(second["grads"][-2:], [partial_weight, partial_bias], atol=0)


@pytest.mark.parametrize("method", [method for method in two_ranks.FSDP if method not in CHOOSING_LESS])
def test_fsdp_equals_one_process_on_the_whole_batch(method, ranks):
    first = ranks[0][f"fsdp-{method}"]
    assert first["exact"]
    assert_close(first["weights"], one_process(method)[0])


@pytest.mark.parametrize("method", CHOOSING_LESS)
def test_fsdp_equals_ddp_where_ranks_choose_their_own_samples(method, ranks):
    assert ranks[0][f"fsdp-{method}"]["exact"]
    assert_close(ranks[0][f"fsdp-{method}"]["weights"], ranks[0][f"ddp-{method}"]["weights"])


@pytest.mark.parametrize("method", two_ranks.FSDP)
def test_fsdp_resumes_bit_for_bit_with_memory_sharded_as_the_parameters_are(method, ranks):
    for rank in ranks:
        result = rank[f"fsdp-{method}"]
        assert result["as_parameters"]
        assert result["goes_on"]
        assert any(result["memory"]["vectors"]) is (method in two_ranks.REMEMBERING and method != "aesam")


def readings_of_one_process(method: str, part: slice) -> list[dict]:
    model = two_ranks.network()
    optimizer = two_ranks.build(method, model)
    probe = Probe(every=2).attach(optimizer)
    x, y = two_ranks.batch()
    for _ in range(two_ranks.STEPS):
        optimizer.step(two_ranks.closure(method, model, x[part], y[part]))
    return [asdict(reading) for reading in probe]


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@pytest.mark.parametrize("method", two_ranks.PROBED)
def test_a_probe_reads_the_batch_of_all_ranks(method, kind, ranks):
    first, second = (rank[f"probe-{kind}-{method}"]["readings"] for rank in ranks)
    if method != "ksam":  # whose ranks choose among their own samples: other steps
        assert first == [pytest.approx(reading, rel=1e-9) for reading in readings_of_one_process(method, slice(None))]
    assert first == [pytest.approx(reading, rel=1e-12) for reading in second]
    assert len(first) == 2


def test_a_probe_reads_the_part_of_its_rank_where_each_perturbs_on_its_own(ranks):
    for rank, part in zip(ranks, (slice(0, 12), slice(12, None)), strict=True):
        start, *_ = rank["probe-m-sharpness"]["readings"]
        assert start == pytest.approx(readings_of_one_process("sam", part)[0], rel=1e-9)


def test_a_second_derivative_is_refused_under_fsdp(ranks):
    for rank in ranks:
        assert "second derivatives, which FSDP does not support" in rank["fsdp-refusal"]["said"]
        assert rank["fsdp-refusal"]["exact"]


def test_ranks_decide_alike_under_no_sync(ranks):
    first, second = (rank["talking"] for rank in ranks)
    assert first["calls"] == second["calls"]
    assert 24 < first["calls"] < 48  # some with a second pass, some without
    assert_close(first["weights"], second["weights"], atol=0)


def test_a_static_graph_is_refused_where_a_pass_runs_without_the_reducer(ranks):
    assert all("does not work with static_graph=True" in rank["static-refusal"]["message"] for rank in ranks)


def kept_the_same(a: dict, b: dict) -> bool:
    """Whether two runs kept the same: vectors bit for bit, and numbers."""
    pairs = zip(a["memory"]["vectors"], b["memory"]["vectors"], strict=True)
    alike = all(x.keys() == y.keys() and all(torch.equal(x[k], y[k]) for k in x) for x, y in pairs)
    return alike and a["memory"]["numbers"] == b["memory"]["numbers"]


@pytest.mark.parametrize(
    "case", [*(f"{order}-{method}" for order, method in two_ranks.WRAPPED_LATER), "compiled-bsam", "two-wrappers"]
)
def test_a_wrapper_that_came_after_the_optimizer_is_found(case, ranks):
    """Frameworks accumulate under no_sync: the ranks stay together, and go where they go with the wrapper given."""
    (first, given), (second, _) = ((rank[f"{case}-found"], rank[f"{case}-given"]) for rank in ranks)
    assert_close(first["weights"], second["weights"], atol=0)
    assert_close(first["weights"], given["weights"], atol=0)
    assert kept_the_same(first, second)
    assert kept_the_same(first, given)
    assert first["sync"] is given["sync"] is True


def test_ranks_without_a_wrapper_step_as_ever(ranks):
    model = two_ranks.network()
    optimizer = two_ranks.build("bsam", model)
    for _ in range(2):
        optimizer.step(two_ranks.closure("bsam", model, *two_ranks.batch()))
    for rank in ranks:
        assert_close(rank["not-wrapped"]["weights"], [p.detach() for p in model.parameters()], atol=0)
        assert rank["not-wrapped"]["hooks"] == 0
        (told,) = rank["not-wrapped"]["told"]  # once
        assert "2 ranks, and the closure called no DistributedDataParallel or FSDP wrapper" in told


@pytest.mark.parametrize("case", ["inside-own", "inside-ours"])
def test_inside_of_the_wrappers_forward_gradients_are_averaged(ranks, case):
    first, second = (rank[case]["weights"] for rank in ranks)
    assert_close(first, one_process("bsam")[0])
    assert_close(first, second, atol=0)


@pytest.mark.parametrize("case", ["inside-own-accumulate", "wrapped-again"])
def test_ranks_stay_together_inside_of_a_wrapper_and_in_a_new_one(ranks, case):
    first, second = (rank[case]["weights"] for rank in ranks)
    assert_close(first, second, atol=0)
    assert float((first[0] - two_ranks.network().get_parameter("0.weight").detach()).abs().max()) > 1e-3


def test_a_discriminator_with_a_wrapper_of_its_own_keeps_its_gradients(ranks):
    for rank in ranks:
        assert rank["adversarial"]["kept"]
        assert rank["adversarial"]["tracked"] == 4  # its own two passes, and one of each of the two steps
    assert_close(*(rank["adversarial"]["weights"] for rank in ranks), atol=0)


def test_filters_of_warnings_are_as_they_were(ranks):
    assert not any("global hooks" in message for rank in ranks for message in rank["filters"]["messages"])


def test_a_wrapper_that_a_framework_names_is_used_while_it_exists():
    ranks = Ranks(None, m_sharpness=False)
    wrapper = torch.nn.Linear(1, 1)
    ranks.use(wrapper)
    assert ranks.ddp is wrapper
    del wrapper
    gc.collect()
    assert ranks.ddp is None

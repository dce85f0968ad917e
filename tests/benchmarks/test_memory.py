import gc
import json

import pytest
import torch

from bsam.core import vector
from bsam.core.tensors import Bucket
from bsam.methods import METHODS

CPU = torch.device("cpu")


def test_counter_follows_a_known_sequence(memory):
    with memory.StorageCounter() as counter:
        a = torch.zeros(1000)  # 4000 bytes
        b = a + 1  # 8000
        assert (counter.live(), counter.peak()) == (8000, 8000)
        c = a.view(10, 100)  # the storage of a
        b.mul_(2)
        torch.add(a, b, out=b)
        assert (counter.live(), counter.peak()) == (8000, 8000)
        del b
        assert (counter.live(), counter.peak()) == (4000, 8000)
        counter.reset()
        assert counter.peak() == 4000
        (a + 1).sum()  # 4000 and 4 bytes, temporarily
        assert (counter.live(), counter.peak()) == (4000, 8004)
        del a
        assert counter.live() == 4000  # the view holds it
        del c
        assert counter.live() == 0


def test_counter_sees_gradients(memory):
    with memory.StorageCounter() as counter:
        w = torch.zeros(1000, requires_grad=True)
        (w * 2).sum().backward()
        assert counter.live() == 8000  # w and its gradient
        assert counter.peak() > 8000
        w.grad = None
        assert counter.live() == 4000


KINDS = [("cpu", "fp32"), ("branches of a GPU", "fp32"), ("branches of a GPU", "bf16")]


@pytest.fixture(scope="module", params=KINDS, ids=" ".join)
def measured(memory, request):
    """The result for many layers, so that temporaries of one layer are small."""
    kind, dtype = request.param
    gc.collect()
    gc.freeze()  # makes the collections before each case faster
    with pytest.MonkeyPatch.context() as patch:
        if kind != "cpu":
            patch.setattr(Bucket, "on_cpu", False)
        patch.setattr(vector, "SLICE", 1)  # one layer at a time
        return kind, dtype, memory.measure(CPU, width=128, layers=32, dtype=memory.DTYPES[dtype])


# The most that a step may need beyond the base optimizer, in units of the parameters' size.
ON_CPU = {"SAM": 1.15, "MSAM": 1.15, "ASAM": 1.15, "BSAM2": 2.15, "BSAM3": 3.15, "LookSAM": 4.15}
IN_BF16 = {"FriendlySAM": 5, "VaSSO": 5, "MESA": 2}  # means in float32


def test_a_step_needs_no_more_memory_than_stated(memory, measured):
    kind, dtype, result = measured
    methods = result["methods"]
    classes = {case.label: METHODS[case.method] for case in memory.cases().values()}
    stated = {label: IN_BF16.get(label, m.memory) if dtype == "bf16" else m.memory for label, m in classes.items()}
    bars = ON_CPU if kind == "cpu" else {label: units + 0.5 for label, units in stated.items()}
    assert result["base"]["step"] == pytest.approx(3, abs=0.05)  # weights, gradients, momentum
    assert {label: methods[label]["extra_step"] for label in bars if methods[label]["extra_step"] > bars[label]} == {}
    if kind != "cpu":  # less would mean a broken counter, or a number that promises too little
        assert {label for label in bars if methods[label]["extra_step"] < stated[label] - 0.05} == set()


def test_memory_between_steps(memory, measured):
    """On a GPU, only what the method remembers."""
    kind, dtype, result = measured
    kept = {case.label: result["methods"][case.label]["extra_kept"] for case in memory.cases().values()}
    if kind == "cpu":
        assert kept["SAM"] == pytest.approx(1, abs=0.05)  # the backup: allocating it costs more than copying
    else:
        wide = 2 if dtype == "bf16" else 1
        stated = {case.label: METHODS[case.method].memory_kept for case in memory.cases().values()}
        stated |= {label: wide * stated[label] for label in IN_BF16}
        assert kept == pytest.approx(stated, abs=0.05)


def test_the_plainest_sam_needs_as_much_as_ours(memory, measured):
    _, _, result = measured
    plain, ours = (result["methods"][label]["extra_step"] for label in (memory.PLAIN, "SAM"))
    assert plain == pytest.approx(1, abs=0.05)
    assert ours <= plain + 0.1


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_stated_memory_on_the_gpu(memory, dtype):
    result = memory.measure(torch.device("cuda"), width=1024, layers=64, dtype=memory.DTYPES[dtype])
    for case in memory.cases().values():
        stated = IN_BF16.get(case.label) if dtype == "bf16" else None
        stated = METHODS[case.method].memory if stated is None else stated
        assert result["methods"][case.label]["extra_step"] <= stated + 0.5, case.label


def test_results(memory, monkeypatch, tmp_path, capsys):
    result = memory.measure(CPU, width=16, layers=2)
    monkeypatch.setattr(memory, "measure", lambda device, dtype: result)
    memory.main(["--device", "cpu", "--out", str(tmp_path / "new" / "memory.json")])
    content = json.loads((tmp_path / "new" / "memory.json").read_text())
    assert {"date", "device", "machine", "versions", "model", "fp32", "bf16"} <= set(content)
    assert content["bf16"]["methods"] == result["methods"]
    printed = capsys.readouterr().out
    assert all(case.label in printed for case in memory.cases().values())

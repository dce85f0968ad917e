import gc
import json
import re

import pytest
import torch

from bsam.methods import METHODS

CPU = torch.device("cpu")


def test_counter_follows_a_known_sequence(memory):
    with memory.StorageCounter() as counter:
        a = torch.zeros(1000)  # 4000 bytes
        b = a + 1  # 8000
        assert (counter.live, counter.peak()) == (8000, 8000)
        c = a.view(10, 100)  # the storage of a
        b.mul_(2)
        torch.add(a, b, out=b)
        assert (counter.live, counter.peak()) == (8000, 8000)
        del b
        assert (counter.live, counter.peak()) == (4000, 8000)
        counter.reset()
        assert counter.peak() == 4000
        (a + 1).sum()  # 4000 and 4 bytes, temporarily
        assert (counter.live, counter.peak()) == (4000, 8004)
        del a
        assert counter.live == 4000  # the view holds it
        del c
        assert counter.live == 0


def test_counter_sees_gradients(memory):
    with memory.StorageCounter() as counter:
        w = torch.zeros(1000, requires_grad=True)
        (w * 2).sum().backward()
        assert counter.live == 8000  # w and its gradient
        assert counter.peak() > 8000
        w.grad = None
        assert counter.live == 4000


@pytest.fixture(scope="module")
def measured(memory):
    """The result for many layers, so that temporaries of one layer are small."""
    gc.collect()
    gc.freeze()  # makes the collections before each case faster
    return memory.measure(CPU, width=128, layers=16)


def test_extra_memory_stays_within_the_bars(memory, measured):
    activations = 0.02  # and scalars
    assert measured["base"]["step"] == pytest.approx(3, abs=activations)  # weights, gradients, momentum
    methods = measured["methods"]
    for name, bar in memory.BARS.items():
        assert methods[name]["extra_backward"] <= bar + activations, name
    assert methods["SAM"]["extra_backward"] > 1  # the backup and g; less would mean a broken counter
    assert methods["BSAM3"]["extra_backward"] > 2


def test_stated_memory_is_the_measured_one(memory, measured):
    """To the nearest whole buffer; the rest are temporaries of one layer."""
    stated = {
        case.label: float(re.match(r"\d+", METHODS[name].memory).group())
        for name, case in memory.cases().items()
        if name in METHODS
    }
    assert stated == {name: round(measured["methods"][name]["extra_step"]) for name in stated}


def test_results(memory, measured, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(memory, "measure", lambda device: measured)
    memory.main(["--device", "cpu", "--out", str(tmp_path / "new" / "memory.json")])
    content = json.loads((tmp_path / "new" / "memory.json").read_text())
    assert {"date", "device", "machine", "versions", "model", "parameter_bytes", "base", "methods"} <= set(content)
    assert content["methods"] == measured["methods"]
    printed = capsys.readouterr().out
    assert all(case.label in printed for case in memory.cases().values())

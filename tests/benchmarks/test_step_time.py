import json

import pytest
import torch


def test_ratios_by_round_and_of_the_medians(step_time):
    seconds = {
        step_time.PASS: [1.0, 2.0, 4.0],
        step_time.BASE: [0.5, 1.0, 2.0],
        "SAM": [2.5, 5.5, 10.0],  # over 2a + b = 2.5, 5, 10
        "BSAM3": [7.0, 7.0, 7.0],  # over 3a + b = 3.5, 7, 14
    }
    ratios = step_time.ratios(seconds, {"SAM": 2, "BSAM3": 3})
    assert set(ratios) == {"SAM", "BSAM3"}
    assert ratios["SAM"] == pytest.approx({"passes": 2, "median": 1.0, "q1": 1.0, "q3": 1.05, "of_medians": 1.1})
    assert ratios["BSAM3"] == pytest.approx({"passes": 3, "median": 1.0, "q1": 0.75, "q3": 1.5, "of_medians": 1.0})


def test_costs_are_relative_to_the_whole_step_of_the_base(step_time):
    seconds = {step_time.WHOLE: [1.0, 2.0, 4.0], "LookSAM": [1.2, 2.4, 6.0]}
    ratios = step_time.costs(seconds, {"LookSAM": 1.2})
    assert ratios == {
        "LookSAM": pytest.approx({"promised": 1.2, "median": 1.2, "q1": 1.2, "q3": 1.35, "of_medians": 1.2})
    }


def test_spread(step_time):
    assert step_time.spread([3.0]) == {"median": 3.0, "q1": 3.0, "q3": 3.0}
    assert step_time.spread([5.0, 1.0, 2.0, 4.0, 3.0]) == {"median": 3.0, "q1": 2.0, "q3": 4.0}


def test_rounds_are_interleaved_and_rotated(step_time):
    calls = []
    cases = {name: (lambda name=name: calls.append(name)) for name in "abc"}
    seconds = step_time.sample(cases, 3, {"a": 2, "b": 2, "c": 4}, lambda: None)
    # each time one call more, which is not timed
    assert "".join(calls) == "aaabbbccccc" + "bbbcccccaaa" + "cccccaaabbb"
    assert all(len(values) == 3 for values in seconds.values())


def test_seconds_are_per_call(step_time, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(step_time.time, "perf_counter", lambda: clock[0])

    def run():
        clock[0] += 1.5

    assert step_time.sample({"a": run}, 2, {"a": 5}, lambda: None) == {"a": [1.5, 1.5]}


def test_distillation_is_timed(step_time, monkeypatch):
    from bsam.methods import distillation

    known, divergence = [], distillation.divergence
    monkeypatch.setattr(
        distillation,
        "divergence",
        lambda past, logits, tau: known.append(past.abs().sum() > 0) or divergence(past, logits, tau),
    )
    cases = step_time.build_cases(step_time.WORKLOADS["tiny"], torch.device("cpu"), "fp32", ["saf", "mesa"])
    known.clear()
    cases["SAF"]()
    cases["MESA"]()
    assert known == [True, True]


def test_methods_that_cannot_be_captured_are_left_out(step_time):
    cases = step_time.build_cases(
        step_time.WORKLOADS["tiny"], torch.device("cpu"), "fp32", list(step_time.cases()), capturable=True
    )
    assert set(cases).isdisjoint({"LookSAM", "RST", "AESAM", "ESAM", step_time.RIVAL})
    assert {"SAM", "MSAM", "BSAM3", "SANER", "SAF", "MESA"} <= set(cases)


def test_results(step_time, tmp_path, capsys):
    out = tmp_path / "new" / "step_time.json"
    threads = torch.get_num_threads()
    step_time.main(["--device", "cpu", "--models", "tiny", "--repeats", "2", "--threads", "1", "--out", str(out)])
    assert torch.get_num_threads() == threads
    content = json.loads(out.read_text())
    assert (content["benchmark"], content["device"], content["precision"]) == ("step_time", "cpu", "fp32")
    assert {"cpu", "cores", "gpu"} <= set(content["machine"])
    assert {"python", "torch", "bsam"} <= set(content["versions"])
    (result,) = content["results"]
    expected = {"model": "tiny", "parameters": 8970, "mode": "eager", "n": 2, "threads": 1}
    assert {name: result[name] for name in expected} == expected
    assert list(result["seconds"]) == [step_time.PASS, step_time.BASE, step_time.WHOLE, "SAM", "BSAM3", "BSAM2"]
    for s in result["seconds"].values():
        assert 0 < s["q1"] <= s["median"] <= s["q3"]
    for r in result["ratios"].values():
        assert set(r) == {"passes", "median", "q1", "q3", "of_medians"}
    assert {name: c["promised"] for name, c in result["costs"].items()} == {"SAM": 2, "BSAM3": 3, "BSAM2": 2}
    assert result["forwards"] == {step_time.WHOLE: 1, "SAM": 2, "BSAM3": 3, "BSAM2": 2}
    printed = capsys.readouterr().out
    assert all(name in printed for name in result["seconds"])


@pytest.mark.parametrize(
    "arguments",
    [["--repeats", "0"], ["--threads", "-2"], ["--captured"], ["--models", "resnet9"], ["--methods", "adam"]],
)
def test_refusals(step_time, capsys, arguments):
    with pytest.raises(SystemExit):
        step_time.main(["--device", "cpu", *arguments])
    assert arguments[0] in capsys.readouterr().err


@pytest.mark.gpu
def test_a_captured_run(step_time, tmp_path):
    out = tmp_path / "step_time.json"
    arguments = "--device cuda --precision bf16 --captured --models tiny --repeats 2 --out"
    step_time.main([*arguments.split(), str(out)])
    assert [result["mode"] for result in json.loads(out.read_text())["results"]] == ["eager", "captured"]

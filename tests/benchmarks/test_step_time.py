import dataclasses
import json

import pytest
import torch


def test_ratios_are_taken_round_by_round_and_of_the_medians(step_time):
    seconds = {
        step_time.PASS: [1.0, 2.0, 4.0],
        step_time.BASE: [0.5, 1.0, 2.0],
        "SAM": [2.5, 5.5, 10.0],  # over 2a + b = 2.5, 5, 10
        "BSAM3": [7.0, 7.0, 7.0],  # over 3a + b = 3.5, 7, 14
    }
    found = step_time.ratios(seconds)
    assert set(found) == {"SAM", "BSAM3"}
    assert found["SAM"] == pytest.approx({"passes": 2, "median": 1.0, "q1": 1.0, "q3": 1.05, "of_medians": 1.1})
    assert found["BSAM3"] == pytest.approx({"passes": 3, "median": 1.0, "q1": 0.75, "q3": 1.5, "of_medians": 1.0})


def test_spread_of_one_and_of_several(step_time):
    assert step_time.spread([3.0]) == {"median": 3.0, "q1": 3.0, "q3": 3.0}
    assert step_time.spread([5.0, 1.0, 2.0, 4.0, 3.0]) == {"median": 3.0, "q1": 2.0, "q3": 4.0}


def test_rounds_are_interleaved_and_rotated(step_time):
    calls = []
    cases = {name: (lambda name=name: calls.append(name)) for name in "abc"}
    seconds = step_time.sample(cases, 3, 2, lambda: None)
    assert "".join(calls) == "aaabbbccc" + "bbbcccaaa" + "cccaaabbb"  # one that is not timed, two that are
    assert all(len(values) == 3 for values in seconds.values())


def test_every_case_runs_its_passes_on_the_one_model(step_time, monkeypatch):
    counts = []
    forward = torch.nn.Sequential.forward
    monkeypatch.setattr(torch.nn.Sequential, "forward", lambda self, x: (counts.append(1), forward(self, x))[1])
    cases = step_time.build_cases(step_time.WORKLOADS["tiny"], torch.device("cpu"), "fp32")
    passes = {}
    for name, run in cases.items():
        counts.clear()
        run()
        passes[name] = len(counts)
    assert passes == {step_time.PASS: 1, step_time.BASE: 0, "SAM": 2, "BSAM3": 3, "BSAM2": 2}


def test_the_rival_runs_beside_ours(step_time):
    workload = dataclasses.replace(step_time.WORKLOADS["tiny"], rival=True)
    step_time.build_cases(workload, torch.device("cpu"), "fp32")[step_time.RIVAL]()


def test_models_are_the_ones_named(step_time):
    counted = {name: sum(p.numel() for p in w.model().parameters()) for name, w in step_time.WORKLOADS.items() if name != "wide-100m"}
    assert counted["resnet18"] == 11_173_962
    assert counted["resnet8"] == 78_042
    assert counted["deep-linear"] == 40 * (256 * 256 + 3 * 256) + 2570


def test_the_json_holds_machine_versions_and_every_figure(step_time, tmp_path, capsys):
    out = tmp_path / "new" / "step_time.json"
    threads = torch.get_num_threads()
    step_time.main(["--device", "cpu", "--models", "tiny", "--repeats", "2", "--threads", "1", "--out", str(out)])
    assert torch.get_num_threads() == threads
    content = json.loads(out.read_text())
    assert (content["benchmark"], content["device"], content["precision"]) == ("step_time", "cpu", "fp32")
    assert {"cpu", "cores", "gpu"} <= set(content["machine"])
    assert {"python", "torch", "bsam"} <= set(content["versions"])
    (result,) = content["results"]
    assert (result["model"], result["parameters"], result["mode"], result["n"], result["threads"]) == ("tiny", 8970, "eager", 2, 1)
    assert list(result["seconds"]) == [step_time.PASS, step_time.BASE, "SAM", "BSAM3", "BSAM2"]
    for s in result["seconds"].values():
        assert 0 < s["q1"] <= s["median"] <= s["q3"]
    for r in result["ratios"].values():
        assert set(r) == {"passes", "median", "q1", "q3", "of_medians"}
    printed = capsys.readouterr().out
    assert all(name in printed for name in result["seconds"])


def test_a_missing_rival_is_said_with_the_way_to_get_it(step_time, monkeypatch):
    monkeypatch.setattr(step_time.machine, "version_of", lambda package: None)
    workload = dataclasses.replace(step_time.WORKLOADS["tiny"], rival=True)
    result = step_time.time_steps(workload, torch.device("cpu"), "fp32", "eager", 1, None)
    assert step_time.RIVAL not in result["seconds"]
    assert "pip install 'bsam[bench]'" in step_time.table(result)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--device", "cpu", "--repeats", "0"], "--repeats must be at least 1"),
        (["--device", "cpu", "--threads", "-2"], "--threads must be at least 1"),
        (["--device", "cpu", "--captured"], "--captured needs a CUDA device"),
        (["--device", "cpu", "--models", "resnet9"], "invalid choice: 'resnet9'"),
    ],
)
def test_bad_arguments_are_refused_in_a_sentence(step_time, capsys, arguments, complaint):
    with pytest.raises(SystemExit):
        step_time.main(arguments)
    assert complaint in capsys.readouterr().err


def test_cuda_is_refused_where_there_is_none(step_time, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        step_time.main(["--device", "cuda"])
    assert "finds no CUDA device" in capsys.readouterr().err


@pytest.mark.gpu
def test_a_captured_run(step_time, tmp_path):
    out = tmp_path / "step_time.json"
    step_time.main(["--device", "cuda", "--precision", "bf16", "--captured", "--models", "tiny", "--repeats", "2", "--out", str(out)])
    assert [result["mode"] for result in json.loads(out.read_text())["results"]] == ["eager", "captured"]

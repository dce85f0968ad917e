import dataclasses
import json

import pytest
import torch

from bsam.methods import METHODS


def test_ratios_are_taken_round_by_round_and_of_the_medians(step_time):
    seconds = {
        step_time.PASS: [1.0, 2.0, 4.0],
        step_time.BASE: [0.5, 1.0, 2.0],
        "SAM": [2.5, 5.5, 10.0],  # over 2a + b = 2.5, 5, 10
        "BSAM3": [7.0, 7.0, 7.0],  # over 3a + b = 3.5, 7, 14
    }
    found = step_time.ratios(seconds, {"SAM": 2, "BSAM3": 3})
    assert set(found) == {"SAM", "BSAM3"}
    assert found["SAM"] == pytest.approx({"passes": 2, "median": 1.0, "q1": 1.0, "q3": 1.05, "of_medians": 1.1})
    assert found["BSAM3"] == pytest.approx({"passes": 3, "median": 1.0, "q1": 0.75, "q3": 1.5, "of_medians": 1.0})


def test_costs_are_over_the_whole_step_of_the_base(step_time):
    seconds = {step_time.WHOLE: [1.0, 2.0, 4.0], "LookSAM": [1.2, 2.4, 6.0]}
    found = step_time.costs(seconds, {"LookSAM": 1.2})
    assert found == {
        "LookSAM": pytest.approx({"promised": 1.2, "median": 1.2, "q1": 1.2, "q3": 1.35, "of_medians": 1.2})
    }


def test_spread_of_one_and_of_several(step_time):
    assert step_time.spread([3.0]) == {"median": 3.0, "q1": 3.0, "q3": 3.0}
    assert step_time.spread([5.0, 1.0, 2.0, 4.0, 3.0]) == {"median": 3.0, "q1": 2.0, "q3": 4.0}


def test_rounds_are_interleaved_and_rotated(step_time):
    calls = []
    cases = {name: (lambda name=name: calls.append(name)) for name in "abc"}
    seconds = step_time.sample(cases, 3, {"a": 2, "b": 2, "c": 4}, lambda: None)
    assert "".join(calls) == "aaabbbccccc" + "bbbcccccaaa" + "cccccaaabbb"  # one that is not timed, and those that are
    assert all(len(values) == 3 for values in seconds.values())


def test_seconds_are_per_call(step_time, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(step_time.time, "perf_counter", lambda: clock[0])

    def run():
        clock[0] += 1.5

    assert step_time.sample({"a": run}, 2, {"a": 5}, lambda: None) == {"a": [1.5, 1.5]}


@pytest.fixture
def forwards(monkeypatch):
    """The batch sizes of every forward pass of a network."""
    counts = []
    forward = torch.nn.Sequential.forward
    monkeypatch.setattr(torch.nn.Sequential, "forward", lambda self, x: (counts.append(len(x)), forward(self, x))[1])
    return counts


def test_every_case_runs_its_passes_on_the_one_model(step_time, forwards):
    """A whole cycle of each, from wherever it stands: the mean is the same."""
    cases = step_time.build_cases(step_time.WORKLOADS["tiny"], torch.device("cpu"), "fp32", list(step_time.cases()))
    passes = {}
    for name, run in cases.items():
        run()
        run()
        steps = step_time.whole_cycles(run, 1)
        forwards.clear()
        for _ in range(steps):
            run()
        passes[name] = len(forwards) / steps
        if isinstance(run, step_time.Steps) and name not in ("MESA", "AESAM"):
            assert run.forwards == passes[name]
    share = passes.pop("AESAM") - 1
    assert 0 < share < 1
    twice = dict.fromkeys(("SAM", "ASAM", "GSAM", "FisherSAM", "FriendlySAM", "PGN", "BSAM2"), 2)
    others = {
        "GAM": 4,
        "LookSAM": 1.2,
        "ESAM": 3,
        "KSAM": 3,
        "MSAM": 1,
        "RST": 1.5,
        "SAF": 1,
        "MESA": 2,
        "BSAM3": 3,
    }  # the average of MESA passes, too
    assert passes == {step_time.PASS: 1, step_time.BASE: 0, step_time.WHOLE: 1} | twice | others


def test_promises_are_those_of_the_list_of_methods(step_time):
    promised = {name: case.passes for name, case in step_time.cases().items()}
    assert promised == {**{name: method.passes for name, method in METHODS.items()}, "bsam-2": 2}
    assert [step_time.cases()[name].label for name in ("sam", "bsam", "bsam-2")] == ["SAM", "BSAM3", "BSAM2"]


def test_methods_that_choose_samples_take_half_of_a_batch(step_time, forwards):
    cases = step_time.build_cases(step_time.WORKLOADS["tiny"], torch.device("cpu"), "fp32", ["ksam", "esam"])
    for name, sizes in (("KSAM", [32, 16, 16]), ("ESAM", [32, 32, 16])):
        forwards.clear()
        cases[name]()
        assert forwards == sizes


def test_the_second_term_of_the_losses_is_timed(step_time, monkeypatch):
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


def test_what_cannot_be_captured_is_left_out(step_time):
    cases = step_time.build_cases(
        step_time.WORKLOADS["tiny"], torch.device("cpu"), "fp32", list(step_time.cases()), capturable=True
    )
    assert set(cases).isdisjoint({"FriendlySAM", "LookSAM", "RST", "AESAM", "ESAM", "SAF", step_time.RIVAL})
    assert {"SAM", "MSAM", "BSAM3"} <= set(cases)


def test_the_rival_runs_beside_ours(step_time):
    workload = dataclasses.replace(step_time.WORKLOADS["tiny"], rival=True)
    step_time.build_cases(workload, torch.device("cpu"), "fp32")[step_time.RIVAL]()


def test_models_are_the_ones_named(step_time):
    counted = {
        name: sum(p.numel() for p in w.model().parameters())
        for name, w in step_time.WORKLOADS.items()
        if name != "wide-100m"
    }
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
    assert (result["model"], result["parameters"], result["mode"], result["n"], result["threads"]) == (
        "tiny",
        8970,
        "eager",
        2,
        1,
    )
    assert list(result["seconds"]) == [step_time.PASS, step_time.BASE, step_time.WHOLE, "SAM", "BSAM3", "BSAM2"]
    for s in result["seconds"].values():
        assert 0 < s["q1"] <= s["median"] <= s["q3"]
    for r in result["ratios"].values():
        assert set(r) == {"passes", "median", "q1", "q3", "of_medians"}
    assert {name: c["promised"] for name, c in result["costs"].items()} == {"SAM": 2, "BSAM3": 3, "BSAM2": 2}
    assert result["forwards"] == {step_time.WHOLE: 1, "SAM": 2, "BSAM3": 3, "BSAM2": 2}
    printed = capsys.readouterr().out
    assert all(name in printed for name in result["seconds"])


def test_all_methods_can_be_asked_for(step_time):
    args, _ = step_time.parse(["--device", "cpu", "--methods", "all"])
    assert args.methods == [*METHODS, "bsam-2"]
    args, _ = step_time.parse(["--device", "cpu", "--methods", "rst", "sam", "rst"])
    assert args.methods == ["rst", "sam"]


def test_a_missing_rival_is_said_with_the_way_to_get_it(step_time, monkeypatch):
    monkeypatch.setattr(step_time.machine, "version_of", lambda package: None)
    workload = dataclasses.replace(step_time.WORKLOADS["tiny"], rival=True)
    result = step_time.time_steps(workload, torch.device("cpu"), "fp32", "eager", 1, None)
    assert step_time.RIVAL not in result["seconds"]
    assert "pip install -c constraints.txt '.[bench]'" in step_time.table(result)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--device", "cpu", "--repeats", "0"], "--repeats must be at least 1"),
        (["--device", "cpu", "--threads", "-2"], "--threads must be at least 1"),
        (["--device", "cpu", "--captured"], "--captured needs a CUDA device"),
        (["--device", "cpu", "--models", "resnet9"], "invalid choice: 'resnet9'"),
        (["--device", "cpu", "--methods", "adam"], "invalid choice: 'adam'"),
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
    step_time.main(
        [
            "--device",
            "cuda",
            "--precision",
            "bf16",
            "--captured",
            "--models",
            "tiny",
            "--repeats",
            "2",
            "--out",
            str(out),
        ]
    )
    assert [result["mode"] for result in json.loads(out.read_text())["results"]] == ["eager", "captured"]

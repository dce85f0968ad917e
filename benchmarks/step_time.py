"""How long a step takes, against the gradient passes that it cannot do without.

In one interleaved run, for each model: (a) clear, forward and backward, (b) the base optimizer's step, and whole SAM and BSAM steps.
Beyond its passes and the base step a method should cost nothing: ``SAM / (2a + b)``, ``BSAM3 / (3a + b)`` and ``BSAM2 / (2a + b)`` should be 1.

    python benchmarks/step_time.py                                          # CPU: two or three minutes
    python benchmarks/step_time.py --device cuda --precision bf16 --captured
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

import bsam
import machine
from workloads import CLASSES, DEFAULT, WORKLOADS, Workload

Cases: TypeAlias = dict[str, Callable[[], object]]

PASS, BASE, RIVAL = "forward+backward", "base step", "pytorch_optimizer SAM"
PASSES = {"SAM": 2, "BSAM3": 3, "BSAM2": 2, RIVAL: 2}
WARM_UP = 1  # rounds, of two calls each: they allocate and choose kernels
SAMPLE = {"cpu": 2e-3, "cuda": 3e-2}  # seconds that one sample should take at least: shorter ones show launches and clocks


def build_cases(workload: Workload, device: torch.device, precision: str, *, capturable: bool = False) -> Cases:
    """What is timed, on one model and one batch that all of it shares: each optimizer brings only its own state."""
    torch.manual_seed(0)
    model = workload.model().to(device)
    x, y = torch.randn(workload.batch, device=device), torch.randint(CLASSES, workload.batch[:1], device=device)
    if precision == "bf16" and device.type == "cuda" and x.dim() == 4:
        model, x = model.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
    settings = {**workload.settings, "capturable": True} if capturable and workload.base is torch.optim.AdamW else workload.settings

    def new_base() -> torch.optim.Optimizer:
        return workload.base(model.parameters(), **settings)

    def loss() -> Tensor:
        # a cache of casts outlives the capture that filled it, and would hand its replay to the next one
        with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16", cache_enabled=not capturable):
            return F.cross_entropy(model(x), y)

    def forward_backward() -> None:
        base.zero_grad(set_to_none=True)
        loss().backward()

    def stepping(optimizer: bsam.core.optimizer.SharpnessAware) -> Callable[[], object]:
        return lambda: optimizer.step(loss)

    base = new_base()
    cases: Cases = {
        PASS: forward_backward,
        BASE: base.step,  # every other case leaves gradients for it
        "SAM": stepping(bsam.SAM(new_base(), model)),
        "BSAM3": stepping(bsam.BSAM(new_base(), model)),
        "BSAM2": stepping(bsam.BSAM(new_base(), model, passes=2)),
    }
    if workload.rival and not capturable and machine.version_of("pytorch_optimizer"):
        cases[RIVAL] = rival_case(workload, model, loss)
    return cases


def rival_case(workload: Workload, model: torch.nn.Module, loss: Callable[[], Tensor]) -> Callable[[], object]:
    """A step of pytorch_optimizer's SAM, as its documentation has it: the first gradient is the caller's."""
    import pytorch_optimizer

    optimizer = pytorch_optimizer.SAM(model.parameters(), workload.base, rho=0.05, **workload.settings)

    def closure() -> Tensor:
        value = loss()
        value.backward()
        return value

    def step() -> None:
        optimizer.zero_grad()
        closure()
        optimizer.step(closure)

    return step


def captured(cases: Cases) -> Cases:
    """Each case, already warm, as one CUDA graph, captured on the current stream: it must be the one that everything was built and warmed up on."""
    replays: Cases = {}
    for name, run in cases.items():
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            run()
        replays[name] = graph.replay
    return replays


def sample(cases: Cases, repeats: int, inner: int, synchronize: Callable[[], object]) -> dict[str, list[float]]:
    """Seconds per call, ``repeats`` samples for each case: round robin, and each round starts one case further on.

    One call before each sample is not timed: caches and heap are then as this case leaves them, as they are in training, and not as the case before it did
    (malloc hands gradients back to the system, and whoever comes next pays for the page faults).
    """
    names = list(cases)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for r in range(repeats):
        for name in names[r % len(names) :] + names[: r % len(names)]:
            run = cases[name]
            run()
            synchronize()
            start = time.perf_counter()
            for _ in range(inner):
                run()
            synchronize()
            seconds[name].append((time.perf_counter() - start) / inner)
    return seconds


def spread(values: list[float]) -> dict[str, float]:
    """Median and quartiles."""
    q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    return {"median": median, "q1": q1, "q3": q3}


def ratios(seconds: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """Each method over its passes and the base step: round by round (a machine that drifts slows both sides of a round), and of the medians."""
    a, b = seconds[PASS], seconds[BASE]
    out = {}
    for name, passes in PASSES.items():
        if name in seconds:
            each_round = [s / (passes * a_r + b_r) for s, a_r, b_r in zip(seconds[name], a, b, strict=True)]
            of_medians = statistics.median(seconds[name]) / (passes * statistics.median(a) + statistics.median(b))
            out[name] = {"passes": passes, **spread(each_round), "of_medians": of_medians}
    return out


@contextmanager
def cpu_threads(n: int | None) -> Iterator[int]:
    """``n`` threads inside torch operations; None leaves them as they are."""
    before = torch.get_num_threads()
    torch.set_num_threads(n or before)
    try:
        yield torch.get_num_threads()
    finally:
        torch.set_num_threads(before)


def time_steps(workload: Workload, device: torch.device, precision: str, mode: str, repeats: int | None, threads: int | None) -> dict[str, Any]:
    """One model, eager or captured: all medians, quartiles and ratios, as they go into the JSON file."""
    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    repeats = repeats or workload.repeats[device.type]
    with cpu_threads(workload.threads or threads) as used:
        if mode == "captured":
            with torch.cuda.stream(torch.cuda.Stream()):
                eager = build_cases(workload, device, precision, capturable=True)
                sample(eager, WARM_UP, 1, synchronize)
                cases = captured(eager)
        else:
            cases = build_cases(workload, device, precision)
        warm = sample(cases, WARM_UP, 1, synchronize)
        inner = math.ceil(SAMPLE[device.type] / min(warm[PASS]))
        seconds = sample(cases, repeats, inner, synchronize)
    note = None
    if workload.rival and RIVAL not in cases:
        note = "not timed when captured" if mode == "captured" else "not installed: pip install 'bsam[bench]'"
    return {
        "model": workload.name,
        "parameters": sum(p.numel() for p in workload.model().parameters()),
        "batch": list(workload.batch),
        "base": workload.base.__name__,
        "mode": mode,
        "precision": precision,
        "threads": used,
        "n": repeats,
        "inner": inner,
        "seconds": {name: spread(values) for name, values in seconds.items()},
        "ratios": ratios(seconds),
        "rival": note,
    }


def table(result: dict[str, Any]) -> str:
    """A result, to read."""
    lines = [
        "{model}: {parameters:,} parameters, batch {batch[0]}, {base}, {precision}, {mode}, {threads} CPU thread(s), n = {n} x {inner}".format(**result),
        f"  {'median [quartiles]':<24}{'ms':<32}{'over a = forward+backward, b = base step':<41}of medians",
    ]
    for name, s in result["seconds"].items():
        line = f"  {name:<24}" + _interval({q: 1e3 * value for q, value in s.items()})
        if name in result["ratios"]:
            r = result["ratios"][name]
            line = f"{line:<58}/ ({r['passes']}a + b) = {_interval(r):<27}{r['of_medians']:.3f}"
        lines.append(line)
    if result["rival"]:
        lines.append(f"  {RIVAL:<24}{result['rival']}")
    return "\n".join(lines)


def _interval(s: dict[str, float]) -> str:
    return f"{s['median']:.3f} [{s['q1']:.3f}, {s['q3']:.3f}]"


def parse(arguments: list[str] | None) -> tuple[argparse.Namespace, torch.device]:
    """The command line, checked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    machine.add_arguments(parser, "step_time")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32", help="bf16: under autocast, on CUDA in channels_last too")
    chosen = f"some of: {', '.join(WORKLOADS)} (default: on CUDA all, on the CPU {', '.join(DEFAULT['cpu'])})"
    parser.add_argument("--models", nargs="+", choices=list(WORKLOADS), metavar="MODEL", help=chosen)
    parser.add_argument("--repeats", type=int, help="samples of each case (default: per model, to end in time)")
    parser.add_argument("--threads", type=int, help="CPU threads (default: torch's choice); tiny and deep-linear always have one")
    parser.add_argument("--captured", action="store_true", help="CUDA: time each case as a CUDA graph, too")
    args = parser.parse_args(arguments)
    device = machine.pick_device(parser, args.device)
    for name in ("repeats", "threads"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(args, name)}")
    if args.captured and device.type != "cuda":
        parser.error("--captured needs a CUDA device: a CUDA graph cannot be captured on the CPU")
    args.models = args.models or DEFAULT[device.type]
    return args, device


def main(arguments: list[str] | None = None) -> None:
    """Time, print, write."""
    args, device = parse(arguments)
    torch.backends.cudnn.benchmark = True  # the search is over before the first sample
    results = []
    for name in args.models:
        for mode in ("eager", "captured") if args.captured else ("eager",):
            print(f"{name}, {mode} ...", file=sys.stderr, flush=True)
            results.append(time_steps(WORKLOADS[name], device, args.precision, mode, args.repeats, args.threads))
            print(table(results[-1]) + "\n", flush=True)
    content = {"benchmark": "step_time", **machine.description(device), "precision": args.precision, "results": results}
    print(f"written to {machine.write(content, args.out, 'step_time')}", file=sys.stderr)


if __name__ == "__main__":
    main()

"""Time of a step relative to the gradient passes that it needs.

For each model, one interleaved run times (a) clear, forward and backward, (b) the base optimizer's step, both together,
and whole steps of the methods. A method should cost nothing beyond its passes and the base step, so ``SAM / (2a + b)``,
``BSAM3 / (3a + b)`` and ``BSAM2 / (2a + b)`` should be 1. The time relative to a whole step of the base optimizer and
the number of forward passes are reported too.

    python benchmarks/step_time.py                                          # CPU: two or three minutes
    python benchmarks/step_time.py --models resnet8 --methods all
    python benchmarks/step_time.py --device cuda --precision bf16 --captured
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

import machine
from bsam.common.extras import install_line
from bsam.lab.training.trainer import TrainStep
from cases import DEFAULT as DEFAULT_CASES
from cases import Case, cases
from workloads import CLASSES, DEFAULT, WORKLOADS, Workload

Cases: TypeAlias = dict[str, Callable[[], object]]
Batch: TypeAlias = tuple[Tensor, Tensor, Tensor]

PASS, BASE, WHOLE, RIVAL = "forward+backward", "base step", "base, whole step", "pytorch_optimizer SAM"
BATCHES = 10  # used in turn, as in training: AE-SAM compares gradients of different batches
WARM_UP = 1  # rounds with two calls each, which allocate memory and choose kernels
SAMPLE = {"cpu": 2e-3, "cuda": 3e-2}  # minimum seconds per sample: shorter ones measure launches and clocks


class Steps:
    """A training loop: each call is one step on the next batch.

    After ``cycle`` steps the optimizer's step count restarts from 0, so any ``cycle`` consecutive calls contain the
    same kinds of steps.
    """

    def __init__(self, train_step: TrainStep, batches: Sequence[Batch], cycle: int = 1) -> None:
        self.cycle = cycle
        self._model = train_step.model
        self._train_step = dataclasses.replace(train_step, model=self._forward)
        self._batches = itertools.cycle(batches)
        self._forwards, self._taken, self._in_whole_cycles = 0, 0, (0, 1)

    def _forward(self, x: Tensor) -> Tensor:
        self._forwards += 1
        return self._model(x)

    def __call__(self) -> None:
        """Take one step."""
        if self.cycle > 1 and self._taken % self.cycle == 0:
            for group in self._train_step.optimizer.param_groups:
                group["steps_taken"] = 0
        self._train_step.step(*next(self._batches))
        self._taken += 1
        if self._taken % self.cycle == 0:
            self._in_whole_cycles = self._forwards, self._taken

    @property
    def forwards(self) -> float:
        """Average number of forward passes per step, over all whole cycles so far."""
        forwards, taken = self._in_whole_cycles
        return forwards / taken


class Autocast(nn.Module):
    """A network that runs under autocast to bfloat16."""

    def __init__(self, network: nn.Module, device: torch.device, cache: bool) -> None:
        super().__init__()
        self.network, self.device, self.cache = network, device, cache

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits in float32."""
        with torch.autocast(self.device.type, torch.bfloat16, cache_enabled=self.cache):
            return self.network(x).float()


def build_cases(
    workload: Workload,
    device: torch.device,
    precision: str,
    methods: Sequence[str] = DEFAULT_CASES,
    *,
    capturable: bool = False,
) -> Cases:
    """Return the timed functions, which share one model and its batches; ``capturable`` omits those that are not."""
    torch.manual_seed(0)
    model, size = workload.model().to(device), workload.batch[0]
    batches = [
        (
            torch.randn(workload.batch, device=device),
            torch.randint(CLASSES, (size,), device=device),
            torch.arange(i * size, (i + 1) * size, device=device),
        )
        for i in range(1 if capturable else BATCHES)
    ]
    if len(workload.batch) == 4:
        batches = [(x.to(memory_format=torch.channels_last), y, index) for x, y, index in batches]
    if precision == "bf16":
        # autocast's cache outlives a capture, and the next capture would use its tensors
        model = Autocast(model, device, cache=not capturable)
    settings = (
        {**workload.settings, "capturable": True}
        if capturable and workload.base is torch.optim.AdamW
        else workload.settings
    )

    def new_base() -> torch.optim.Optimizer:
        return workload.base(model.parameters(), **settings)

    def stepping(case: Case) -> Steps:
        train_step = case.train_step(new_base(), model, batch=size, samples=size * len(batches), classes=CLASSES)
        if train_step.loss is not None:  # it needs the outputs of a first epoch
            with torch.no_grad():
                for batch in batches:
                    train_step.evaluate(*batch)
            train_step.loss.set_epoch(1)
        return Steps(train_step, batches, case.cycle)

    def forward_backward() -> None:
        plain.optimizer.zero_grad()
        plain.backward(*next(feed))

    plain, feed = TrainStep(model, new_base()), itertools.cycle(batches)
    built: Cases = {
        PASS: forward_backward,
        BASE: plain.optimizer.step,
        WHOLE: Steps(TrainStep(model, new_base()), batches),
    }  # the gradients for BASE come from the other functions
    chosen = [cases()[name] for name in methods]
    built |= {case.label: stepping(case) for case in chosen if case.capturable or not capturable}
    if workload.rival and not capturable and machine.version_of("pytorch_optimizer"):
        built[RIVAL] = rival_case(workload, model, lambda: plain.losses(*batches[0]).mean())
    return built


def rival_case(workload: Workload, model: torch.nn.Module, loss: Callable[[], Tensor]) -> Callable[[], object]:
    """Return a step of pytorch_optimizer's SAM as in its documentation: the caller computes the first gradient."""
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
    """Capture each warm case as a CUDA graph, on the current stream, which must be the one used for warm-up."""
    replays: Cases = {}
    for name, run in cases.items():
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            run()
        replays[name] = graph.replay
    return replays


def sample(
    cases: Cases, repeats: int, steps: Mapping[str, int], synchronize: Callable[[], object]
) -> dict[str, list[float]]:
    """Return the seconds per call in ``repeats`` samples of ``steps`` calls per case, interleaved.

    Each round starts with the next case. One call before each sample is not timed, so that caches and heap are in the
    state that this case leaves, as in training, and not in that of the previous case, whose freed memory would cause
    page faults.
    """
    names = list(cases)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for r in range(repeats):
        for name in names[r % len(names) :] + names[: r % len(names)]:
            run = cases[name]
            run()
            synchronize()
            start = time.perf_counter()
            for _ in range(steps[name]):
                run()
            synchronize()
            seconds[name].append((time.perf_counter() - start) / steps[name])
    return seconds


def spread(values: list[float]) -> dict[str, float]:
    """Return the median and the quartiles."""
    q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    return {"median": median, "q1": q1, "q3": q3}


def ratios(seconds: dict[str, list[float]], passes: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Return the time of each method relative to its passes and the base step, by round and from the medians.

    Ratios by round are robust against a machine whose speed drifts.
    """
    a, b = seconds[PASS], seconds[BASE]
    out = {}
    for name, n in passes.items():
        each_round = [s / (n * a_r + b_r) for s, a_r, b_r in zip(seconds[name], a, b, strict=True)]
        of_medians = statistics.median(seconds[name]) / (n * statistics.median(a) + statistics.median(b))
        out[name] = {"passes": n, **spread(each_round), "of_medians": of_medians}
    return out


def costs(seconds: dict[str, list[float]], passes: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Return the time of each method relative to a whole base step, and the passes that the method states."""
    whole = seconds[WHOLE]
    out = {}
    for name, n in passes.items():
        each_round = [s / w for s, w in zip(seconds[name], whole, strict=True)]
        out[name] = {
            "promised": n,
            **spread(each_round),
            "of_medians": statistics.median(seconds[name]) / statistics.median(whole),
        }
    return out


@contextmanager
def cpu_threads(n: int | None) -> Iterator[int]:
    """Use ``n`` threads in torch operations; None keeps the current number."""
    before = torch.get_num_threads()
    torch.set_num_threads(n or before)
    try:
        yield torch.get_num_threads()
    finally:
        torch.set_num_threads(before)


def time_steps(
    workload: Workload,
    device: torch.device,
    precision: str,
    mode: str,
    repeats: int | None,
    threads: int | None,
    methods: Sequence[str] = DEFAULT_CASES,
) -> dict[str, Any]:
    """Time one model, eager or captured, and return the entry for the JSON file."""
    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    repeats = repeats or workload.repeats[device.type]
    with cpu_threads(workload.threads or threads) as used:
        if mode == "captured":
            with torch.cuda.stream(torch.cuda.Stream()):
                eager = build_cases(workload, device, precision, methods, capturable=True)
                sample(eager, WARM_UP, dict.fromkeys(eager, 1), synchronize)
                built = captured(eager)
        else:
            built = build_cases(workload, device, precision, methods)
        warm = sample(built, WARM_UP, dict.fromkeys(built, 1), synchronize)
        inner = math.ceil(SAMPLE[device.type] / min(warm[PASS]))
        seconds = sample(built, repeats, {name: whole_cycles(run, inner) for name, run in built.items()}, synchronize)
    chosen = [cases()[name] for name in methods]
    passes = {case.label: case.passes for case in chosen if case.label in built}
    note = None
    if workload.rival and RIVAL not in built:
        note = "not timed when captured" if mode == "captured" else f"not installed: {install_line('bench')}"
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
        "ratios": ratios(seconds, passes | ({RIVAL: 2} if RIVAL in built else {})),
        "costs": costs(seconds, passes),
        "forwards": {name: run.forwards for name, run in built.items() if isinstance(run, Steps)},
        "rival": note,
    }


def whole_cycles(run: Callable[[], object], steps: int) -> int:
    """Round ``steps`` up to whole cycles."""
    cycle = run.cycle if isinstance(run, Steps) else 1
    return cycle * math.ceil(steps / cycle)


def table(result: dict[str, Any]) -> str:
    """Format a result as a table."""
    lines = [
        "{model}: {parameters:,} parameters, batch {batch[0]}, {base}, {precision}, {mode}, ".format(**result)
        + "{threads} CPU thread(s), n = {n} x {inner}".format(**result),
        f"  {'median [quartiles]':<24}{'ms':<32}{'over a = forward+backward, b = base step':<43}"
        f"{'of medians':<13}over the base's whole step",
    ]
    for name, s in result["seconds"].items():
        line = f"  {name:<24}" + _interval({q: 1e3 * value for q, value in s.items()})
        if name in result["ratios"]:
            r = result["ratios"][name]
            line = f"{line:<58}/ ({r['passes']:g}a + b) = {_interval(r)}"
            line = f"{line:<101}{r['of_medians']:<13.3f}"
        if name in result["costs"]:
            c = result["costs"][name]
            line += f"{_interval(c)}, promised {c['promised']:g}"
        if name in result["forwards"]:
            line = f"{line:<148}{result['forwards'][name]:.2f} forwards per step"
        lines.append(line)
    if result["rival"]:
        lines.append(f"  {RIVAL:<24}{result['rival']}")
    return "\n".join(lines)


def _interval(s: dict[str, float]) -> str:
    return f"{s['median']:.3f} [{s['q1']:.3f}, {s['q3']:.3f}]"


def parse(arguments: list[str] | None) -> tuple[argparse.Namespace, torch.device]:
    """Parse and check the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    machine.add_arguments(parser, "step_time")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32", help="bf16 uses autocast")
    models = f"some of: {', '.join(WORKLOADS)} (default: all on CUDA, {', '.join(DEFAULT['cpu'])} on the CPU)"
    parser.add_argument("--models", nargs="+", choices=list(WORKLOADS), metavar="MODEL", help=models)
    parser.add_argument(
        "--methods",
        nargs="+",
        choices=[*cases(), "all"],
        default=list(DEFAULT_CASES),
        metavar="METHOD",
        help=f"some of: {', '.join(cases())}; or all (default: {', '.join(DEFAULT_CASES)})",
    )
    parser.add_argument("--repeats", type=int, help="samples per case (default: depends on the model)")
    parser.add_argument(
        "--threads", type=int, help="CPU threads (default: torch's choice); tiny and deep-linear always use one"
    )
    parser.add_argument("--captured", action="store_true", help="time each case as a CUDA graph too")
    args = parser.parse_args(arguments)
    device = machine.pick_device(parser, args.device)
    for name in ("repeats", "threads"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(args, name)}")
    if args.captured and device.type != "cuda":
        parser.error("--captured needs a CUDA device")
    args.models = args.models or DEFAULT[device.type]
    args.methods = list(cases()) if "all" in args.methods else list(dict.fromkeys(args.methods))
    return args, device


def main(arguments: list[str] | None = None) -> None:
    """Run the benchmark, print and write the results."""
    args, device = parse(arguments)
    torch.backends.cudnn.benchmark = True  # the search ends before the first sample
    results = []
    for name in args.models:
        for mode in ("eager", "captured") if args.captured else ("eager",):
            print(f"{name}, {mode} ...", file=sys.stderr, flush=True)
            results.append(
                time_steps(WORKLOADS[name], device, args.precision, mode, args.repeats, args.threads, args.methods)
            )
            print(table(results[-1]) + "\n", flush=True)
    content = {"benchmark": "step_time", **machine.description(device), "precision": args.precision, "results": results}
    print(f"written to {machine.write(content, args.out, 'step_time')}", file=sys.stderr)


if __name__ == "__main__":
    main()

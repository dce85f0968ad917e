"""Wall time of many small runs: in sequence, with several processes, and with Ray.

Before the clock starts, each process has trained one run. The overhead per run is the time in which processes do not
train: (number of processes times wall time, minus the seconds in the logs) / number of runs. It includes the time that
a process waits at the end for the last run of another.

    python benchmarks/executors.py --runs 12 --rounds 3
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import ray
import torch

import machine
from bsam.lab.config import Run
from bsam.lab.running.executors import Executor, local_processes, ray_tasks
from bsam.lab.running.runner import run_all
from bsam.lab.training import Machine
from bsam.lab.training.run_dir import LOG

EXECUTORS = {
    "jobs 1": contextlib.nullcontext,
    "jobs 2": lambda: local_processes(2, "cpu", threads=1),
    "ray, 2 CPUs": lambda: ray_tasks(Machine("cpu", ray="")),
}


def measure(executor: Executor | None, runs: list[Run], out: Path) -> dict[str, float]:
    """Return the wall time of the runs and the executor's overhead per run, in seconds."""
    begin = time.perf_counter()
    states = run_all(runs, out, Machine("cpu"), executor=executor)
    wall = time.perf_counter() - begin
    assert all(state.finished for state in states)
    logs = [(state.path / LOG).read_text() for state in states]
    training = sum(float(log.rpartition(", in ")[2].split()[0]) for log in logs)
    slots = 1 if executor is None else executor.slots()
    return {"wall": wall, "overhead": (min(slots, len(runs)) * wall - training) / len(runs)}


def main() -> None:
    """Run the benchmark and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=12, help="number of runs (default 12)")
    parser.add_argument("--epochs", type=int, default=20, help="epochs per run (default 20)")
    parser.add_argument("--rounds", type=int, default=3, help="repetitions per executor, interleaved (default 3)")
    parser.add_argument("--out", type=Path, help="JSON file (default: benchmarks/results/executors_cpu.json)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    runs = [Run("bsam", seed=seed, epochs=args.epochs, batch=64) for seed in range(args.runs)]
    first = [Run("sgd", seed=seed, epochs=1, batch=64, limit_train=64) for seed in range(4)]
    results: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        executors = {}
        for name, make in EXECUTORS.items():
            begin = time.perf_counter()
            executors[name] = stack.enter_context(make())
            run_all(first, Path(folder, name, "first"), Machine("cpu"), executor=executors[name])
            results[name] = {"start": time.perf_counter() - begin, "rounds": []}
        for number in range(args.rounds):
            for name, executor in executors.items():
                times = measure(executor, runs, Path(folder, name, str(number)))
                results[name]["rounds"].append(times)
                print(f"{name:12} wall {times['wall']:6.2f} s, overhead {times['overhead']:5.3f} s per run", flush=True)
    for result in results.values():
        for figure in ("wall", "overhead"):
            result[figure] = statistics.median(times[figure] for times in result["rounds"])
    content = {**machine.description(torch.device("cpu")), "ray": machine.version_of("ray"), "runs": args.runs}
    print(machine.write({**content, "epochs": args.epochs, "executors": results}, args.out, "executors"))


if __name__ == "__main__":
    main()

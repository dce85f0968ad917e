"""Wall time of small runs, one after the other, with several processes, and with Ray, in one run.

For each executor the processes are started and have trained one run each before the clock starts. The overhead of a run
is how long its process was not working on it: number of processes times wall time, less the seconds that each run's log
says, over the number of runs. It has the time in which a process waits for the last run of another one.

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

import torch

import machine
from bsam.running.executors import Executor, InProcess, LocalProcesses
from bsam.running.ray_tasks import ray_tasks
from bsam.running.runner import run_all
from bsam.training.config import Run
from bsam.training.run_dir import LOG

EXECUTORS = {
    "jobs 1": InProcess,
    "jobs 2": lambda: LocalProcesses(2, "cpu", threads=1),
    "ray, 2 CPUs": lambda: ray_tasks(device="cpu", cpus=2),
}


def measure(executor: Executor, runs: list[Run], out: Path) -> dict[str, float]:
    """Seconds of the runs, and of the executor for each of them."""
    begin = time.perf_counter()
    states = run_all(runs, out, executor=executor, device="cpu")
    wall = time.perf_counter() - begin
    assert all(state.finished for state in states)
    logs = [(state.path / LOG).read_text() for state in states]
    inside = sum(float(log.rpartition(", in ")[2].split()[0]) for log in logs)
    return {"wall": wall, "overhead": (min(executor.slots, len(runs)) * wall - inside) / len(runs)}


def main() -> None:
    """Parse, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=12, help="how many")
    parser.add_argument("--epochs", type=int, default=20, help="of each run")
    parser.add_argument("--rounds", type=int, default=3, help="times that each executor runs them, in turn")
    parser.add_argument("--out", type=Path, help="the JSON file (default: benchmarks/results/executors_cpu.json)")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    runs = [Run("bsam", seed=seed, epochs=asked.epochs, batch=64) for seed in range(asked.runs)]
    first = [Run("sgd", seed=seed, epochs=1, batch=64, limit_train=64) for seed in range(4)]
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        executors = {}
        for name, make in EXECUTORS.items():
            begin = time.perf_counter()
            executors[name] = stack.enter_context(make())
            run_all(first, Path(folder, name, "first"), executor=executors[name], device="cpu")
            found[name] = {"start": time.perf_counter() - begin, "rounds": []}
        for number in range(asked.rounds):
            for name, executor in executors.items():
                one = measure(executor, runs, Path(folder, name, str(number)))
                found[name]["rounds"].append(one)
                print(f"{name:12} wall {one['wall']:6.2f} s, overhead {one['overhead']:5.3f} s a run", flush=True)
    for each in found.values():
        for figure in ("wall", "overhead"):
            each[figure] = statistics.median(one[figure] for one in each["rounds"])
    content = {**machine.description(torch.device("cpu")), "ray": machine.version_of("ray"), "runs": asked.runs}
    print(machine.write({**content, "epochs": asked.epochs, "executors": found}, asked.out, "executors"))


if __name__ == "__main__":
    main()

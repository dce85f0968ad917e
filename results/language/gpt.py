"""Train the rows of gpt.json: python results/language/gpt.py --workers 2

The validation losses of `examples/gpt_from_scratch.py` at several radii, with equal numbers of gradient passes.
Finished runs are in --log, so that the same command goes on after an interruption.
"""

from __future__ import annotations

import argparse
import json
import platform
import runpy
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch

from bsam.lab.training.machine import environment_info

EXAMPLE = Path(__file__).parents[2] / "examples/gpt_from_scratch.py"
PASSES = 2000
RADII = (0.01, 0.03, 0.1, 0.3)
SEEDS = range(3)
ROWS = [("half", None), ("AdamW", None), *((name, rho) for name in ("SAM", "FunctionalSAM") for rho in RADII)]


def train(method: str, rho: float | None, seed: int) -> float:
    """Return the validation loss per character of one training."""
    torch.set_num_threads(1)
    main: Any = runpy.run_path(str(EXAMPLE))["main"]
    return float(main(PASSES, [method], seed=seed, **({} if rho is None else {"rho": rho}))[method])


def main() -> None:
    """Train what is missing, and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    parser.add_argument("--log", type=Path, default=Path("gpt.jsonl"), help="finished runs")
    parser.add_argument("--workers", type=int, default=2)
    flags = parser.parse_args()
    lines = flags.log.read_text(encoding="utf-8").splitlines() if flags.log.exists() else []
    done = {(method, rho, seed): loss for method, rho, seed, loss in map(json.loads, lines)}
    missing = [(*row, seed) for seed in SEEDS for row in ROWS if (*row, seed) not in done]
    with ProcessPoolExecutor(flags.workers) as pool, flags.log.open("a", encoding="utf-8") as log:
        jobs = {pool.submit(train, *key): key for key in missing}
        for number, job in enumerate(as_completed(jobs), 1):
            done[jobs[job]] = round(job.result(), 5)
            log.write(json.dumps([*jobs[job], done[jobs[job]]]) + "\n")
            log.flush()
            print(f"{number} of {len(jobs)}: {jobs[job]} {done[jobs[job]]:.4f}", flush=True)
    content = {
        "what": "validation loss per character (nats) after the last step, by seed; half: AdamW with half of the steps",
        "made": "python results/language/gpt.py, one thread per run",
        "machine": {**environment_info(), "python": platform.python_version()},  # the text is that of this version
        "passes": PASSES,
        "seeds": list(SEEDS),
    }
    rows = [{"method": name, "rho": rho, "loss": [done[name, rho, seed] for seed in SEEDS]} for name, rho in ROWS]
    head = json.dumps(content, indent=1).removesuffix("\n}")
    text = ",\n  ".join(json.dumps(row) for row in rows)
    flags.out.write_text(f'{head},\n "rows": [\n  {text}\n ]\n}}\n', encoding="utf-8")


if __name__ == "__main__":
    main()

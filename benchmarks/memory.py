"""Peak memory of a step beyond the base optimizer's peak, for every method, in units of the parameters' size.

With wide layers and batch size 1 nearly all memory is in weight space: the backup of the weights, the gradients that a
method holds while it computes the next one, and its state between steps. Memory is counted after warm-up, with SGD and
momentum, over all kinds of steps.

    python benchmarks/memory.py
"""

from __future__ import annotations

import argparse
import gc
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

import machine
from bsam.lab.training.trainer import TrainStep
from cases import Case, cases

WIDTH, LAYERS = 2048, 4
WARM_UP = 2  # steps
BARS = {"SAM": 2.0, "BSAM3": 3.0}  # parameter-size buffers that backward may use beyond the base optimizer's peak


class Counter(Protocol):
    """Counts the bytes of live tensors."""

    def reset(self) -> None:
        """Forget the peak so far."""

    def peak(self) -> int:
        """Return the largest number of live bytes since :meth:`reset`."""


class StorageCounter(TorchDispatchMode):
    """Counts the storage of every tensor created inside the ``with`` block until it is freed.

    The count is exact and reproducible, but does not include memory that a kernel allocates and frees internally.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self._most = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in tree_iter(out):
            if isinstance(t, Tensor):
                self._note(t.untyped_storage())
        return out

    def _note(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata  # shared by views and results of in-place operations
        if key not in self._known:
            self._known.add(key)
            self.live += storage.nbytes()
            self._most = max(self._most, self.live)
            weakref.finalize(storage, self._forget, key, storage.nbytes()).atexit = False

    def _forget(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self.live -= nbytes

    def reset(self) -> None:
        """Forget the peak so far."""
        self._most = self.live

    def peak(self) -> int:
        """Return the largest number of live bytes since :meth:`reset`."""
        return self._most


class CudaCounter:
    """Counts the bytes of CUDA's caching allocator."""

    def reset(self) -> None:
        """Forget the peak so far."""
        torch.cuda.reset_peak_memory_stats()

    def peak(self) -> int:
        """Return the largest number of live bytes since :meth:`reset`."""
        return torch.cuda.max_memory_allocated()


@contextmanager
def counting(device: torch.device) -> Iterator[Counter]:
    """Count the tensors created inside."""
    gc.collect()  # reference cycles of an earlier case
    if device.type == "cuda":
        yield CudaCounter()
    else:
        with StorageCounter() as counter:
            yield counter


def peaks(device: torch.device, case: Case | None, width: int = WIDTH, layers: int = LAYERS) -> dict[str, int]:
    """Return the bytes of the parameters, and the peaks of ``backward`` and of a whole step; None is the base alone."""
    with counting(device) as counter:
        model = nn.Sequential(*(nn.Linear(width, width, bias=False, device=device) for _ in range(layers)))
        first = torch.zeros(1, dtype=torch.int64, device=device)  # the only class, and the only sample
        inputs = [torch.full((1, width), size, device=device) for size in (1.0, 2.0)]  # small and large gradients
        base = torch.optim.SGD(model.parameters(), lr=1e-6, momentum=0.9)
        known = {"batch": 1, "samples": 1, "classes": width}
        train_step = TrainStep(model, base) if case is None else case.train_step(base, model, **known)
        if train_step.loss is not None:
            train_step.loss.set_epoch(1)  # with the second term of SAF and MESA
        in_backward = in_step = 0
        cycle = 1 if case is None else case.cycle
        for t in range(WARM_UP + cycle):
            counter.reset()
            train_step.optimizer.zero_grad()
            train_step.backward(inputs[t % 2], first, first)
            backward = counter.peak()
            train_step.optimizer.step()
            if t >= WARM_UP:  # the state between steps exists by then
                in_backward, in_step = max(in_backward, backward), max(in_step, counter.peak())
        return {
            "parameters": sum(p.numel() * p.element_size() for p in model.parameters()),
            "backward": in_backward,
            "step": in_step,
        }


def measure(device: torch.device, width: int = WIDTH, layers: int = LAYERS) -> dict[str, Any]:
    """Return the base optimizer's peak and the extra memory of each method, in units of the parameters' size."""
    base = peaks(device, None, width, layers)
    unit = base["parameters"]
    methods = {}
    for case in cases().values():
        peak = peaks(device, case, width, layers)
        methods[case.label] = {f"extra_{when}": (peak[when] - base["step"]) / unit for when in ("backward", "step")}
    return {
        "parameter_bytes": unit,
        "base": {when: base[when] / unit for when in ("backward", "step")},
        "methods": methods,
    }


def main(arguments: list[str] | None = None) -> None:
    """Run the benchmark, print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    machine.add_arguments(parser, "memory")
    args = parser.parse_args(arguments)
    device = machine.pick_device(parser, args.device)
    result = measure(device)
    print(
        f"{LAYERS} x Linear {WIDTH}, batch 1, SGD with momentum, {device.type}; unit: the parameters' "
        f"{result['parameter_bytes'] / 2**20:.0f} MiB"
    )
    print(f"  base optimizer, peak: {result['base']['step']:.3f}")
    print(f"  {'beyond that':<14}{'backward(closure)':>18}{'whole step':>14}{'bar, backward':>16}")
    for name, extra in result["methods"].items():
        bar = f"{BARS[name]:.0f}" if name in BARS else ""
        print(f"  {name:<14}{extra['extra_backward']:18.3f}{extra['extra_step']:14.3f}{bar:>16}")
    model = {"width": WIDTH, "layers": LAYERS, "batch": 1, "base": "SGD, momentum 0.9"}
    content = {"benchmark": "memory", **machine.description(device), "model": model, **result}
    print(f"written to {machine.write(content, args.out, 'memory')}", file=sys.stderr)


if __name__ == "__main__":
    main()

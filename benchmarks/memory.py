"""Peak memory of a step beyond the base optimizer's peak, for every method, in units of the parameters' size.

With wide layers and batch size 1 nearly all memory is in weight space: the backup of the weights, the gradients that a
method holds while it computes the next one, and its state between steps. Memory is counted after warm-up, with SGD and
momentum, over all kinds of steps, with fp32 and bf16 parameters. Beside the methods are the plainest SAM, in the fewest
lines, and that of pytorch_optimizer.

    python benchmarks/memory.py
"""

from __future__ import annotations

import argparse
import gc
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

import machine
from bsam.lab.training.trainer import TrainStep
from cases import Case, cases

WIDTH, LAYERS = 2048, 16
WARM_UP = 2  # steps
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
PLAIN, RIVAL = "plain SAM", "pytorch_optimizer SAM"


class Counter(Protocol):
    """Counts the bytes of live tensors."""

    def reset(self) -> None:
        """Forget the peak so far."""

    def peak(self) -> int:
        """Return the largest number of live bytes since :meth:`reset`."""

    def live(self) -> int:
        """Return the number of live bytes."""


class StorageCounter(TorchDispatchMode):
    """Counts the storage of every tensor created inside the ``with`` block until it is freed.

    The count is exact and reproducible, but does not include memory that a kernel allocates and frees internally.
    """

    def __init__(self) -> None:
        super().__init__()
        self._live = 0
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
            self._live += storage.nbytes()
            self._most = max(self._most, self._live)
            weakref.finalize(storage, self._forget, key, storage.nbytes()).atexit = False

    def _forget(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self._live -= nbytes

    def reset(self) -> None:
        """Forget the peak so far."""
        self._most = self._live

    def peak(self) -> int:
        """Return the largest number of live bytes since :meth:`reset`."""
        return self._most

    def live(self) -> int:
        """Return the number of live bytes."""
        return self._live


class CudaCounter:
    """Counts the bytes of CUDA's caching allocator."""

    def reset(self) -> None:
        """Forget the peak so far."""
        torch.cuda.reset_peak_memory_stats()

    def peak(self) -> int:
        """Return the largest number of live bytes since :meth:`reset`."""
        return torch.cuda.max_memory_allocated()

    def live(self) -> int:
        """Return the number of live bytes."""
        return torch.cuda.memory_allocated()


@contextmanager
def counting(device: torch.device) -> Iterator[Counter]:
    """Count the tensors created inside."""
    gc.collect()  # reference cycles of an earlier case
    if device.type == "cuda":
        yield CudaCounter()
    else:
        with StorageCounter() as counter:
            yield counter


class Steps(Protocol):
    """Whole steps, in the two parts of :class:`bsam.lab.training.trainer.TrainStep`."""

    optimizer: torch.optim.Optimizer

    def backward(self, x: Tensor, y: Tensor, index: Tensor) -> Tensor:
        """Compute the gradient that the base optimizer's step uses."""


class PlainSAM:
    """SAM in the fewest lines: it keeps a copy of the weights, and computes the second gradient where the first was."""

    def __init__(self, model: nn.Module, base: torch.optim.Optimizer, rho: float = 0.05) -> None:
        self.model, self.optimizer, self.rho = model, base, rho

    def backward(self, x: Tensor, y: Tensor, index: Tensor) -> Tensor:
        """Leave the gradient at the perturbed weights in ``p.grad``."""
        loss = nn.functional.cross_entropy(self.model(x), y)
        loss.backward()
        params = [*self.model.parameters()]
        with torch.no_grad():
            length = torch.stack([p.grad.norm() for p in params if p.grad is not None]).norm()
            before = [p.clone() for p in params]
            for p in params:
                p.add_(p.grad, alpha=float(self.rho / (length + 1e-12)))
        self.optimizer.zero_grad()
        nn.functional.cross_entropy(self.model(x), y).backward()
        with torch.no_grad():
            for p, w in zip(params, before, strict=True):
                p.copy_(w)
        return loss.detach()


class RivalSAM(PlainSAM):
    """SAM of pytorch_optimizer, used as its documentation does."""

    def __init__(self, model: nn.Module, base: torch.optim.Optimizer) -> None:
        import pytorch_optimizer

        sam = pytorch_optimizer.SAM(model.parameters(), torch.optim.SGD, rho=0.05, lr=1e-6, momentum=0.9)
        super().__init__(model, sam)

    def backward(self, x: Tensor, y: Tensor, index: Tensor) -> Tensor:
        """Take the whole step: its second half contains that of the base optimizer."""
        loss = nn.functional.cross_entropy(self.model(x), y)
        loss.backward()
        self.optimizer.first_step(zero_grad=True)
        nn.functional.cross_entropy(self.model(x), y).backward()
        self.optimizer.second_step(zero_grad=True)
        return loss.detach()


def peaks(
    device: torch.device,
    build: Callable[[torch.optim.Optimizer, nn.Module], Steps],
    cycle: int = 1,
    width: int = WIDTH,
    layers: int = LAYERS,
    dtype: torch.dtype = torch.float32,
) -> dict[str, int]:
    """Return the bytes of the parameters, at the peaks of ``backward`` and of a whole step, and between steps."""
    with counting(device) as counter:
        linear = (nn.Linear(width, width, bias=False, device=device, dtype=dtype) for _ in range(layers))
        model = nn.Sequential(*linear)
        first = torch.zeros(1, dtype=torch.int64, device=device)  # the only class, and the only sample
        inputs = [torch.full((1, width), size, device=device, dtype=dtype) for size in (1.0, 2.0)]  # two gradients
        steps = build(torch.optim.SGD(model.parameters(), lr=1e-6, momentum=0.9), model)
        in_backward = in_step = 0
        for t in range(WARM_UP + cycle):
            counter.reset()
            steps.optimizer.zero_grad()
            steps.backward(inputs[t % 2], first, first)
            backward = counter.peak()
            if not isinstance(steps, RivalSAM):
                steps.optimizer.step()
            if t >= WARM_UP:  # the state between steps exists by then
                in_backward, in_step = max(in_backward, backward), max(in_step, counter.peak())
        steps.optimizer.zero_grad()
        gc.collect()
        return {
            "parameters": sum(p.numel() * p.element_size() for p in model.parameters()),
            "backward": in_backward,
            "step": in_step,
            "kept": counter.live(),
        }


def builder(case: Case, width: int) -> Callable[[torch.optim.Optimizer, nn.Module], Steps]:
    """Return a function that builds the steps of a method."""

    def build(base: torch.optim.Optimizer, model: nn.Module) -> Steps:
        train_step = case.train_step(base, model, batch=1, samples=1, classes=width)
        if train_step.loss is not None:
            train_step.loss.set_epoch(1)  # with the second term of SAF and MESA
        return train_step

    return build


def measure(
    device: torch.device, width: int = WIDTH, layers: int = LAYERS, dtype: torch.dtype = torch.float32
) -> dict[str, Any]:
    """Return the base optimizer's peak and the extra memory of each method, in units of the parameters' size."""
    sizes = {"width": width, "layers": layers, "dtype": dtype}
    base = peaks(device, lambda base, model: TrainStep(model, base), **sizes)
    unit = base["parameters"]
    found = {case.label: peaks(device, builder(case, width), case.cycle, **sizes) for case in cases().values()}
    found[PLAIN] = peaks(device, lambda base, model: PlainSAM(model, base), **sizes)
    if machine.version_of("pytorch_optimizer"):
        found[RIVAL] = peaks(device, lambda base, model: RivalSAM(model, base), **sizes)
    beyond = {"backward": "step", "step": "step", "kept": "kept"}  # what the base optimizer needs alone
    return {
        "parameter_bytes": unit,
        "base": {when: base[when] / unit for when in beyond},
        "methods": {
            label: {f"extra_{when}": (peak[when] - base[alone]) / unit for when, alone in beyond.items()}
            for label, peak in found.items()
        },
    }


def main(arguments: list[str] | None = None) -> None:
    """Run the benchmark, print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    machine.add_arguments(parser, "memory")
    args = parser.parse_args(arguments)
    device = machine.pick_device(parser, args.device)
    results = {name: measure(device, dtype=dtype) for name, dtype in DTYPES.items()}
    model = {"width": WIDTH, "layers": LAYERS, "batch": 1, "base": "SGD, momentum 0.9"}
    for name, result in results.items():
        print(
            f"{LAYERS} x Linear {WIDTH}, {name}, batch 1, SGD with momentum, {device.type}; unit: the parameters' "
            f"{result['parameter_bytes'] / 2**20:.0f} MiB"
        )
        print(f"  base optimizer, peak: {result['base']['step']:.3f}")
        print(f"  {'beyond that':<24}{'backward(closure)':>18}{'whole step':>14}{'between steps':>16}")
        for method, extra in result["methods"].items():
            print(
                f"  {method:<24}{extra['extra_backward']:18.3f}{extra['extra_step']:14.3f}{extra['extra_kept']:16.3f}"
            )
    content = {"benchmark": "memory", **machine.description(device), "model": model, **results}
    print(f"written to {machine.write(content, args.out, 'memory')}", file=sys.stderr)


if __name__ == "__main__":
    main()

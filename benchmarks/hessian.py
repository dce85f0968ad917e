"""The cost of Hessian products, and the time for the top eigenvalues compared with PyHessian and curvlinops.

Products are timed in units of gradient passes over the same data, interleaved, both plain and inside H.linearized(),
with the default memory or that of --max-gb. Eigenvalues are the k largest in magnitude. Each tool uses its own method
(PyHessian: power iteration with deflation; curvlinops: scipy's eigsh on its operator; bsam: thick-restart Lanczos
inside H.linearized()), and one operator computes the residuals of all of them afterwards. bsam then runs again with the
residual of each other tool as its tolerance. --only-ours omits the other tools, for sizes at which they are too slow.

    python benchmarks/hessian.py                                                       # CPU, ResNet-8
    python benchmarks/hessian.py --device cuda --model resnet18 --cifar DIR --epochs 5   # DIR: cifar-10-batches-bin
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import machine
from bsam.core.undo import Undo
from bsam.flatness import HessianOperator, top_eigenvalues
from bsam.lab.models import MODELS, build
from step_time import spread

Data: TypeAlias = list[tuple[Tensor, Tensor]]
Eigenpairs: TypeAlias = tuple[list[float], list[Tensor], dict[str, Any]]  # values, vectors, further numbers
CLASSES = 10
WARM_UP = 2  # rounds: the first product in forward mode is compared with one in reverse mode
PEERS = {"PyHessian": "PyHessian", "curvlinops": "curvlinops-for-pytorch"}
NOISE = 10_000  # images, without a data folder
RECORD = 3073  # bytes of a CIFAR-10 image: the label and three planes
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.247, 0.2435, 0.2616)  # of the training images


def images(folder: Path | None, files: list[str], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return images and labels of CIFAR-10 in its binary layout, or noise without a folder."""
    if folder is None:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(NOISE, 3, 32, 32, generator=generator)
        return x.to(device), torch.randint(CLASSES, (NOISE,), generator=generator).to(device)
    raw = np.concatenate([np.fromfile(folder / f"{name}.bin", np.uint8).reshape(-1, RECORD) for name in files])
    x = torch.from_numpy(raw[:, 1:]).reshape(-1, 3, 32, 32).to(device).float() / 255
    mean, std = (torch.tensor(c, device=device).view(1, 3, 1, 1) for c in (MEAN, STD))
    return (x - mean) / std, torch.from_numpy(raw[:, 0]).long().to(device)


def train(model: nn.Module, x: Tensor, y: Tensor, epochs: int) -> None:
    """Train a few epochs with SGD and flips, in bf16 on CUDA: enough for the spectrum of a trained network."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4, nesterov=True)
    batch = min(128, len(y))
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=0.2, total_steps=max(epochs * (len(y) // batch), 1)
    )
    model.train()
    for _ in range(epochs):
        for index in torch.randperm(len(y), device=x.device).split(batch):
            if len(index) == batch:
                inputs = torch.where(torch.rand(batch, 1, 1, 1, device=x.device) < 0.5, x[index], x[index].flip(3))
                with torch.autocast(x.device.type, torch.bfloat16, enabled=x.is_cuda):
                    loss = F.cross_entropy(model(inputs), y[index])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
    optimizer.zero_grad(set_to_none=True)
    model.eval()


def product_cost(H: HessianOperator, repeats: int, synchronize: Callable[[], object]) -> dict[str, Any]:
    """Return the seconds of a product and of a gradient pass over the same data, and their ratio by round."""
    v = H.random(torch.Generator().manual_seed(1))

    def gradient() -> None:
        with Undo() as undo, undo:
            H.loss.begin(undo)
            H.loss.value_and_grad()

    cases = {"gradient": gradient, "product": lambda: H.times(v)}
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for round_ in range(WARM_UP + repeats):
        for name, run in cases.items():
            synchronize()
            start = time.perf_counter()
            run()
            synchronize()
            if round_ >= WARM_UP:
                seconds[name].append(time.perf_counter() - start)
    ratio = [p / g for p, g in zip(seconds["product"], seconds["gradient"], strict=True)]
    return {**{name: spread(values) for name, values in seconds.items()}, "ratio": spread(ratio), "n": repeats}


def ours(model: nn.Module, data: Data, k: int, tol: float, max_bytes: int | None) -> Eigenpairs:
    """Run thick-restart Lanczos."""
    H = HessianOperator(model, F.cross_entropy, data)
    with H.linearized(max_bytes):
        top = top_eigenvalues(H, k=k, which="magnitude", tol=tol, vectors=True)
    assert top.vectors is not None
    return (
        top.values.tolist(),
        [H.flat(v) for v in top.vectors],
        {"products": top.products, "converged": bool(top.converged)},
    )


def pyhessian(model: nn.Module, data: Data, k: int, tol: float, _: int | None) -> Eigenpairs:
    """Run power iteration with deflation; the tolerance limits the change of a value, 1e-3 by default."""
    from pyhessian import hessian

    tool = hessian(model, nn.CrossEntropyLoss(), dataloader=data, cuda=data[0][0].is_cuda)
    values, vectors = tool.eigenvalues(top_n=k, maxIter=100, tol=tol)
    return values, [torch.cat([t.reshape(-1) for t in v]) for v in vectors], {}


def curvlinops(model: nn.Module, data: Data, k: int, tol: float, _: int | None) -> Eigenpairs:
    """Run scipy's eigsh on curvlinops' operator."""
    from curvlinops import HessianLinearOperator
    from scipy.sparse.linalg import eigsh

    params = [p for p in model.parameters() if p.requires_grad]
    operator = HessianLinearOperator(model, nn.CrossEntropyLoss(), params, data, check_deterministic=False)
    values, vectors = eigsh(operator.to_scipy(), k=k, which="LM", tol=tol)
    return values.tolist(), [torch.from_numpy(np.ascontiguousarray(v)).to(data[0][0]) for v in vectors.T], {}


TOOLS = {"bsam": ours, "PyHessian": pyhessian, "curvlinops": curvlinops}


def eigenvalues(
    tool: str,
    model: nn.Module,
    data: Data,
    k: int,
    tol: float,
    max_bytes: int | None,
    synchronize: Callable[[], object],
) -> dict[str, Any]:
    """Return the seconds, the eigenvalues, and the residuals of the eigenpairs."""
    synchronize()
    start = time.perf_counter()
    values, vectors, more = TOOLS[tool](model, data, k, tol, max_bytes)
    synchronize()
    seconds = time.perf_counter() - start
    model.zero_grad(set_to_none=True)
    H = HessianOperator(model, F.cross_entropy, data)
    residuals = []
    for value, v in zip(values, vectors, strict=True):
        unit = v / v.norm()
        residuals.append(float((H.times(unit) - value * unit).norm()) / abs(value))
    return {
        "tool": tool,
        "seconds": seconds,
        "k": k,
        "tol": tol,
        "values": sorted(values, key=abs, reverse=True),
        "worst_relative_residual": max(residuals),
        **more,
    }


def main(arguments: list[str] | None = None) -> None:
    """Run the benchmark, print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    machine.add_arguments(parser, "hessian")
    models = [name for name, entry in MODELS.items() if entry.channels == 3 and entry.backbone is None]
    parser.add_argument("--model", choices=models, default="resnet8")
    parser.add_argument(
        "--cifar", type=Path, help="folder cifar-10-batches-bin, with any of its training files (default: noise)"
    )
    parser.add_argument("--epochs", type=int, default=1, help="training epochs before the measurement (default 1)")
    parser.add_argument("--images", type=int, default=512, help="number of test images (default 512)")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--k", type=int, default=10)
    parser.add_argument("--tol", type=float, default=1e-3, help="tolerance, as each tool defines it (default 1e-3)")
    parser.add_argument("--repeats", type=int, default=10, help="rounds of products (default 10)")
    parser.add_argument("--tf32", action="store_true", help="let convolutions on CUDA use TF32")
    parser.add_argument(
        "--max-gb", type=float, help="memory for the recording (default: that of linearized())", metavar="GB"
    )
    parser.add_argument("--only-ours", action="store_true")
    args = parser.parse_args(arguments)
    device = machine.pick_device(parser, args.device)
    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = True
    torch.manual_seed(0)
    model = build(args.model).to(device)
    batches = [path.stem for path in sorted(args.cifar.glob("data_batch_*.bin"))] if args.cifar else []
    train(model, *images(args.cifar, batches, device), args.epochs)
    torch.backends.cudnn.allow_tf32 = args.tf32
    x, y = (t[: args.images] for t in images(args.cifar, ["test_batch"], device))
    x = x.contiguous(memory_format=torch.channels_last)
    data = list(zip(x.split(args.batch), y.split(args.batch), strict=True))
    settings = {
        name: getattr(args, name) for name in ("model", "epochs", "images", "batch", "k", "tol", "tf32", "max_gb")
    }
    content: dict[str, Any] = {
        "benchmark": "hessian",
        **machine.description(device),
        **settings,
        "data": "CIFAR-10 test" if args.cifar else "noise",
    }
    content["versions"] |= {name: machine.version_of(package) for name, package in PEERS.items()}
    max_bytes = None if args.max_gb is None else int(args.max_gb * 1e9)
    for name, budget in {"product": 0, "linearized_product": max_bytes}.items():
        H = HessianOperator(model, F.cross_entropy, data)
        start = time.perf_counter()
        with H.linearized(budget) as recording:
            entering = time.perf_counter() - start
            cost = content[name] = product_cost(H, args.repeats, synchronize)
            low, median, high = (cost["ratio"][q] for q in ("q1", "median", "q3"))
            cost |= {
                "batches": recording.batches,
                "recorded": recording.recorded,
                "bytes": recording.bytes,
                "entering_s": entering,
            }
        print(
            f"product {1e3 * cost['product']['median']:.0f} ms, {median:.2f} [{low:.2f}, {high:.2f}] gradient passes; "
            f"{recording.recorded} of {len(data)} batches recorded in {entering:.1f} s, {recording.bytes / 1e9:.2f} GB",
            flush=True,
        )
    content["eigenvalues"] = []
    planned = [("bsam", args.tol)] + [
        (tool, args.tol) for tool in PEERS if not args.only_ours and machine.version_of(PEERS[tool]) is not None
    ]
    for tool, tol in planned:  # grows in the loop: bsam also runs with the residuals of other tools
        result = eigenvalues(tool, model, data, args.k, tol, max_bytes, synchronize)
        content["eigenvalues"].append(result)
        reached = result["worst_relative_residual"]
        print(
            f"{tool} (tolerance {tol:.1e}): {result['seconds']:.1f} s, worst relative residual {reached:.1e}, largest "
            f"{result['values'][0]:.4g}",
            flush=True,
        )
        if tool != "bsam":
            planned.append(("bsam", reached))
    print(f"written to {machine.write(content, args.out, 'hessian')}", file=sys.stderr)


if __name__ == "__main__":
    main()

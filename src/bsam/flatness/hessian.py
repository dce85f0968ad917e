"""The Hessian of the mean loss, as something that multiplies vectors."""

from __future__ import annotations

import contextlib
import copy
import functools
import warnings
from collections.abc import Generator, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_map

from ..core.checks import check_count
from ..core.refusal import Refusal
from ..core.vector import Vector
from .affine_norms import AffineNorms
from .dataset_loss import Batches, DatasetLoss, LossFunction, Piece
from .kept import Kept, Product
from .linearized import no_forward_derivative


class HessianOperator:
    r"""``H @ v``, with :math:`H = \nabla^2 L(w)` and L the mean loss over all samples of ``data``: exact, whatever the sizes of the batches.

    A product differentiates the gradient along ``v``, batch by batch; no entry of ``H`` is ever stored. The model is not changed: not its weights, nor its
    buffers, nor which of its modules train, nor ``p.grad``.

    Args:
        model: the network; its trainable parameters are the variables.
        loss_fn: ``loss_fn(model(x), y)`` is the mean loss of a batch.
        data: the batches ``(x, y)``, walked once per product, so no generator.
        micro_batch: the most samples to hold a graph for at a time; None takes batches as they come.
        mode: ``"eval"``: batch norm uses its running statistics. ``"train"``: those of each batch, without moving them. Dropout is off in both.
        dtype: in which to compute, on a copy of the model, and of the loss if that is a module; None takes both as they are. Floating-point tensors of the
            batches are cast, also inside of tuples, lists and dicts.
        keep_bytes: memory for what every product computes alike; batches that it holds (a ResNet-8 takes some 2 MB for an image of CIFAR) cost about two
            gradient passes a product, not three or four. Recording them takes some seconds, once for each shape of a batch. None, the default, keeps from the
            second product for the same weights on, if samples times weights are 5,000,000 or more, and if the recorded network gives the same product: up to
            a quarter of a GPU's memory, or 3 GB of a CPU's, stay taken (while a batch is recorded it may be more, as for two plain products). 0 keeps
            nothing. A number keeps from the first product on; networks whose sizes or branches depend on the data are refused then, as are batches that
            differ from walk to walk. Weights, buffers, modules, their attributes and the data may change between products; what a function reads from
            variables of its own is not watched.

    Example:
        >>> model = nn.Linear(2, 1, bias=False)
        >>> data = [(torch.tensor([[1.0, 0.0], [0.0, 2.0]]), torch.zeros(2, 1))]
        >>> H = HessianOperator(model, nn.functional.mse_loss, data)  # L = (w1**2 + 4 w2**2) / 2
        >>> (H @ Vector([torch.tensor([[1.0, 1.0]])])).tensors()
        [tensor([[1., 4.]])]
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFunction,
        data: Batches,
        micro_batch: int | None = None,
        mode: str = "eval",
        *,
        dtype: torch.dtype | None = None,
        keep_bytes: int | None = None,
    ) -> None:
        self._dtype = dtype
        if dtype is not None:
            model = copy.deepcopy(model).to(dtype)
            loss_fn = copy.deepcopy(loss_fn).to(dtype) if isinstance(loss_fn, nn.Module) else loss_fn  # it may hold weights of classes
        self.loss = DatasetLoss(model, loss_fn, _Cast(data, dtype) if dtype is not None and not hasattr(data, "__next__") else data, micro_batch, mode)
        self.params = self.loss.weights.params
        kinds = {(p.device, p.dtype) for p in self.params}
        if len(kinds) > 1 or any(p.is_complex() for p in self.params) or self.loss.weights.sharded:
            raise Refusal("the trainable parameters must be real tensors of one dtype on one device, unsharded: their Hessian is one matrix")
        ((self.device, self.dtype),) = kinds
        self.size = sum(p.numel() for p in self.params)
        self.products = 0  # so far
        self._named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        room = None if keep_bytes is None else check_count("keep_bytes", keep_bytes, low=0)
        self._kept = None if room == 0 else Kept(self.loss, [name for name, _ in self._named], room)
        self._forward_mode = self.device.type == "cuda"  # the quicker of two ways there, and not on the CPU; until an operation turns out not to have it

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns: the number of trainable parameters."""
        return self.size, self.size

    def __matmul__(self, v: Vector) -> Vector:
        if not isinstance(v, Vector):
            return NotImplemented
        return self.vector(self.times(self.flat(v)))

    def flat(self, v: Vector) -> Tensor:
        """A vector as one tensor of one dimension."""
        tensors = v.tensors()
        if [t.shape for t in tensors] != [p.shape for p in self.params]:
            raise Refusal("v must have one tensor for each trainable parameter of the model, of the same shape")
        return torch.cat([t.reshape(-1) for t in tensors]).to(device=self.device, dtype=self.dtype)

    def vector(self, flat: Tensor) -> Vector:
        """The inverse of :meth:`flat`; refers to its memory."""
        return Vector(self._views(flat), self.loss.weights.cut)

    def _views(self, flat: Tensor) -> list[Tensor]:
        pieces = flat.split([p.numel() for p in self.params])
        return [piece.view(p.shape) for piece, p in zip(pieces, self.params, strict=True)]

    def times(self, flat: Tensor) -> Tensor:
        """``H v`` for a vector in one dimension."""
        try:
            out = self._mean(self._products(self._views(flat)))
        except RuntimeError as error:
            if not self._forward_mode or not no_forward_derivative(error):
                raise
            self._forward_mode = False
            return self.times(flat)
        self.products += 1
        return out

    @torch.enable_grad()
    def _mean(self, products: Generator[tuple[Product, int]]) -> Tensor:
        out = torch.zeros(self.size, dtype=self.dtype, device=self.device)
        sums, count = self._views(out), 0
        with (
            self.loss.measuring(),
            AffineNorms(),
            sdpa_kernel(SDPBackend.MATH),
            contextlib.closing(products),
        ):  # or an interrupt would leave its dual level open
            for product, n in products:
                for s, t in zip(sums, product, strict=True):
                    if t is not None:
                        s.add_(t, alpha=n)
                count += n
        return out.div_(count)

    def _products(self, v: list[Tensor]) -> Generator[tuple[Product, int]]:
        if self._kept is None or not self._kept.begin():
            yield from self._way(v, self.loss.pieces())
            return
        for number, piece in enumerate(self.loss.pieces()):
            yield self._kept.times(number, piece, v, functools.partial(self._plain, v, piece)), piece[2]

    def _plain(self, v: list[Tensor], piece: Piece) -> Product:
        ((product, _),) = self._way(v, [piece])
        return product

    def _way(self, v: list[Tensor], pieces: Iterable[Piece]) -> Generator[tuple[Product, int]]:
        return self._forward_over_reverse(v, pieces) if self._forward_mode else self._reverse_over_reverse(v, pieces)

    def _forward_over_reverse(self, v: list[Tensor], pieces: Iterable[Piece]) -> Generator[tuple[Product, int]]:
        """The derivative of the gradient along ``v``, carried along with it: three multiplications for each of the gradient's, no more graph than that has."""
        with forward_ad.dual_level():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # at the first use torch loads formulas in its own outdated way
                duals = {name: forward_ad.make_dual(p, t) for (name, p), t in zip(self._named, v, strict=True)}
            for loss, _, n in self.loss.batches(lambda x: functional_call(self.loss.model, duals, (x,)), pieces):
                gradient = self.loss.gradient(loss)
                yield [None if g is None else forward_ad.unpack_dual(g).tangent for g in gradient], n

    def _reverse_over_reverse(self, v: list[Tensor], pieces: Iterable[Piece]) -> Generator[tuple[Product, int]]:
        for loss, _, n in self.loss.batches(pieces=pieces):
            gradient = self.loss.gradient(loss, create_graph=True)
            curved = [(g, t) for g, t in zip(gradient, v, strict=True) if g is not None and g.requires_grad]
            if curved:
                yield list(torch.autograd.grad([g for g, _ in curved], self.params, [t for _, t in curved], allow_unused=True)), n
            else:
                yield [None] * len(v), n

    def random(self, generator: torch.Generator, kind: str = "normal") -> Tensor:
        """A random vector in one dimension: standard normal entries, or signs."""
        if kind == "normal":
            return torch.randn(self.size, dtype=self.dtype, device=generator.device, generator=generator).to(self.device)
        return torch.randint(0, 2, (self.size,), device=generator.device, generator=generator).to(self.device, self.dtype).mul_(2).sub_(1)


class _Cast:
    """Batches with floating-point inputs and targets in another dtype."""

    def __init__(self, data: Batches, dtype: torch.dtype) -> None:
        self.data, self.dtype = data, dtype

    def __iter__(self) -> Any:
        for batch in self.data:
            yield tree_map(self._cast, batch)

    def _cast(self, leaf: Any) -> Any:
        return leaf.to(self.dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

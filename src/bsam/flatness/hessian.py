"""The Hessian of the mean loss, as something that multiplies vectors."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Generator, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_map

from ..core.checks import check_count
from ..core.errors import BsamRuntimeError, BsamValueError
from ..core.vector import Vector
from .dataset_loss import Batches, BatchWeight, DatasetLoss, LossFunction, Piece
from .linearized import Product
from .recording import SHAPES, WORTH, DataChanged, Recording, default_budget
from .second_derivatives import Substitutes, explained

NEGLIGIBLE = 1e-2  # of a product: a parameter whose part is smaller than this is compared with it


class HessianOperator:
    r"""``H @ v``, with :math:`H = \nabla^2 L(w)` and L the mean loss over all samples of ``data``, whatever the batch
    sizes.

    A product differentiates the gradient along ``v``, batch by batch; no entry of ``H`` is ever stored. The model is
    not
    changed: not its weights, nor its buffers, nor which of its modules train, nor ``p.grad``. Inside of
        :meth:`linearized`
    products cost about half.

    Args:
        model: the network; its trainable parameters are the variables.
        loss_fn: ``loss_fn(model(x), y)`` is the mean loss of a batch. Where there are several batches, a loss that is
            not a mean over samples is refused, since the result would depend on the batches.
        data: the batches ``(x, y)``, iterated once per product, so no generator.
        micro_batch: the most samples to hold a graph for at a time; None takes batches as they come.
        mode: ``"eval"``: batch norm uses its running statistics. ``"train"``: those of each batch, without updating
            them. Dropout is off in both.
        dtype: in which to compute, on a copy of the model, and of the loss if that is a module; None takes both as they
            are. Floating-point tensors of the batches are cast, also inside of tuples, lists and dicts.
        differentiation: of the gradient: ``"forward"`` (forward over reverse mode, faster on a GPU) or ``"reverse"``
            (reverse over reverse). The first product in forward mode is compared with one in reverse mode: some
            operations of torch have wrong forward derivatives or none, and reverse mode is used then. The attribute of
            this name says which one is in use. None: forward on a GPU, reverse elsewhere.
        batch_weight: ``batch_weight(x, y)`` is the weight of a (micro-)batch in the mean, for losses that are not means
            over samples; None: the number of samples.

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
        differentiation: str | None = None,
        batch_weight: BatchWeight | None = None,
    ) -> None:
        if differentiation not in (None, "forward", "reverse"):
            raise BsamValueError(f'differentiation must be "forward", "reverse" or None, got {differentiation!r}')
        model = getattr(model, "_orig_mod", model)  # of torch.compile, whose graphs have no second derivative
        original = list(model.parameters()) if dtype is not None else []
        if dtype is not None:
            model = copy.deepcopy(model).to(dtype)
            loss_fn = copy.deepcopy(loss_fn).to(dtype) if isinstance(loss_fn, nn.Module) else loss_fn
            data = data if isinstance(data, Iterator) else _Cast(data, dtype)
        self.loss = DatasetLoss(model, loss_fn, data, micro_batch, mode, batch_weight)
        self.loss.foreign = original
        self.params = self.loss.weights.params
        kinds = {(p.device, p.dtype) for p in self.params}
        if len(kinds) > 1 or any(p.is_complex() for p in self.params) or self.loss.weights.sharded:
            raise BsamValueError(
                "the trainable parameters must be real tensors of one dtype on one device, unsharded: their Hessian "
                "is one matrix"
            )
        ((self.device, self.dtype),) = kinds
        self.size = sum(p.numel() for p in self.params)
        self.products = 0  # so far
        self.differentiation = differentiation or ("forward" if self.device.type == "cuda" else "reverse")
        self._compared: list[int] = []  # versions of the weights for which forward mode was compared with reverse mode
        self._recording: Recording | None = None

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
            raise BsamValueError("v must have one tensor for each trainable parameter of the model, of the same shape")
        return torch.cat([t.reshape(-1) for t in tensors]).to(device=self.device, dtype=self.dtype)

    def vector(self, flat: Tensor) -> Vector:
        """The inverse of :meth:`flat`; refers to its memory."""
        return Vector(self._views(flat), self.loss.weights.layout)

    def _views(self, flat: Tensor) -> list[Tensor]:
        pieces = flat.split([p.numel() for p in self.params])
        return [piece.view(p.shape) for piece, p in zip(pieces, self.params, strict=True)]

    def random(self, generator: torch.Generator, kind: str = "normal") -> Tensor:
        """A random vector in one dimension: standard normal entries, or signs."""
        size, device = self.size, generator.device
        if kind == "normal":
            return torch.randn(size, dtype=self.dtype, device=device, generator=generator).to(self.device)
        signs = torch.randint(0, 2, (size,), device=device, generator=generator)
        return signs.to(self.device, self.dtype).mul_(2).sub_(1)

    def times(self, flat: Tensor) -> Tensor:
        """``H v`` for a vector in one dimension."""
        out = self._times(self._views(flat))
        self.products += 1
        return out

    def _times(self, v: list[Tensor]) -> Tensor:
        if self._recording is not None and self._recording.recorded:
            try:
                return self._mean(self._recorded(v, self._recording))
            except DataChanged:
                self._recording.drop("data comes in other batches in each pass: take shuffle=False")
            except torch.OutOfMemoryError:
                self._recording.drop("out of memory")
        self._compare()
        return self._mean(self._plain(v))

    def _compare(self) -> None:
        """Leave forward mode where it does not give the products of reverse mode; once for the weights as they are."""
        versions = [p._version for p in self.params]
        if self.differentiation == "reverse" or versions == self._compared:
            return
        v = self._views(self.random(torch.Generator().manual_seed(1)))
        with _full_precision(self.device):
            expected = self._mean(self._reverse_over_reverse(v))
        try:
            with _full_precision(self.device):
                found = self._mean(self._forward_over_reverse(v))
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:  # an operation without a forward derivative
            self.differentiation = "reverse"
            return
        if not bool(expected.isfinite().all()):
            return  # this says nothing
        self._compared = versions
        if not self._agree(list(self._views(found)), list(self._views(expected))):
            self.differentiation = "reverse"

    def _agree(self, found: Product, expected: Product) -> bool:
        """Whether two products are equal up to rounding in each parameter: in float32 within 2e-3."""
        kind = self.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else self.dtype
        tolerance = torch.finfo(dtype).eps ** 0.4
        pairs = [
            (torch.zeros_like(p) if a is None else a, torch.zeros_like(p) if b is None else b)
            for a, b, p in zip(found, expected, self.params, strict=True)
        ]
        errors, sizes = (
            torch.stack([t.norm() for t in ts]) for ts in ([a - b for a, b in pairs], [b for _, b in pairs])
        )
        return bool((errors <= tolerance * (sizes + NEGLIGIBLE * sizes.norm())).all())

    @contextlib.contextmanager
    def _differentiating(self) -> Iterator[None]:
        torch.clear_autocast_cache()  # of casts of the weights that have no tangents
        try:
            with self.loss.measuring(), Substitutes(), sdpa_kernel(SDPBackend.MATH), torch.enable_grad():
                yield
        finally:
            torch.clear_autocast_cache()  # and of those that have

    def _mean(self, products: Generator[tuple[Product, float]]) -> Tensor:
        out = torch.zeros(self.size, dtype=self.dtype, device=self.device)
        sums, total = self._views(out), 0.0
        with self._differentiating(), contextlib.closing(products):  # or an interrupt would leave its dual level open
            for product, weight in products:
                for s, t in zip(sums, product, strict=True):
                    if t is not None:
                        s.add_(t, alpha=weight)
                total += weight
        if total == 0:
            raise BsamRuntimeError("batch_weight is 0 for every batch: there is no loss to differentiate")
        return out.div_(total)

    def _plain(self, v: list[Tensor], pieces: Iterable[Piece] | None = None) -> Generator[tuple[Product, float]]:
        return (self._forward_over_reverse if self.differentiation == "forward" else self._reverse_over_reverse)(
            v, pieces
        )

    def _forward_over_reverse(
        self, v: list[Tensor], pieces: Iterable[Piece] | None = None
    ) -> Generator[tuple[Product, float]]:
        """The derivative of the gradient along ``v``, carried along with it: three multiplications for each of the
        gradient's.

        The tangents are given to the parameters themselves, so that whatever refers to them is differentiated.
        """
        params = tuple(self.params)
        with forward_ad.dual_level():
            with (
                warnings.catch_warnings(),
                torch.no_grad(),
                _unsafe_preserve_version_counter(params),  # the values stay what they are
            ):
                warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, when it loads its formulas
                for p, t in zip(params, v, strict=True):
                    p.copy_(forward_ad.make_dual(p.detach().clone(), t))
            for loss, _, weight in self.loss.batches(pieces):
                gradient = self.loss.gradient(loss)
                yield [None if g is None else forward_ad.unpack_dual(g).tangent for g in gradient], weight

    def _reverse_over_reverse(
        self, v: list[Tensor], pieces: Iterable[Piece] | None = None
    ) -> Generator[tuple[Product, float]]:
        for loss, _, weight in self.loss.batches(pieces):
            try:
                gradient = self.loss.gradient(loss, create_graph=True)
                pairs = [(g, t) for g, t in zip(gradient, v, strict=True) if g is not None and g.requires_grad]
                slopes, along = [g for g, _ in pairs], [t for _, t in pairs]
                found = torch.autograd.grad(slopes, self.params, along, allow_unused=True) if pairs else [None] * len(v)
            except RuntimeError as error:
                raise explained(error) from error
            yield list(found), weight

    @contextlib.contextmanager
    def linearized(self, max_bytes: int | None = None) -> Iterator[Recording]:
        """Record on entry what all products share, use it inside, and drop it on exit.

        Products then cost about two gradient passes instead of three to five. While it is entered, do not change the
        model, the loss or the data. What cannot be recorded (branches on the data, random numbers, weights taken from
        elsewhere than the model's parameters) is computed as outside; the object returned says so. The product of each
        batch with one vector is compared with the plain one. Entering again inside does nothing.

        Args:
            max_bytes: memory for the recorded products: a ResNet-8 takes some 2 MB for an image of CIFAR. Recording
                takes seconds for each shape of a batch, and for a moment as much memory as two plain products. None: a
                quarter of a GPU's memory or 3 GB of a CPU's, and nothing where samples times weights are below
                5,000,000.

        Example:
            >>> model = nn.Linear(2, 1, bias=False)
            >>> H = HessianOperator(model, nn.functional.mse_loss, [(torch.eye(2), torch.zeros(2, 1))])
            >>> with H.linearized(max_bytes=1000) as recording:
            ...     product = H @ Vector([torch.tensor([[1.0, 2.0]])])
            >>> product.tensors(), recording.recorded
            ([tensor([[1., 2.]])], 1)
        """
        if self._recording is not None:
            yield self._recording
            return
        budget = default_budget(self.device) if max_bytes is None else check_count("max_bytes", max_bytes, low=0)
        self._recording = Recording(budget, shapes=SHAPES if max_bytes is None else None)
        try:
            if budget > 0 and (max_bytes is not None or self.loss.has_samples(WORTH / self.size)):
                v = self._views(self.random(torch.Generator().manual_seed(0)))
                self._compare()
                if not self.loss.checked:
                    self._mean(self._plain(v))  # a whole pass checks the loss
                devices = [self.device] if self.device.type == "cuda" else []
                with _full_precision(self.device), self._differentiating(), torch.random.fork_rng(devices):
                    self._recording.record(self.loss, v, self._of_piece, self._agree)
            yield self._recording
        finally:
            self._recording.free()
            self._recording = None

    def _of_piece(self, v: list[Tensor], piece: Piece) -> Product:
        ((product, _),) = self._plain(v, [piece])
        return product

    def _recorded(self, v: list[Tensor], recording: Recording) -> Generator[tuple[Product, float]]:
        yield from recording.products(v)
        if recording.recorded < recording.batches:
            yield from self._plain(v, recording.rest(self.loss.pieces()))


@contextlib.contextmanager
def _full_precision(device: torch.device) -> Iterator[None]:
    """Compute in float32 without TF32, so that products can be compared."""
    if device.type != "cuda":
        yield
        return
    cudnn: Any = torch.backends.cudnn
    switches: tuple[Any, ...] = (cudnn.conv, cudnn.rnn, torch.backends.cuda.matmul)
    before = [switch.fp32_precision for switch in switches]
    try:
        for switch in switches:
            switch.fp32_precision = "ieee"
        yield
    finally:
        for switch, precision in zip(switches, before, strict=True):
            switch.fp32_precision = precision


class _Cast:
    """Batches with floating-point inputs and targets in another dtype."""

    def __init__(self, data: Batches, dtype: torch.dtype) -> None:
        self.data, self.dtype = data, dtype

    def __iter__(self) -> Any:
        for batch in self.data:
            yield tree_map(self._cast, batch)

    def _cast(self, leaf: Any) -> Any:
        return leaf.to(self.dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

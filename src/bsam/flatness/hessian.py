"""The Hessian of the mean loss as a linear operator."""

from __future__ import annotations

import contextlib
import copy
import itertools
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.nn.attention import SDPBackend, _cur_sdpa_kernel_backends, _sdpa_kernel

from ..common.checks import check_count
from ..common.errors import BsamTypeError, BsamValueError
from ..core.tensors import clear_weight_caches
from ..core.undo import Undo
from ..core.vector import Vector
from .dataset_loss import Batches, BatchWeight, CastBatches, DatasetLoss, LossFunction, WeightedBatch
from .recording import MAX_SHAPES, MIN_WORK, Product, Products, Recording, default_budget
from .second_derivatives import substitute

NEGLIGIBLE = 1e-2  # products are compared per parameter; the tolerance includes this share of the product's norm


class HessianOperator:
    r"""The Hessian :math:`H = \nabla^2 L(w)` of the mean loss over all samples of ``data``, as an operator ``H @ v``.

    A product differentiates the gradient along ``v``, batch by batch; ``H`` itself is never stored. The model is not
    changed: its weights, buffers, training flags and ``p.grad`` stay as they are. Inside :meth:`linearized`, products
    cost about half.

    Args:
        model: the network; its trainable parameters are the variables. Row ``padding_idx`` of an ``nn.Embedding`` has
            no gradient in torch, so its rows and columns of ``H`` are 0, unlike finite differences of the loss.
        loss_fn: ``loss_fn(model(x), y)`` is the mean loss of a batch. With several batches and no ``batch_weight``, a
            loss that is not a mean over samples (a sum, ``ignore_index``, class weights) raises an error: the result
            would depend on how the data is split into batches.
        data: the batches ``(x, y)``. They are iterated once per product and must be the same each time, so a generator
            raises an error. Every pass starts from the same state of torch's random generator, so a shuffled
            DataLoader is fine. The first batch is evaluated twice; a different loss or gradient raises an error. If
            ``x`` is a dict whose keys are names of the model's arguments, as for networks of Transformers, the model is
            called with them by name.
        micro_batch: the largest number of samples to build a graph for at a time; None uses the batches as they are.
        mode: with ``"eval"``, batch norm uses its running statistics; with ``"train"``, those of each batch, without
            updating the running ones. Instance norm with running statistics is treated the same way. Dropout is off in
            both modes, and so is torch's fast path for attention, which computes a different function at padded
            positions.
        dtype: the precision to compute in, on a copy of the model (and of the loss, if it is a module); None uses both
            as they are. Floating-point tensors in the batches are cast, also inside tuples, lists and dicts.
            ``loss_fn`` must then not read weights from the original model, such as for a penalty.
        differentiation: ``"forward"`` (forward over reverse mode, faster on a GPU) or ``"reverse"`` (reverse over
            reverse); None means forward on a GPU and reverse elsewhere. The first product in forward mode is compared
            with one in reverse mode. If they differ, or an operation has no forward derivative, reverse mode is used;
            the attribute ``differentiation`` holds the mode in use.
        batch_weight: ``batch_weight(x, y)`` is the weight of a (micro-)batch in the mean, such as the number of labels
            that are not ignored; batches with weight 0 are left out. None means the number of samples.

    Example:
        >>> model = nn.Linear(2, 1, bias=False)
        >>> data = [(torch.tensor([[1.0, 0.0], [0.0, 2.0]]), torch.zeros(2, 1))]
        >>> H = HessianOperator(
        ...     model, nn.functional.mse_loss, data
        ... )  # L = (w1**2 + 4 w2**2) / 2
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
        model = getattr(model, "_orig_mod", model)  # graphs from torch.compile have no second derivative
        if dtype is not None:
            model = copy.deepcopy(model).to(dtype)
            loss_fn = copy.deepcopy(loss_fn).to(dtype) if isinstance(loss_fn, nn.Module) else loss_fn
            data = data if isinstance(data, Iterator) else CastBatches(data, dtype)
        self.loss = DatasetLoss(model, loss_fn, data, micro_batch, mode, batch_weight)
        self.params = self.loss.weights.params
        kinds = {(p.device, p.dtype) for p in self.params}
        if len(kinds) > 1 or any(p.is_complex() for p in self.params) or self.loss.weights.layout.mesh is not None:
            raise BsamValueError("the trainable parameters must be real, unsharded tensors of one dtype on one device")
        ((self.device, self.dtype),) = kinds
        self.size = sum(p.numel() for p in self.params)
        self.products = 0  # computed so far
        self.differentiation = differentiation or ("forward" if self.device.type == "cuda" else "reverse")
        self._compared: list[int] = []  # versions of the weights at which forward and reverse mode were compared
        self._recording: Recording | None = None

    def __repr__(self) -> str:
        return f"HessianOperator({self.size} x {self.size}, {self.products} products so far)"

    def __matmul__(self, v: Vector) -> Vector:
        if not isinstance(v, Vector):
            raise BsamTypeError(
                f"H @ v takes a bsam.Vector, got {type(v).__name__}: convert a 1-D tensor with H.vector(t)"
            )
        return self.vector(self.times(self.flat(v)))

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns; both equal the number of trainable parameters."""
        return self.size, self.size

    def flat(self, v: Vector) -> Tensor:
        """Return ``v`` as a 1-D tensor."""
        tensors = v.tensors()
        if [t.shape for t in tensors] != [p.shape for p in self.params]:
            raise BsamValueError("v must have one tensor for each trainable parameter, with the same shape")
        return torch.cat([t.reshape(-1) for t in tensors]).to(device=self.device, dtype=self.dtype)

    def vector(self, flat: Tensor) -> Vector:
        """Return a 1-D tensor as a Vector that shares its memory; the inverse of :meth:`flat`."""
        return Vector(self._views(flat), self.loss.weights.layout)

    def _views(self, flat: Tensor) -> list[Tensor]:
        parts = flat.split([p.numel() for p in self.params])
        return [part.view(p.shape) for part, p in zip(parts, self.params, strict=True)]

    def random(self, generator: torch.Generator, kind: str = "normal") -> Tensor:
        """Return a random 1-D tensor of standard normal entries (``"normal"``), or of 1 and -1 (``"signs"``)."""
        if kind == "normal":
            normal = torch.randn(self.size, dtype=self.dtype, device=generator.device, generator=generator)
            return normal.to(self.device)
        bits = torch.randint(0, 2, (self.size,), device=generator.device, generator=generator)
        return bits.to(self.device, self.dtype).mul_(2).sub_(1)

    def times(self, flat: Tensor) -> Tensor:
        """Return ``H v`` for a 1-D tensor ``v``."""
        v, recording = self._views(flat), self._recording
        out = None
        if recording is not None and recording.recorded:
            try:
                out = self._mean(self._with_recording(v, recording))
            except torch.OutOfMemoryError:
                recording.drop("out of memory")
        if out is None:
            self._check_forward_mode()
            out = self._mean(self._batch_products(v))
        self.products += 1
        return out

    def _mean(self, products: Products) -> Tensor:
        """Return the weighted mean of the batches' products as a 1-D tensor."""
        out, total = torch.zeros(self.size, dtype=self.dtype, device=self.device), 0.0
        sums = self._views(out)
        with Undo() as undo, undo:
            self._begin_differentiating(undo)
            undo.callback(products.close)  # leaves the dual level, too
            for product, weight in products:
                with torch.no_grad():  # torch may return zeros with requires_grad=True for parameters without effect
                    torch._foreach_add_(sums, product, alpha=weight)
                total += weight
        return out.div_(total)

    def _begin_differentiating(self, undo: Undo) -> None:
        undo.callback(clear_weight_caches)  # of casts with tangents
        clear_weight_caches()  # of casts without tangents
        self.loss.begin(undo)
        substitute(undo)
        undo.callback(_sdpa_kernel, _cur_sdpa_kernel_backends())
        _sdpa_kernel([SDPBackend.MATH])  # the other kernels for attention have no second derivative
        undo.set_grad_enabled(True)

    def _batch_products(
        self, v: list[Tensor], batches: Iterable[WeightedBatch] | None = None, mode: str | None = None
    ) -> Products:
        """Yield the derivative of each batch's gradient along ``v``: forward or reverse mode over the backward pass."""
        forward = (mode or self.differentiation) == "forward"
        with Undo() as undo, undo:
            if forward:
                _attach_tangents(undo, self.params, v)
            for loss, _, weight in self.loss.losses(batches):
                gradient = self.loss.gradient(loss, create_graph=not forward)
                if forward:
                    tangents = [None if g is None else forward_ad.unpack_dual(g).tangent for g in gradient]
                    yield [torch.zeros_like(u) if t is None else t for t, u in zip(tangents, v, strict=True)], weight
                    continue
                product = [torch.zeros_like(t) for t in v]
                pairs = [(g, t) for g, t in zip(gradient, v, strict=True) if g is not None and g.requires_grad]
                if pairs:
                    grads, vectors = zip(*pairs, strict=True)
                    product = list(torch.autograd.grad(grads, self.params, vectors, materialize_grads=True))
                yield product, weight

    def _check_forward_mode(self) -> None:
        """Switch to reverse mode if forward mode gives different products; checked again when the weights change."""
        versions = [p._version for p in self.params]
        if self.differentiation == "reverse" or versions == self._compared:
            return
        v = self._views(self.random(torch.Generator().manual_seed(1)))
        with Undo() as undo, undo:
            _set_full_precision(undo, self.device)
            expected = self._mean(self._batch_products(v, mode="reverse"))
            try:
                actual = self._mean(self._batch_products(v, mode="forward"))
            except torch.OutOfMemoryError:
                raise
            except RuntimeError:  # an operation without a forward derivative
                self.differentiation = "reverse"
                return
        if bool(expected.isfinite().all()):  # otherwise the comparison is meaningless
            self._compared = versions
            if not self._products_close(self._views(actual), self._views(expected)):
                self.differentiation = "reverse"

    def _products_close(self, actual: Product, expected: Product) -> bool:
        """Return whether two products agree in each parameter up to rounding (within 2e-3 in float32)."""
        kind = self.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else self.dtype
        errors = torch.stack([(a - b).norm() for a, b in zip(actual, expected, strict=True)])
        sizes = torch.stack([b.norm() for b in expected])
        return bool((errors <= torch.finfo(dtype).eps ** 0.4 * (sizes + NEGLIGIBLE * sizes.norm())).all())

    @contextlib.contextmanager
    def linearized(self, max_bytes: int | None = None) -> Iterator[Recording]:
        """Record the part of the products that does not depend on the vector, for use inside the block.

        Products then cost about two gradient passes instead of three to five. The recording is dropped on exit. Do not
        change the model, the loss or the data inside the block. The first batch that cannot be recorded (branches on
        the data, random numbers, a penalty on the weights in the loss) and all later ones are computed as usual, and
        the returned object says why. Each recorded batch is checked against a plain product with one vector. Nested
        blocks share the outer recording.

        Args:
            max_bytes: memory for the recording; a ResNet-8 takes about 2 MB per CIFAR image. Recording takes seconds
                for each batch shape and, briefly, the memory of two plain products. None allows a quarter of the GPU's
                memory (at most half of what is free), or 3 GB on a CPU, and two batch shapes; it records nothing if
                samples times weights are below 5,000,000.

        Example:
            >>> model = nn.Linear(2, 1, bias=False)
            >>> H = HessianOperator(
            ...     model, nn.functional.mse_loss, [(torch.eye(2), torch.zeros(2, 1))]
            ... )
            >>> with H.linearized(max_bytes=1000) as recording:
            ...     product = H @ Vector([torch.tensor([[1.0, 2.0]])])
            >>> product.tensors(), recording.recorded
            ([tensor([[1., 2.]])], 1)
        """
        if self._recording is not None:
            yield self._recording
            return
        budget = default_budget(self.device) if max_bytes is None else check_count("max_bytes", max_bytes, low=0)
        self._recording = Recording(budget, max_shapes=MAX_SHAPES if max_bytes is None else None)
        try:
            if budget > 0 and (max_bytes is not None or self.loss.has_samples(MIN_WORK / self.size)):
                v = self._views(self.random(torch.Generator().manual_seed(0)))
                self._check_forward_mode()
                if not self.loss.checked:
                    self._mean(self._batch_products(v))  # a full pass checks data and loss_fn
                with Undo() as undo, undo:
                    _set_full_precision(undo, self.device)
                    self._begin_differentiating(undo)
                    undo.restore_random_states([self.device])
                    self._recording.record(self.loss, v, self._batch_products, self._products_close)
            yield self._recording
        finally:
            self._recording.free()
            self._recording = None

    def _with_recording(self, v: list[Tensor], recording: Recording) -> Products:
        yield from recording.products(v)
        if recording.recorded < recording.batches:
            yield from self._batch_products(v, itertools.islice(self.loss.weighted_batches(), recording.recorded, None))


def _set_full_precision(undo: Undo, device: torch.device) -> None:
    """Disable TF32, so that products can be compared."""
    cudnn: Any = torch.backends.cudnn
    switches: tuple[Any, ...] = (cudnn.conv, cudnn.rnn, torch.backends.cuda.matmul) if device.type == "cuda" else ()
    undo.set_attributes((switch, "fp32_precision", "ieee") for switch in switches)


def _attach_tangents(undo: Undo, params: list[Tensor], v: list[Tensor]) -> None:
    """Attach the tangents ``v`` to the parameters in place until ``undo``: every use of them is differentiated."""
    undo.callback(_leave_dual_level, forward_ad._current_level)
    forward_ad.enter_dual_level()
    # the values stay the same, so the version counters must too
    with warnings.catch_warnings(), torch.no_grad(), _unsafe_preserve_version_counter(tuple(params)):
        warnings.simplefilter("ignore", DeprecationWarning)  # raised when torch loads its derivative formulas
        for p, t in zip(params, v, strict=True):
            p.copy_(forward_ad.make_dual(p.detach().clone(), t))


def _leave_dual_level(before: int) -> None:
    """Return to the dual level ``before``, even if an interrupt came between torch's two records of the level."""
    with contextlib.suppress(RuntimeError):  # left already, or not entered
        torch._C._exit_dual_level(level=before + 1)
    forward_ad._current_level = before

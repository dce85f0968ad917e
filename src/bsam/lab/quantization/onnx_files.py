"""Export networks to ONNX files, and run them."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...common.checks import check_count
from ...common.errors import BsamValueError
from ...common.extras import require_package
from ..common.names import first_line
from .arithmetic import code_range, product
from .int_files import check_place
from .quant_layers import IntLayer, QuantLayer, convert, replace

OPSET = 21  # the first with INT4 and UINT4
TYPES = {"FLOAT": 1, "UINT8": 2, "UINT4": 21}  # in onnx.TensorProto
WEIGHT_TYPE = "bsam.weight_type"  # node metadata during the export


def export_onnx(model: nn.Module, path: Path | str, x: Tensor, *, metadata: Mapping[str, str] | None = None) -> int:
    """Write a network, quantized or not, to an ONNX file (opset 21) and return the file's size in bytes.

    Quantized weights of up to 4 bits are stored as INT4, two codes to a byte, others as INT8; DequantizeLinear
    multiplies them by the scales of the output channels. Inputs of quantized layers pass through QuantizeLinear and
    DequantizeLinear, with type UINT4 for 4 bits and UINT8 for 8. Other numbers of bits have no type in opset 21 and use
    UINT8 after a Clip to the range of the codes. Scales, biases and everything else, such as batch norm, are float32. A
    4-bit ResNet-18 takes 0.13 times the size of the float one.

    The file accepts any batch size; the other sizes are those of ``x``. It computes what ``model`` computes, so put the
    preprocessing before the network, as in ``nn.Sequential(preprocessing, network)``, or describe it in ``metadata``.
    Needs the extra ``onnx``.

    Args:
        model: a network in float32, from :func:`~bsam.lab.quantization.quantize` (trained or calibrated),
            :func:`~bsam.lab.quantization.convert`, or not quantized. It is exported in eval mode, and not changed.
        path: the file to write; an existing file is overwritten, or kept if the export fails.
        x: a batch of inputs; only its shape and dtype are used.
        metadata: the file's ``metadata_props``.
    """
    for package in ("onnx", "onnxscript"):
        require_package(package, "onnx")
    check_place(Path(path))
    is_fake_quantized = any(isinstance(module, QuantLayer) for module in model.modules())
    model = (convert(model) if is_fake_quantized else copy.deepcopy(model).eval()).cpu()
    new: dict[nn.Module, nn.Module] = {m: _OnnxLayer(m) for m in model.modules() if isinstance(m, IntLayer)}
    content = _trace(replace(model, new), x, metadata or {})
    return Path(path).write_bytes(content)


class OnnxNetwork(nn.Module):
    """The network in an ONNX file, run with onnxruntime on the CPU; a module without parameters.

    It takes and returns tensors on any device, without gradient. onnxruntime runs with its default settings (all
    optimizations) and as many threads as torch. With files from :func:`export_onnx`, the optimized
    network still computes layers in floating point, on dequantized values, and does not round biases. Its values differ
    from those of the integer network by floating-point rounding, or by a whole step where that changes a code.

    Needs the extra ``onnx``.

    Args:
        path: the file; its network must have one input and one output.
    """

    def __init__(self, path: Path | str) -> None:
        super().__init__()
        require_package("onnxruntime", "onnx")
        import onnxruntime

        if not Path(path).is_file():
            raise BsamValueError(f"file {path} does not exist")
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.log_severity_level = 4  # errors are raised
        try:
            self._session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        except Exception as error:  # onnxruntime's exceptions have no common base class
            raise BsamValueError(f"onnxruntime cannot read {path} ({first_line(error)})") from error
        inputs = [value.name for value in self._session.get_inputs()]
        outputs = [value.name for value in self._session.get_outputs()]
        if len(inputs) != 1 or len(outputs) != 1:
            raise BsamValueError(
                f"the network in {path} must have one input and one output; it has the inputs {', '.join(inputs)} and "
                f"the outputs {', '.join(outputs)}. Run it with onnxruntime.InferenceSession"
            )
        (self._input,) = inputs

    def forward(self, x: Tensor) -> Tensor:
        (out,) = self._session.run(None, {self._input: x.detach().cpu().numpy()})
        return torch.from_numpy(out).to(x.device)


def run_onnx(path: Path | str, x: Tensor, *, batch_size: int = 256) -> Tensor:
    """Return the outputs of the network in an ONNX file, computed in batches with :class:`OnnxNetwork`.

    Args:
        path: the file, such as one from :func:`export_onnx`.
        x: the inputs.
        batch_size: number of inputs per batch.
    """
    network = OnnxNetwork(path)
    return torch.cat([network(batch) for batch in x.split(check_count("batch_size", batch_size))])


class _OnnxLayer(nn.Module):
    """A layer with integer weights as ONNX nodes; it can be traced, but not run."""

    weight: Tensor
    weight_scale: Tensor
    input_scale: Tensor
    input_zero_point: Tensor
    bias: Tensor | None

    def __init__(self, layer: IntLayer) -> None:
        super().__init__()
        self.product = partial(product, layer)
        limits = (q - layer.input_zero_point for q in code_range(layer.activation_bits, signed=False))
        self.limits = None if layer.activation_bits in (4, 8) else [float(layer.input_scale * q) for q in limits]
        self.weight_is_4_bit = layer.weight_bits <= 4
        self.input_is_4_bit = layer.activation_bits == 4
        for field in ("weight", "weight_scale", "bias"):
            self.register_buffer(field, getattr(layer, field))
        self.register_buffer("input_scale", layer.input_scale.reshape(()))
        self.register_buffer("input_zero_point", layer.input_zero_point.reshape(()).to(torch.uint8))

    def forward(self, x: Tensor) -> Tensor:
        if self.limits is not None:
            x = x.clamp(*self.limits)
        scale = self.input_scale, self.input_zero_point
        codes = _node("QuantizeLinear", x, *scale, dtype="UINT4" if self.input_is_4_bit else "UINT8")
        x = _node("DequantizeLinear", codes, *scale)
        weight_type = "INT4" if self.weight_is_4_bit else "INT8"
        weight = _node("DequantizeLinear", self.weight, self.weight_scale, weight_type=weight_type, axis=0)
        out = self.product(x, weight, None)
        # added here, because onnxruntime rounds the bias of a convolution to integers
        return out if self.bias is None else out + self.bias.view(-1, *(1,) * (self.weight.dim() - 2))


def _node(op: str, x: Tensor, *scale: Tensor, dtype: str = "FLOAT", weight_type: str = "INT8", **axis: int) -> Tensor:
    """Return the output of an ONNX node, with the shape of ``x``."""
    from torch.onnx.ops import symbolic

    note = {WEIGHT_TYPE: weight_type}
    return symbolic(op, (x, *scale), {**axis}, dtype=TYPES[dtype], shape=x.shape, version=OPSET, metadata_props=note)


def _trace(model: nn.Module, x: Tensor, metadata: Mapping[str, str]) -> bytes:
    """Return the content of the ONNX file."""
    import onnx_ir
    from onnx_ir.passes.common import ClearMetadataAndDocStringPass

    example = torch.zeros(2, *x.shape[1:], dtype=x.dtype)  # a batch size of 1 would become a constant
    try:
        with warnings.catch_warnings(action="ignore"), torch.no_grad():  # the exporter warns about its own internals
            program: Any = torch.onnx.export(
                model,
                (example,),
                dynamo=True,
                opset_version=OPSET,
                dynamic_shapes=({0: torch.export.Dim("batch")},),
                input_names=["input"],
                output_names=["output"],
                optimize=False,
                verbose=False,
            )
            _narrow(program.model.graph)
            # after _narrow, because it merges equal tensors, and until then all zero points are UINT8
            program.optimize()
            _keep_activations(program.model.graph)
    except Exception as error:  # the model's code may raise anything on symbolic values
        raise BsamValueError(
            f"torch.onnx.export cannot trace the forward pass of {type(model).__name__} "
            f"({first_line(error.__cause__ or error)})"
        ) from error
    ClearMetadataAndDocStringPass()(program.model)  # removes source code and paths
    program.model.metadata_props.update(metadata)
    return onnx_ir.to_proto(program.model).SerializeToString()


def _narrow(graph: Any) -> None:
    """Convert 4-bit weights and zero points, which are bytes in torch, to INT4 and UINT4."""
    import onnx_ir

    int4 = onnx_ir.DataType.INT4
    uint4 = onnx_ir.DataType.UINT4
    for node in graph:
        if node.op_type == "QuantizeLinear" and node.outputs[0].dtype == uint4:
            value = node.inputs[2]
            dtype = uint4
        elif node.metadata_props.get(WEIGHT_TYPE) == "INT4":
            value = node.inputs[0]
            dtype = int4
        else:
            continue
        value.const_value = onnx_ir.tensor(value.const_value.numpy().astype(dtype.numpy()), name=value.name)
        value.dtype = dtype


def _keep_activations(graph: Any) -> None:
    """Insert a Min before each UINT4 QuantizeLinear; it leaves the codes unchanged, but prevents wrong optimizations.

    Without it, onnxruntime 1.31 drops a Relu before the node, which is wrong unless the zero point is 0. It also
    moves quantization across a MaxPool or into a convolution with 8-bit weights, where it has no 4-bit operation, and
    then fails to load the file. A Clip instead of the Min fails to load too.
    """
    import numpy as np
    import onnx_ir

    for node in list(graph):
        if node.op_type == "QuantizeLinear" and node.outputs[0].dtype == onnx_ir.DataType.UINT4:
            x, scale, zero_point = node.inputs
            name = f"{node.name}_max"
            largest = scale.const_value.numpy() * np.float32(15 - int(zero_point.const_value.numpy()))
            tensor = onnx_ir.tensor(largest, name=name)
            value = onnx_ir.Value(name=name, const_value=tensor, type=x.type, shape=onnx_ir.Shape([]))
            graph.register_initializer(value)
            smaller = onnx_ir.node("Min", [x, value], name=f"{node.name}_min")
            output = smaller.outputs[0]
            output.type = x.type
            output.shape = x.shape
            output.name = f"{node.name}_input"
            graph.insert_before(node, smaller)
            node.replace_input_with(0, output)

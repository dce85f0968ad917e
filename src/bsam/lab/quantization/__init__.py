"""Quantization-aware training: fake quantization, conversion to integer weights, and export."""

from .arithmetic import fake_quantize as fake_quantize
from .int_files import load_quantized as load_quantized
from .int_files import save_quantized as save_quantized
from .onnx_files import OnnxNetwork as OnnxNetwork
from .onnx_files import export_onnx as export_onnx
from .onnx_files import run_onnx as run_onnx
from .quant_layers import QuantConv2d as QuantConv2d
from .quant_layers import QuantLinear as QuantLinear
from .quant_layers import convert as convert
from .quantize import calibrate as calibrate
from .quantize import freeze_scales as freeze_scales
from .quantize import parameter_groups as parameter_groups
from .quantize import quantize as quantize

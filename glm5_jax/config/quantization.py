"""Names of the schemes of quantization, which quantization/schemes.py describes."""

from typing import Literal, get_args

QuantizationScheme = Literal["int8", "w8a8", "fp8", "w4a16", "w4a8", "int4"]
QUANTIZATION_SCHEMES: tuple[str, ...] = get_args(QuantizationScheme)
RolloutWeights = Literal["same", QuantizationScheme]
QuantizationAware = Literal["none", QuantizationScheme]

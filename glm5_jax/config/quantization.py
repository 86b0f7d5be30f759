"""Names of the schemes of quantization, and of what is done before the rounding.

quantization/schemes.py and quantization/equivalents.py describe them.
"""

from typing import Literal, get_args

QuantizationScheme = Literal["int8", "w8a8", "fp8", "w4a16", "w4a8", "int4"]
QUANTIZATION_SCHEMES: tuple[str, ...] = get_args(QuantizationScheme)
STORED = "stored"  # in place of a scheme: the weights as a folder has them
CALIBRATIONS = ("none", "rotate", "smooth", "both")
RolloutWeights = Literal["same", QuantizationScheme]
QuantizationAware = Literal["none", QuantizationScheme]

"""How weights are kept: the methods of quantization, their names, and which one applies.

* `none`: every matrix in the model's dtype; a quantized file is dequantized.
* `gguf`: every matrix in the blocks of the GGUF file it comes from.
* `int8_per_channel_weight_only`: linear layers and the output head are quantized when they are
  loaded, to 8 bits with a scale per row; an embedding only where it is the head, too.
"""

from collections.abc import Mapping
from types import MappingProxyType

from headrace.configs.config import DType, QuantizationMethod
from headrace.configs.errors import ConfigurationError, UnsupportedFeatureError

INT8: QuantizationMethod = "int8_per_channel_weight_only"

# Every name that means something here.
NAMES: Mapping[str, QuantizationMethod] = MappingProxyType(
    {"none": "none", "gguf": "gguf", INT8: INT8, "int8": INT8}
)
# Known elsewhere.
_NOT_IMPLEMENTED = (
    "awq", "awq_marlin", "auto_awq", "gptq", "gptq_marlin", "auto_gptq", "fp8", "fbgemm_fp8",
    "compressed-tensors", "modelopt", "modelopt_fp4", "modelopt_mxfp8", "modelopt_mixed", "mxfp4",
    "gpt_oss_mxfp4", "deepseek_v4_fp8", "quark", "torchao", "inc", "moe_wna16", "experts_int8",
    "humming", "fp_quant", "fp8_per_tensor", "fp8_per_block", "fp8_per_channel", "nvfp4_per_token",
    "mxfp8", "online", "bitsandbytes",
)  # fmt: skip


def check_quantization(name: str | None) -> QuantizationMethod | None:
    """The method that `name` asks for; None: what suits the model.

    Raises UnsupportedFeatureError for a method that is known, but not implemented, and
    ConfigurationError for an unknown one.
    """
    if name is None:
        return None
    implemented = f"implemented are {', '.join(NAMES)}"
    if name.lower() in _NOT_IMPLEMENTED:
        raise UnsupportedFeatureError(
            f"quantization {name} is not implemented yet; {implemented}", "quantization"
        )
    method = NAMES.get(name.lower())
    if method is None:
        raise ConfigurationError(f"quantization {name!r} is not known; {implemented}")
    return method


def resolve_quantization(
    name: str | None, dtype: DType | None, preferred_dtype: DType, *, is_stored: bool
) -> tuple[QuantizationMethod, DType]:
    """The method, and the dtype of activations, and of weights that are not quantized.

    `dtype` None: not given; then it is `preferred_dtype`, and a model that is stored quantized
    (`is_stored`: a GGUF file whose weights are read) is computed as it is. Raises as
    `check_quantization` does.
    """
    method = check_quantization(name)
    if method is None:
        method = "gguf" if is_stored and dtype is None else "none"
    return method, dtype or preferred_dtype

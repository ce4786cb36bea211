"""FP8 Mixture-of-Experts kernels for NVIDIA GPUs, compiled at run time by NVRTC.

Arrays are NumPy, CuPy, torch or any with `__dlpack__`; results come back in the framework and on
the device of the first array argument. CPU arrays are computed by the NumPy reference, GPU arrays
by the kernels.
Importing this package touches no GPU, no CuPy and no environment variable.
"""

from __future__ import annotations

import logging

from cumoe import reference
from cumoe._version import __version__
from cumoe.checkpoint.experts import Experts, load_experts
from cumoe.errors import (
    ArgumentError,
    CacheFileError,
    CacheWarning,
    CheckpointError,
    CompileError,
    CumoeError,
    DeviceMismatchError,
    DTypeError,
    KernelNotBuiltError,
    UnsupportedDeviceError,
)
from cumoe.ops.fused_experts_fp8 import fused_experts_fp8
from cumoe.ops.moe_align_block_size import moe_align_block_size
from cumoe.ops.pad_experts import pad_experts
from cumoe.ops.per_token_group_quant_fp8 import per_token_group_quant_fp8
from cumoe.ops.silu_and_mul_quant_fp8 import silu_and_mul_quant_fp8
from cumoe.prebuild import prebuild
from cumoe.store.info import cache_info
from cumoe.warmup import warmup

__all__ = [
    "ArgumentError",
    "CacheFileError",
    "CacheWarning",
    "CheckpointError",
    "CompileError",
    "CumoeError",
    "DTypeError",
    "DeviceMismatchError",
    "Experts",
    "KernelNotBuiltError",
    "UnsupportedDeviceError",
    "__version__",
    "cache_info",
    "fused_experts_fp8",
    "load_experts",
    "moe_align_block_size",
    "pad_experts",
    "per_token_group_quant_fp8",
    "prebuild",
    "reference",
    "silu_and_mul_quant_fp8",
    "warmup",
]

logging.getLogger("cumoe").addHandler(logging.NullHandler())

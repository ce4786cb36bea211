"""Element types as the integers that the kernels are compiled with."""

from __future__ import annotations

FLOAT_TYPE = {"bf16": 0, "fp16": 1, "fp32": 2}
"""FloatType of ``kernels_src/common/types.cuh``; -1 stands for an absent array."""

ID_TYPE = {None: 0, "int32": 1, "int64": 2}
"""IdType of ``kernels_src/common/routing.cuh``."""

ABSENT = -1

"""Every kernel that a layer can reach, whatever the number of tokens."""

from __future__ import annotations

from cumoe.plan import fused_experts_fp8 as fused
from cumoe.plan.device import DeviceInfo
from cumoe.plan.spec import KernelSpec


def layer_specs(
    device: DeviceInfo,
    *,
    K: int,
    N: int,
    num_experts: int,
    num_local_experts: int | None = None,
    topk: int,
    scale_format: str = "fp32",
    clamp: bool = False,
    scaled: bool = False,
    ids: str = "int32",
    weight: str = "fp32",
    weight_on_input: bool = False,
) -> tuple[KernelSpec, ...]:
    """The kernels of `fused_experts_fp8` on this layer, sorted by name.

    A layer with fewer local experts than experts is called with an expert_map.
    """
    local = num_experts if num_local_experts is None else num_local_experts
    few = fused.Problem(
        1, K, N, num_experts, local, topk, ids, weight, local != num_experts, scale_format,
        clamp, scaled, weight_on_input, x_aligned=True, out_aligned=True,
    )  # fmt: skip
    many = few._replace(M=32 * num_experts)
    found = {kernel for p in (few, many) for kernel in fused.plan(p, device).kernels}
    return tuple(sorted(found, key=lambda spec: spec.text))

"""Compiling, without a GPU, every kernel that a layer can reach."""

from __future__ import annotations

from dataclasses import dataclass

from cumoe._settings import settings
from cumoe.checkpoint.config import MoeConfig
from cumoe.errors import ArgumentError
from cumoe.plan.spec import KernelSpec


@dataclass(frozen=True, slots=True)
class BuildReport:
    """What was compiled, or found in the cache."""

    arch: str
    kernels: int
    seconds: float
    num_bytes: int
    failures: tuple[str, ...]
    """NVRTC's answer for each kernel that it refused."""


def build_layer(config: MoeConfig, *, arch: str | None = None) -> BuildReport:
    """Compiles the kernels of a layer into the cache.

    Args:
        config: the layer; ``top_k`` must be known.
        arch: ``sm_90a`` and the like; by default CUMOE_ARCH, else sm_90a.

    Raises: UnsupportedDeviceError where CuPy or NVRTC cannot be used.
    """
    from cumoe.store import store

    arch = arch or settings().arch or "sm_90a"
    report = store.build(_specs(config, arch))
    return BuildReport(
        arch=arch,
        kernels=len(report.cubins),
        seconds=report.seconds,
        num_bytes=sum(len(cubin.data) for cubin in report.cubins),
        failures=tuple(str(error) for _, error in report.failures),
    )


def _specs(config: MoeConfig, arch: str) -> tuple[KernelSpec, ...]:
    from cumoe.plan.device import H200
    from cumoe.plan.enumerate import layer_specs

    if config.top_k is None:
        raise ArgumentError("top_k: wanted the experts per token, got None; give it")
    return layer_specs(
        H200._replace(arch=arch),
        K=config.hidden_size,
        N=config.intermediate_size,
        num_experts=config.num_experts,
        topk=config.top_k,
        scale_format=config.scale_format or "fp32",
        clamp=config.swiglu_limit is not None,
    )

"""What a plan may know of a GPU."""

from __future__ import annotations

from typing import NamedTuple

from cumoe.errors import UnsupportedDeviceError

# Compute capability to the architecture that a kernel is compiled for. The `a` targets have the
# instructions of one architecture only (wgmma on sm_90a), so each is named.
ARCHITECTURES = {
    (8, 9): "sm_89",
    (9, 0): "sm_90a",
    (10, 0): "sm_100a",
    (10, 3): "sm_103a",
    (12, 0): "sm_120a",
    (12, 1): "sm_121a",
}


class DeviceInfo(NamedTuple):
    """The facts of a GPU that decide tiles and grids."""

    arch: str
    num_sms: int
    smem_optin_bytes: int
    """Most dynamic shared memory that one CTA can ask for."""


def has_dependent_launch(arch: str) -> bool:
    """Whether kernels can be launched with programmatic stream serialization (sm_90 and newer)."""
    return arch != "sm_89"


def has_wgmma(arch: str) -> bool:
    """Whether warpgroups multiply from shared memory, and the copy engine reads tensor maps."""
    return arch == "sm_90a"


H200 = DeviceInfo("sm_90a", 132, 232_448)


def architecture(major: int, minor: int) -> str:
    """The architecture to compile for on a GPU of this compute capability."""
    try:
        return ARCHITECTURES[major, minor]
    except KeyError:
        known = ", ".join(f"{a}.{b}" for a, b in ARCHITECTURES)
        raise UnsupportedDeviceError(
            f"GPU: want compute capability {known} (native e4m3 conversion), got {major}.{minor}; "
            f"move the arrays to the CPU to use the NumPy reference"
        ) from None

"""The options of every NVRTC run."""

from __future__ import annotations


def nvrtc_flags(arch: str) -> tuple[str, ...]:
    """The options to compile for `arch` (as ``sm_90a``), in the order in which they are hashed.

    No ``-lineinfo``: it writes the working directory into the cubin, so that one key would stand
    for different bytes, and makes it half as large again.
    """
    return (
        f"-arch={arch}",  # a real architecture: the result is a cubin, not PTX
        "-std=c++17",  # if constexpr, static_assert without a message, inline variables
        "--fmad=false",  # a contraction is written as fmaf or does not happen: plain IEEE fp32
        "-ftz=false",  # denormals are values
        "-prec-div=true",  # division rounds to nearest
        "-prec-sqrt=true",  # so does the square root
        "--no-cache",  # the driver's cache behind ours: it would initialise CUDA, and forks end
        "-no-source-include",  # the working directory is no include path: nothing ambient
        "--ptxas-options=--warn-on-spills",  # a spill is a fault of the tile choice
    )

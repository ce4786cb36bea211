"""Every error the library raises on purpose.

    CumoeError
    ├── ArgumentError (ValueError)       a value or a shape that an op cannot take
    ├── DTypeError (TypeError)           an array of the wrong element type, or no array at all
    ├── DeviceMismatchError              arrays of one call on different devices
    ├── UnsupportedDeviceError           no kernel for this GPU, or no usable CUDA installation
    ├── KernelNotBuiltError              a kernel is missing and may not be compiled now
    ├── CompileError                     NVRTC refused a kernel; carries its log
    ├── CheckpointError                  a checkpoint that cannot be read; names file and tensor
    └── CacheFileError                   a file of exported kernels that cannot be trusted

    CacheWarning (UserWarning)           the disk cache is unusable; kernels are kept in memory

Each message names the argument, what was wanted, what came, and the remedy.
"""

from __future__ import annotations

__all__ = [
    "ArgumentError",
    "CacheFileError",
    "CacheWarning",
    "CheckpointError",
    "CompileError",
    "CumoeError",
    "DTypeError",
    "DeviceMismatchError",
    "KernelNotBuiltError",
    "UnsupportedDeviceError",
]


class CumoeError(Exception):
    """Base of all errors of this library."""


class ArgumentError(CumoeError, ValueError):
    """An argument has a value or a shape that the op cannot take."""


class DTypeError(CumoeError, TypeError):
    """An argument is not an array, or an array of the wrong element type."""


class DeviceMismatchError(CumoeError):
    """The arrays of one call do not lie on one device."""


class UnsupportedDeviceError(CumoeError):
    """The GPU has no kernel here, or no usable CUDA installation was found."""


class KernelNotBuiltError(CumoeError):
    """A kernel is not in the cache and may not be compiled now."""


class CompileError(CumoeError):
    """NVRTC rejected a kernel. ``log`` holds its output."""

    def __init__(self, message: str, log: str = "") -> None:
        super().__init__(f"{message}\n{log}" if log else message)
        self.log = log


class CheckpointError(CumoeError):
    """A checkpoint file, or a tensor in it, is not what it should be."""


class CacheFileError(CumoeError):
    """A file of exported kernels is damaged, of another version, or cannot be read or written."""


class CacheWarning(UserWarning):
    """The kernel cache on disk cannot be used; kernels are kept in memory."""

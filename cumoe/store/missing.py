"""What to say about kernels that are not built: the error and the command that builds them."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from cumoe.errors import KernelNotBuiltError
from cumoe.plan.spec import KernelSpec


def prebuild_command(specs: Sequence[KernelSpec]) -> str:
    """The command line that compiles these kernels into the cache."""
    names = (part for spec in specs for part in ("--kernel", spec.text))
    return shlex.join(["cumoe", "prebuild", *names])


def not_built(specs: Sequence[KernelSpec], reason: str) -> KernelNotBuiltError:
    """The error for kernels that are missing and may not be compiled now.

    Args:
        specs: at least one.
        reason: where they were wanted, and why not here and now.
    """
    more = f" and {len(specs) - 1} more kernels" if len(specs) > 1 else ""
    return KernelNotBuiltError(
        f"{specs[0].text}{more}: {reason}. Build before the process starts:\n"
        f"    {prebuild_command(specs)}\n"
        f"`cumoe cache explain {specs[0].text}` says why it is missing."
    )

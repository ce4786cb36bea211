"""Many processes at little cost: forks of one that has its imports done.

Used inside a child of `tests.helpers.child`, whose process has no other threads.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

Facts = dict[str, Any]


class Fork(NamedTuple):
    pid: int
    pipe: int
    """What the process reports, as JSON."""


def fork(function: Callable[[], Facts]) -> Fork:
    """Starts a process that reports what `function` returns and ends."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # libraries may have idle threads
        pid = os.fork()
    if pid:
        os.close(writer)
        return Fork(pid, reader)
    code = 1
    try:
        os.close(reader)
        data = json.dumps(function()).encode()
        while data:
            data = data[os.write(writer, data) :]
        code = 0
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def join(process: Fork) -> Facts:
    """What the process reported, once it has ended well."""
    with open(process.pipe, "rb") as pipe:
        text = pipe.read()
    _, status = os.waitpid(process.pid, 0)
    if status:
        raise AssertionError(f"a forked process ended with {os.waitstatus_to_exitcode(status)}")
    facts: Facts = json.loads(text)
    return facts


def kill(process: Fork) -> bool:
    """Kills the process with SIGKILL; whether it was still running."""
    os.kill(process.pid, signal.SIGKILL)
    os.close(process.pipe)
    _, status = os.waitpid(process.pid, 0)
    return os.WIFSIGNALED(status)


class Barrier:
    """Lets forks that all stand at it go on in one moment."""

    def __init__(self) -> None:
        self._ready, self._go = os.pipe(), os.pipe()

    def wait(self) -> None:
        """In a fork."""
        os.close(self._go[1])
        os.write(self._ready[1], b".")
        os.read(self._go[0], 1)  # ends when the last writer is closed: for all at once

    def release(self, count: int) -> None:
        """In the process that made the barrier and `count` forks."""
        arrived = 0
        while arrived < count:
            arrived += len(os.read(self._ready[0], count))
        for end in (*self._ready, *self._go):
            os.close(end)

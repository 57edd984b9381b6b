"""Compilation of kernels with numba, kept on disk where a folder can be written."""

from collections.abc import Callable
from typing import TypeVar

import numba

Kernel = TypeVar("Kernel", bound=Callable[..., object])


def compiled(kernel: Kernel) -> Kernel:
    """Return ``kernel`` compiled at its first call. It runs without Python's lock: a service answers while it plans.

    The cache saves each new process some seconds. numba refuses to cache where neither the package's folder nor the
    user's own is writable; such an install compiles in every process. It looks at a kernel's own file only: whoever
    edits a kernel that another file's kernel calls (``window.py``) touches that file too.
    """
    try:
        return numba.njit(cache=True, nogil=True)(kernel)  # type: ignore[no-any-return]
    except RuntimeError:
        return numba.njit(nogil=True)(kernel)  # type: ignore[no-any-return]

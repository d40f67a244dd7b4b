"""Gives memory that the C library keeps back to the system."""

import ctypes


def trim() -> None:
    """Gives memory that is free back to the system.

    glibc keeps freed blocks of up to 32 MB for the thread that had allocated them. A
    large state that changing threads copy and free again and again would take several
    times its size. Other C libraries keep less.
    """
    release = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if release is not None:
        release(0)

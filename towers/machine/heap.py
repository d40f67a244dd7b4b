"""The memory that the C library keeps for this process."""

import ctypes


def trim() -> None:
    """Has the C library give the memory that nothing uses back to the system.

    glibc keeps what was freed, up to 32 MB a block, for the thread that had allocated
    it. A large state that is copied and freed again and again, by changing threads,
    would take several times its size. Other C libraries do not keep as much.
    """
    release = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if release is not None:
        release(0)

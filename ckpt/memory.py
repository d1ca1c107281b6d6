"""How much memory processes take, and how much is left for what passes through them. Needs no torch: `ckpt --help` reads it."""

from __future__ import annotations

import ctypes
from contextlib import suppress

from core.errors import RequestError

# What a process takes for itself: Python, torch, and the descriptions of files and tensors.
PROCESS_BYTES = 384 << 20
# What one worker needs beside, at least.
LEAST_BYTES = 80 << 20
# What a file takes on its way into an object store, which takes it by one request: itself, and twice what is made of it.
UPLOAD_BYTES = 3 * (128 << 20)


# Of malloc.h: how many pools the threads have, above which size memory is asked of the system by itself, and when it is given back.
_ARENAS, _MMAP_THRESHOLD, _TRIM_THRESHOLD = -8, -3, -1


def memory_of_each(memory_bytes: int, workers: int, uploads: bool = False) -> int:
    """What each of the workers may take beside what a process takes anyway, so that all together stay below `memory_bytes`.

    uploads: they write into an object store; what that takes is not in the answer. Raises RequestError where that is less than
    LEAST_BYTES.
    """
    # Several workers are started by a process that takes its part too.
    own = (workers + (workers > 1)) * PROCESS_BYTES + workers * UPLOAD_BYTES * uploads
    needed = own + workers * LEAST_BYTES
    if memory_bytes < needed:
        raise RequestError(
            f"--memory={memory_bytes >> 20}MiB: {workers} worker process{'es need' if workers > 1 else ' needs'} "
            f"{needed >> 20}MiB at least. Give more{', or fewer --workers' if workers > 1 else ''}."
        )
    return (memory_bytes - own) // workers


def keep_freed_memory() -> None:
    """Have this process use the memory again that it has freed, rather than give it back to the system and fetch other (GNU's C library).

    Pieces of many MiB come and go by the hundred; that the system clears the memory of each anew takes longer than reading and
    writing it. For processes that do nothing else: it holds for everything in them.
    """
    with suppress(AttributeError, OSError, TypeError):
        library = ctypes.CDLL(None)
        for parameter, value in ((_ARENAS, 1), (_MMAP_THRESHOLD, 1 << 30), (_TRIM_THRESHOLD, 1 << 30)):
            library.mallopt(parameter, value)


def workers_that_fit(memory_bytes: int, uploads: bool = False) -> int:
    """The most workers that can be had in so much memory; 1 where it is too little for any."""
    return max(1, (memory_bytes - PROCESS_BYTES) // (PROCESS_BYTES + LEAST_BYTES + UPLOAD_BYTES * uploads))

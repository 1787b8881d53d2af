"""Memory that this process writes and that another one reads, shared by descriptor.

An anonymous file: it has no name, so nothing can stay behind after any exit, `kill -9` included, and the small default
size of a container's /dev/shm does not matter. It is sealed against changes of its size, so that neither end can take
pages from under the other (SIGBUS), and its pages are reserved when it is made. Linux only.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import sys

__all__ = ["SharedMemory", "round_up_to_page"]


class SharedMemory:
    """Memory of a fixed size.

    Attributes:
        view: all of it, writable; no slice of it may be held when it is closed.
    """

    def __init__(self, size_bytes: int) -> None:
        """Reserves the memory; takes milliseconds for tens of MB.

        Args:
            size_bytes: a multiple of the page size.

        Raises:
            OSError: the machine does not have it, or knows no such memory.
        """
        if sys.platform != "linux":
            raise OSError(f"no sealed memory files on {sys.platform}")
        self._descriptor = os.memfd_create("target-server-shared", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.fchmod(self._descriptor, 0o600)
            os.posix_fallocate(self._descriptor, 0, size_bytes)
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            fcntl.fcntl(self._descriptor, fcntl.F_ADD_SEALS, seals)
            self._map = mmap.mmap(self._descriptor, size_bytes)
        except OSError:
            os.close(self._descriptor)
            raise
        self.view = memoryview(self._map)

    def reader_descriptor(self) -> int:
        """Returns a new descriptor that can only be mapped for reading; the caller closes it."""
        return os.open(f"/proc/self/fd/{self._descriptor}", os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        """Gives the pages back to the machine, also where a reader still has them mapped: it then reads zeros."""
        self.view.release()
        self._map.madvise(mmap.MADV_REMOVE)
        self._map.close()
        os.close(self._descriptor)


def round_up_to_page(size_bytes: int) -> int:
    """Returns `size_bytes` rounded up to whole pages, at least one."""
    return max(1, -(-size_bytes // mmap.PAGESIZE)) * mmap.PAGESIZE

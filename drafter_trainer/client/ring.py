"""The ring of batch slots that the receiver process fills and the trainer reads in place.

The memory is an anonymous file that lives only as long as a process holds its descriptor: nothing can stay behind after
any exit, ``kill -9`` included, and the small default size of a container's /dev/shm does not matter. The trainer
decides which slot a batch goes to (submission number modulo slot count), so a slot has exactly one owner at a time:
the receiver from submission to hand-over, the trainer from hand-over to release.

Standard library only; the receiver imports this.
"""

from __future__ import annotations

import mmap
import os
import tempfile

PAGE_BYTES = 4096


class Ring:
    """Equal slots in memory shared by descriptor.

    Args:
        descriptor: Open file descriptor of the memory; owned by the ring from here on.
        slot_bytes: Capacity of one slot; rounded up to whole pages.
        slot_count: Number of slots.
    """

    def __init__(self, descriptor: int, *, slot_bytes: int, slot_count: int) -> None:
        self.descriptor = descriptor
        self.slot_bytes = round_up_to_page(slot_bytes)
        self.slot_count = slot_count
        self._view = memoryview(mmap.mmap(descriptor, self.slot_bytes * slot_count))

    @classmethod
    def create(cls, *, slot_bytes: int, slot_count: int) -> Ring:
        """Reserves the memory.

        Raises:
            OSError: The machine does not have it (found here, not as a SIGBUS at the first write).
        """
        descriptor = _anonymous_file()
        try:
            os.posix_fallocate(descriptor, 0, round_up_to_page(slot_bytes) * slot_count)
        except OSError:
            os.close(descriptor)
            raise
        return cls(descriptor, slot_bytes=slot_bytes, slot_count=slot_count)

    def slot(self, index: int, size_bytes: int) -> memoryview:
        """The first ``size_bytes`` of a slot, writable; valid until ``close``."""
        if not (0 <= index < self.slot_count and 0 <= size_bytes <= self.slot_bytes):
            raise ValueError(f"slot {index} with {size_bytes} bytes of {self.slot_count} x {self.slot_bytes}")
        start = index * self.slot_bytes
        return self._view[start : start + size_bytes]

    def whole(self) -> memoryview:
        """All slots, for registering the memory with a device driver."""
        return self._view

    def close(self) -> None:
        """Lets go of the memory; it is unmapped with its last view, never under a tensor that still reads it."""
        self._view = memoryview(b"")
        os.close(self.descriptor)


def round_up_to_page(size_bytes: int) -> int:
    """``size_bytes`` rounded up to whole pages, at least one."""
    return max(1, -(-size_bytes // PAGE_BYTES)) * PAGE_BYTES


def _anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("drafter-trainer-ring", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:  # unlinked at once; where memfd does not exist
        return os.dup(file.fileno())

"""The error of an allocator without memory for a request."""

from __future__ import annotations

from trainfit.simgpu.allocator.segments import DeviceSegments


class OutOfDeviceMemory(Exception):
    """No memory for a request, with the figures of PyTorch's message, all in bytes.

    ``requested_bytes`` is what the message says after "Tried to allocate": the size of the
    segment that was asked of the device, which is the request after rounding.
    ``allowed_bytes`` is the limit that a memory fraction sets, ``None`` without one.
    ``non_pytorch_bytes`` is the process's memory outside the allocator (the context).
    """

    def __init__(self, allocator: DeviceSegments, requested_bytes: int) -> None:
        self.requested_bytes = requested_bytes
        self.capacity_bytes = allocator.capacity_bytes
        self.free_bytes = allocator.free_device_bytes()
        self.allocated_bytes = allocator.allocated_bytes
        self.reserved_bytes = allocator.reserved_bytes
        self.non_pytorch_bytes = allocator.context_bytes
        self.allowed_bytes = allocator.allowed_bytes
        super().__init__(
            f"tried to allocate {requested_bytes} bytes: {self.free_bytes} of "
            f"{self.capacity_bytes} are free, {self.allocated_bytes} allocated, "
            f"{self.reserved_bytes} reserved, {self.non_pytorch_bytes} outside the allocator"
        )

"""What the copy engine does by itself: a strided copy a page, from CPU memory straight into cells.

Not what the library does: torch has no such call. Here to know what staging costs beside it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import torch

from load_world import DEVICE, ON_GPU, LoadWorld, Mark, rates

HOST, ON_DEVICE = 1, 2  # CUmemorytype


class Copy2D(ctypes.Structure):
    """CUDA_MEMCPY2D of the driver's API."""

    _fields_ = [
        *((f"src{name}", kind) for name, kind in (
            ("XInBytes", ctypes.c_size_t), ("Y", ctypes.c_size_t), ("MemoryType", ctypes.c_int),
            ("Host", ctypes.c_void_p), ("Device", ctypes.c_uint64), ("Array", ctypes.c_void_p),
            ("Pitch", ctypes.c_size_t),
        )),
        *((f"dst{name}", kind) for name, kind in (
            ("XInBytes", ctypes.c_size_t), ("Y", ctypes.c_size_t), ("MemoryType", ctypes.c_int),
            ("Host", ctypes.c_void_p), ("Device", ctypes.c_uint64), ("Array", ctypes.c_void_p),
            ("Pitch", ctypes.c_size_t),
        )),
        ("WidthInBytes", ctypes.c_size_t), ("Height", ctypes.c_size_t),
    ]  # fmt: skip


def strided_copies(world: LoadWorld) -> Iterator[tuple[str, dict[str, object]]]:
    """The adapter of 80 MiB: 40 copies of 32 rows of 64 KiB."""
    if not ON_GPU:
        return
    driver = ctypes.CDLL("libcuda.so.1")
    adapter = world.rest(16)
    target = torch.empty(adapter.nbytes, dtype=torch.uint8, device=DEVICE)
    stack = world.tier.stack
    shape = stack.shape
    count = shape.pages_for(adapter.spec.elements)
    pages = torch.randperm(shape.num_pages)[:count].tolist()
    stack.table[0].copy_(stack.row(adapter.spec, pages))
    page_bytes = shape.rows * shape.page_bytes
    stream = torch.cuda.Stream()
    calls = []
    at = 0
    for view in world.views(adapter):
        for offset in range(0, len(view), page_bytes):
            call = Copy2D(
                srcMemoryType=HOST, srcHost=view.data_ptr() + offset, srcPitch=shape.page_bytes,
                dstMemoryType=ON_DEVICE,
                dstDevice=stack.arena.data_ptr() + pages[at] * shape.page_bytes,
                dstPitch=shape.num_pages * shape.page_bytes,
                WidthInBytes=shape.page_bytes, Height=shape.rows,
            )  # fmt: skip
            calls.append(call)
            at += 1
    handle = ctypes.c_void_p(stream.cuda_stream)

    def load() -> float:
        with torch.cuda.stream(stream):
            start = Mark()
            for call in calls:
                error = driver.cuMemcpy2DAsync_v2(ctypes.byref(call), handle)
                if error:
                    raise RuntimeError(f"cuMemcpy2DAsync_v2 gives {error}")
            end = Mark()
        end.wait()
        return start.us_to(end)

    load()
    world.check(0, adapter)
    ours, plain = [], []
    for _ in range(15):
        plain.append(world.time_plain([adapter], target))
        ours.append(load())
    yield "strided copies by the copy engine, one a page", rates(adapter.nbytes, ours, plain)

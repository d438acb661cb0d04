"""Whether an error means that memory has run out, which comes in many words."""

from __future__ import annotations

import torch

__all__ = ["is_out_of_memory"]

REFUSALS = (
    "can't allocate memory",
    "not enough memory",
    "out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Python's own error, torch's for devices, and those that come as a plain RuntimeError: the host's allocator (in
    words of its own on each system), MPS, and the libraries of CUDA, which allocate beside torch."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in REFUSALS)

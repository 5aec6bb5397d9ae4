"""CUDA C++ kernels of the small-batch decode path, compiled at first use by NVRTC."""

from subten.kernels.cuda.runtime import is_available

__all__ = ["is_available"]

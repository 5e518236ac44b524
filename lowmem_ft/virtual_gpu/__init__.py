"""A GPU that any PyTorch training function can run on, on a machine that has none."""

from lowmem_ft.virtual_gpu.gpu import VirtualGPU

__all__ = ["VirtualGPU"]

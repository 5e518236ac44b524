"""GPUs and model architectures as data files. Plain data: reading it imports neither torch nor transformers."""

from lowmem_ft.catalog.architectures import Architecture, find_architecture, load_architectures
from lowmem_ft.catalog.gpu_catalog import find_gpu, load_gpus
from lowmem_ft.catalog.gpu_spec import Gpu, Price

__all__ = ["Architecture", "Gpu", "Price", "find_architecture", "find_gpu", "load_architectures", "load_gpus"]

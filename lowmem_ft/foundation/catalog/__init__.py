"""GPUs and model architectures as data files. Plain data: reading it imports neither torch nor transformers."""

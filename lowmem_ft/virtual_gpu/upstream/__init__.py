"""Patches of other libraries, each for a block, that let programs run on a GPU that does not exist.

torch
    ``cuda_names``, ``cuda_classes`` and ``cuda_refusals`` let ``cuda`` mean the virtual GPU; ``inference_mode``;
    ``fake_tensor_patches`` lets fake tensors pass for real ones, in transformers as well.
transformers
    ``experts``, ``flash_attention``, ``generation``, ``weight_files``.
bitsandbytes
    ``bitsandbytes_weights`` and, for the rest of it, ``bitsandbytes_fakes``.
TRL
    ``trl_kernels``; Triton has a room of its own.
"""

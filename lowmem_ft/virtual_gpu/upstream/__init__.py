"""What of torch, transformers and bitsandbytes has to be patched for programs to run on a GPU that is not there."""

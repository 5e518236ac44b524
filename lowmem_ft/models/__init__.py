"""Models and tokenizers: read from hub, folder or GGUF; written as vanilla checkpoints."""

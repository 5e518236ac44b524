"""A model's files: names, configs and tensors, read without building the model."""

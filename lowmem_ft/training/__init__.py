"""Train a recipe: one step for real runs and traces, a loop around it, checkpoints that continue bit for bit."""

from lowmem_ft.training.loop import TrainResult, train

__all__ = ["TrainResult", "train"]

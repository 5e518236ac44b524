"""The loss of a causal LM without the logits of a whole batch."""

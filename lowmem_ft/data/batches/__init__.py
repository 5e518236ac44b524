"""Micro-batches from tokenized examples: order, packing, collating, splitting."""

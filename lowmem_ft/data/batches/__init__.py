"""From tokenized examples to micro-batches: order, packing, collating, splitting."""

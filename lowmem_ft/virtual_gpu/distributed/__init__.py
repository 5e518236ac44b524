"""One of several processes on a virtual GPU: collectives, DDP."""

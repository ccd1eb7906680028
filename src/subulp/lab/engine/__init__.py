"""The training loop and what a run keeps: configuration, run directory, checkpoints."""

"""One folder for each task: its readers, model, metrics and training."""

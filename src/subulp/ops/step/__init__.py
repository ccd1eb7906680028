"""What the Adam and SGD steps share: one job, one storage codec for each backend."""

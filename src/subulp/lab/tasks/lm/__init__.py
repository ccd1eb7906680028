"""The task ``lm``: a small GPT on text."""

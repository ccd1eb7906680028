"""Examples of click-through-rate prediction: a label, numbers, and categories."""

"""ELMO: its claims, and the experiments that repeat them."""

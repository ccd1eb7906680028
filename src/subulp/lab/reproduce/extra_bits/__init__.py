"""The extra-bits paper: its claims, and the experiments that repeat them."""

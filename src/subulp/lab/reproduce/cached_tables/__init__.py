"""The paper on cached embedding tables: its claims, and the experiments that repeat them."""

"""Whole modules and steps on a GPU, held to what a CPU computes.

Where there is no GPU, the same tests run on the CPU with the kernels interpreted. They need nothing
but PyTorch, Triton, NumPy and pytest.
"""

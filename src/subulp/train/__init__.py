"""Tasks that train real models under several precisions and compare what each one lost.

This package is imported by the command line before any training starts, so it imports nothing:
take what you need from its modules, e.g. ``from subulp.train.lm import train_lm``.
"""

"""Scalar definitions in exact rationals: what the arithmetic of subulp has to give.

Written from the mathematics and the papers, not from ``subulp.numerics``; nothing here imports it.
Speed does not matter here, being evidently right does.
"""

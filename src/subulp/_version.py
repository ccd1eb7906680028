"""The version of the installed package."""

from importlib import metadata


def version() -> str:
    """The version, or ``"unknown"`` when the source tree is used without installing it."""
    try:
        return metadata.version("subulp")
    except metadata.PackageNotFoundError:
        return "unknown"

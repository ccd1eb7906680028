"""Training in low precision without losing what low precision rounds away.

* :mod:`subulp.numerics`: narrow formats, rounding, expansions and extra bits, exactly;
* :mod:`subulp.optim`: AdamW, Adam and SGD with a ``precision=``;
* :mod:`subulp.nn`: layers whose weights stay narrow;
* :mod:`subulp.diagnostics`: what was lost, and what it costs.
"""

from __future__ import annotations

import importlib
from types import ModuleType

from ._version import version as _version

__version__ = _version()
__all__ = ["diagnostics", "nn", "numerics", "optim"]


def __getattr__(name: str) -> ModuleType:
    # Imported at first use: the command line answers --help without loading PyTorch.
    if name in __all__:
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])

"""Pages of docs/ whose code needs what an extra of the package cannot install: blocks of ``py``.

`tests/test_documentation.py` runs blocks of ``python``.
"""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).parent.parent.parent / "docs"
_BLOCK = re.compile(r"^```py\n(.*?)^```", re.MULTILINE | re.DOTALL)


def run(name: str) -> None:
    """Run the blocks of a page as one program.

    Raises:
        AssertionError: It has none.
    """
    text, names = (DOCS / name).read_text(), dict[str, object]()
    blocks = list(_BLOCK.finditer(text))
    assert blocks
    for block in blocks:
        # Padding makes a traceback name the page's own line.
        padding = "\n" * text[: block.start(1)].count("\n")
        exec(compile(padding + block[1], name, "exec"), names)

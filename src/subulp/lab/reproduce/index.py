"""All claims of all papers."""

from __future__ import annotations

from collections.abc import Sequence

from ..engine.typed_files import did_you_mean
from .cached_tables.claims import CLAIMS as CACHED_TABLES
from .claim import Claim
from .collage.claims import CLAIMS as COLLAGE
from .elmo.claims import CLAIMS as ELMO
from .extra_bits.claims import CLAIMS as EXTRA_BITS
from .mor.claims import CLAIMS as MOR

CLAIMS: Sequence[Claim] = (*COLLAGE, *EXTRA_BITS, *ELMO, *CACHED_TABLES, *MOR)


def find(names: Sequence[str]) -> list[Claim]:
    """The claims of these names, each once; ``"all"`` is every one that can be run, and the name of
    a paper all of its.

    Raises:
        ValueError: A name is unknown.
    """
    runnable = [claim for claim in CLAIMS if claim.experiment is not None]
    papers = dict.fromkeys(claim.paper for claim in CLAIMS)
    by_name = {claim.name: claim for claim in CLAIMS}
    known = "all", *papers, *by_name
    for name in names:
        if name not in known:
            # A hundred and fifty names, which are not all told.
            raise ValueError(
                f"claims={name!r} is unknown{did_you_mean(name, known) or '.'} Use all, a paper "
                f"({', '.join(papers)}) or a claim that `subulp reproduce list` prints"
            )
    found: dict[str, Claim] = {}
    for name in names:
        chosen = (
            [by_name[name]]
            if name in by_name
            else [claim for claim in runnable if name in ("all", claim.paper)]
        )
        found |= {claim.name: claim for claim in chosen}
    return list(found.values())

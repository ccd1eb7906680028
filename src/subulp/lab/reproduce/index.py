"""All claims of all papers."""

from __future__ import annotations

from collections.abc import Sequence

from ..engine.config import check_names
from . import cached_tables, collage, elmo, extra_bits, mor
from .claim import Claim

CLAIMS: Sequence[Claim] = (
    *collage.CLAIMS,
    *extra_bits.CLAIMS,
    *elmo.CLAIMS,
    *cached_tables.CLAIMS,
    *mor.CLAIMS,
)


def find(names: Sequence[str]) -> list[Claim]:
    """The claims of these names, each once; ``"all"`` is every one that can be run, and the name of
    a paper all of its.

    Raises:
        ValueError: A name is unknown.
    """
    runnable = [claim for claim in CLAIMS if claim.experiment is not None]
    papers = dict.fromkeys(claim.paper for claim in CLAIMS)
    by_name = {claim.name: claim for claim in CLAIMS}
    check_names("claims", names, ("all", *papers, *by_name))
    found: dict[str, Claim] = {}
    for name in names:
        chosen = (
            [by_name[name]]
            if name in by_name
            else [claim for claim in runnable if name in ("all", claim.paper)]
        )
        found |= {claim.name: claim for claim in chosen}
    return list(found.values())

"""A line and its marker, for legends and tables."""

from __future__ import annotations

from markupsafe import Markup

from . import svg
from .line_styles import Look


def swatch(look: Look) -> Markup:
    """The look as a small figure that screen readers pass over."""
    root = svg.Element("svg", {"viewBox": "0 0 34 12", "class": "swatch", "aria-hidden": "true"})
    group = svg.child(root, "g", style=f"--c:var(--c-{look.color[1:]})")
    dashes = svg.dash_array(look.dashes)
    svg.child(group, "line", class_="line", x1=1, x2=33, y1=6, y2=6, stroke_dasharray=dashes)
    svg.marker(group, look, 17, 6)
    return Markup(svg.markup(root))

"""What all plots have in common: colours, plain axes, names beside curves, PNG.

A curve is named beside its end instead of in a legend. References are grey and dotted.
"""

from __future__ import annotations

from dataclasses import dataclass
from io import BytesIO
from typing import Any

GREY = "0.5"
LINE_HEIGHT = 0.24  # of a label, in inches
_MARKERS = ("o", "s", "D", "v")  # colours come again after nine curves


@dataclass(frozen=True)
class Look:
    """How a curve is drawn."""

    colour: Any
    marker: str
    is_reference: bool = False

    @property
    def line(self) -> str:
        return ":" if self.is_reference else "-"

    @property
    def width(self) -> float:
        return 1.2 if self.is_reference else 1.8


def new_figure(width: float, height: float) -> Any:
    """A matplotlib figure of so many inches, which no window shows."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def png(figure: Any) -> bytes:
    """The figure as it is written; the same bytes for the same numbers."""
    image = BytesIO()
    figure.savefig(image, dpi=120, metadata={"Software": None})
    return image.getvalue()


def looks_of(references: dict[str, bool]) -> dict[str, Look]:
    """A colour and a marker for each name; what is a reference is grey."""
    from matplotlib import color_sequences

    # The eighth is a grey, which references have.
    palette = [*color_sequences["tab10"][:7], *color_sequences["tab10"][8:]]
    looks = {}
    number = 0
    for name, is_reference in references.items():
        if is_reference:
            looks[name] = Look(GREY, "o", is_reference=True)
            continue
        colour = palette[number % len(palette)]
        marker = _MARKERS[number // len(palette) % len(_MARKERS)]
        looks[name] = Look(colour, marker)
        number += 1
    return looks


def plain(panel: Any) -> None:
    """A light grid, and no frame above and at the right."""
    panel.grid(visible=True, alpha=0.25)
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)


def spread_out(
    heights: list[float], least: float, most: float = 1.0
) -> list[float]:
    """Heights of labels in [0, most], at least so far apart, in the same order.

    Moved up from the lowest on, then down from the highest.
    """
    order = sorted(range(len(heights)), key=lambda index: heights[index])
    placed = list(heights)
    below = -least
    for index in order:
        placed[index] = max(placed[index], below + least)
        below = placed[index]
    above = most + least
    for index in reversed(order):
        placed[index] = min(placed[index], above - least)
        above = placed[index]
    return placed


def name_beside(
    panel: Any, name: str, end: tuple[float, float], height: float, colour: Any
) -> None:
    """A name at the right of the panel, with a thin line to the end of its curve.

    `height` is a share of the panel's, `end` in its own coordinates.
    """
    panel.annotate(
        name,
        end,
        (1.03, height),
        xycoords="data",
        textcoords="axes fraction",
        color=colour,
        fontsize=9,
        verticalalignment="center",
        annotation_clip=False,
        arrowprops={
            "arrowstyle": "-",
            "relpos": (0, 0.5),
            "color": colour,
            "linewidth": 0.5,
            "alpha": 0.6,
        },
    )

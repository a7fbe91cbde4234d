"""Settings of matplotlib for figures on light and on dark pages: nothing behind them, and text in grey."""

__all__ = ["ON_ANY_PAGE"]

# Has a contrast of 4:1 or more to white and to the dark page of the manual.
_GREY = "#7b818b"

ON_ANY_PAGE = {
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
    "legend.framealpha": 0.0,
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), _GREY),
}

"""`write_page` fills in a template of ``templates/`` and writes a page, a single HTML file that includes its styles."""

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from quintic.durable import write_atomically
from quintic.errors import ConfigError
from quintic.launch import with_program
from quintic.report import formatting

__all__ = ["learning_axes", "write_page"]


@functools.cache
def _environment() -> Any:
    """Return Jinja2's environment, cached because reading a template takes longer than filling in a small page."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("quintic.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "date": formatting.date,
        "duration": _or_dash(formatting.duration),
        "flatten": formatting.flatten,
        "format_si": formatting.format_si,
        # Given the context, so that Jinja does not evaluate it for constant text when it compiles the template.
        "here": jinja2.pass_context(lambda context, text: with_program(text)),
        "humanize": formatting.humanize,
        "large_number": _or_dash(formatting.large_number),
        "number": lambda value, form: _or_dash(form.format)(value),
        "value_text": formatting.value_text,
    }
    return environment


def _or_dash(form: Callable[[Any], str]) -> Callable[[Any], str]:
    """Return the format extended by a dash for missing values."""
    return lambda value: "–" if value is None else form(value)


def write_page(path: Path, template: str, **context: Any) -> None:
    """Fill in a template and replace ``path`` by one rename, so that a browser never sees an incomplete page.

    Args:
        path: the file; its folder is created if missing.
        template: name of a file in ``templates/``.
        **context: values for the template.

    Raises:
        ConfigError: the file cannot be written.
    """
    text = _environment().get_template(template).render(context)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text.encode("utf-8", errors="replace"))
    except OSError as error:
        advice = "free some space, or give another file with quintic report --out"
        raise ConfigError(f"{path}: cannot be written ({error.strerror}); {advice}") from None


def learning_axes(records: Sequence[Mapping[str, Any]]) -> dict[str, tuple[str, str, int]]:
    """Return the x axes of learning curves: name -> (field of the records, label with its unit, divisor of values).

    Args:
        records: all records to draw, whose longest time decides the unit of time.
    """
    longest = max((record.get("seconds") or 0.0 for record in records), default=0.0)
    size, unit = (3600, "hours") if longest >= 7200 else (60, "minutes") if longest >= 120 else (1, "seconds")
    return {
        "by steps": ("step", "training steps", 1),
        "by tokens": ("tokens", "tokens read (K thousand, M million, B billion)", 1),
        "by time": ("seconds", f"training time ({unit})", size),
    }

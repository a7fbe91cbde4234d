"""`write_page` fills in a template of ``templates/`` and writes a page, a single HTML file that includes its styles."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jinja2

from quintic.durable import write_atomically
from quintic.errors import ConfigError
from quintic.launch import with_program
from quintic.report import formatting

__all__ = ["TEMPLATES", "write_page"]


def _or_dash(form: Callable[[Any], str]) -> Callable[[Any], str]:
    """Return the format extended by a dash for missing values."""
    return lambda value: "–" if value is None else form(value)


TEMPLATES = jinja2.Environment(
    loader=jinja2.PackageLoader("quintic.report"),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
TEMPLATES.filters |= {name: _or_dash(getattr(formatting, name)) for name in formatting.__all__} | {
    "number": lambda value, form: _or_dash(form.format)(value),
    # Given the context, so that Jinja does not evaluate it for constant text when it compiles the template.
    "here": jinja2.pass_context(lambda context, text: with_program(text)),
}


def write_page(path: Path, template: str, **context: Any) -> None:
    """Fill in a file of ``templates/`` and replace ``path`` by one rename, so that a browser never sees a part of it.

    Raises:
        ConfigError: the page cannot be written.
    """
    text = TEMPLATES.get_template(template).render(context)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text.encode("utf-8", errors="replace"))
    except OSError as error:
        advice = "free some space, or give another file with quintic report --out"
        raise ConfigError(f"{path}: cannot be written ({error.strerror}); {advice}") from None

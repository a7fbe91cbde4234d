"""One model: what is decided for each weight without an example, and with one."""

import hashlib
import re
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

import quintic
from quintic.grouping.assign import assign
from quintic.grouping.forward.roles import Roles
from quintic.optim.groups.assignment import Assignment
from quintic.optim.groups.names import mask_layer_indices, model_parameters
from quintic.optim.layout.views import Experts, Matrix, Split

UNDECIDED = "undecided"


@dataclass(frozen=True)
class Line:
    """Weights of one class that differ only in the numbers of their names, with one outcome."""

    weight: str
    shape: tuple[int, ...]
    names: str
    """What types and names decide: `AdamW`, a view, or `undecided`."""
    example: str
    """What is decided with the example."""
    role: str
    """What the forward pass alone says: a kind, and a view; empty if it has no role for the weight."""
    why_names: str
    why_example: str


@dataclass(frozen=True)
class Attempt:
    """A way to build a model and to call it."""

    what: str
    build: Callable[[], nn.Module]
    example: Callable[[nn.Module], Any]
    call: Callable[[nn.Module, Any], Any] | None = None
    after: str = ""
    """A regular expression: it is only tried where it matches an earlier error; empty for always."""


def is_held_out(family: str) -> bool:
    """Return whether the models of a family are in the third that was not looked at while the pass was made."""
    return int(hashlib.sha256(f"family {family}".encode()).hexdigest(), 16) % 3 == 0


def compare(model: nn.Module, example: Any, call: Callable[[nn.Module, Any], Any] | None = None) -> dict[str, Any]:
    """Return the lines of a model with the number of weights of each, and the seconds of the pass."""
    start = time.perf_counter()
    roles = quintic.trace(model, example, call=call)
    seconds = time.perf_counter() - start
    wanted = {param for _, param in model_parameters(model)}
    by_names = assign(model, wanted=wanted)
    by_example = assign(model, wanted=wanted, roles=roles)
    counts: Counter[Line] = Counter()
    for name, param in model_parameters(model):
        if param.ndim < 2:
            continue
        one, other = by_names.get(param), by_example.get(param)
        counts[
            Line(
                weight=mask_layer_indices(name),
                shape=tuple(param.shape),
                names=_text(one),
                example=_text(other),
                role=_role_text(roles, name),
                why_names=mask_layer_indices(one.why) if one else "",
                why_example=mask_layer_indices(other.why) if other else "",
            )
        ] += 1
    return {"seconds": seconds, "lines": [{**asdict(line), "count": count} for line, count in counts.items()]}


def first_that_runs(attempts: list[Attempt]) -> dict[str, Any]:
    """Return the comparison of the first attempt whose forward pass runs, else the errors of all."""
    errors: list[dict[str, Any]] = []
    for attempt in attempts:
        if attempt.after and not any(re.search(attempt.after, f"{one['stage']} {one['error']}") for one in errors):
            continue
        stage = "build"
        try:
            model = attempt.build()
            stage = "input"
            example = attempt.example(model)
            stage = "trace"
            return {"attempt": attempt.what, **compare(model, example, attempt.call)}
        except Exception as error:
            errors.append({"attempt": attempt.what, "stage": stage, **_told(error)})
    return {"errors": errors}


def _told(error: BaseException) -> dict[str, Any]:
    """Return an error's first line and the last places of its traceback."""
    cause = error.__cause__ or error
    places = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in traceback.extract_tb(cause.__traceback__)]
    own = [place for place in places if "/quintic/" in place]
    return {
        "error": f"{type(cause).__name__}: {str(cause).strip().partition(chr(10))[0]}"[:300],
        "places": places[-3:],
        "own": own[-1:],
    }


def _text(one: Assignment | None) -> str:
    if one is None:
        return UNDECIDED
    return "AdamW" if one.algorithm == "adamw" else _view_text(one.view)


def _view_text(view: Any) -> str:
    """Return a view in few words, those before the colon without sizes: `Split 3 x4 (in, out): 8+8+8`."""
    stored = " (in, out)" if getattr(view, "transposed", False) else ""
    if isinstance(view, Split):
        groups = f" x{view.groups}" if view.groups > 1 else ""
        return f"Split {len(view.sizes)}{groups}{stored}: {'+'.join(map(str, view.sizes))}"
    if isinstance(view, Matrix | Experts):
        return type(view).__name__ + stored
    return repr(view)


def _role_text(roles: Roles, name: str) -> str:
    role = roles.get(name)
    if role is None:
        return ""
    return role.kind if role.view is None else f"{role.kind} {_view_text(role.view)}"

"""The rules of the house that a machine can check. CONTRIBUTING.md says why they are there.

Every rule is a function from one module's syntax tree to its violations, so that a rule can be tested itself.
"""

import ast
import functools
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import quintic
from quintic.optim.groups.options import OPTIONS

PACKAGE = Path(quintic.__file__).parent
REPOSITORY = Path(__file__).parents[1]
LINE_LIMIT = 400

# Files that hold one class or one algorithm may be longer.
LONG_LINE_LIMIT = 700
LONG_FILES = {
    "grouping.forward.flow",
    "kernels.products.hopper_program",
    "optim.muon",
    "optim.step.bucket_step",
}

# What a part of the package may import from the rest of it. Parts not named may import everything.
# `errors`, `durable`, `tables` and `versions` are open to all; a part may always import itself.
MAY_IMPORT = {
    "errors": set(),
    "durable": set(),
    "tables": set(),
    "versions": set(),
    "hooks": set(),
    "limits": set(),
    "streams": set(),
    "launch": set(),
    "kernels": set(),
    "optim": {"hooks", "kernels"},
    "grouping": {"optim"},
    "interchange": {"optim"},
    "update_rules": {"optim"},
    "testing": {"grouping", "optim"},
    "simulate": {"grouping", "kernels", "limits", "optim"},
    "rehearsal": {"optim", "simulate"},
    "data": set(),
    "model": {"kernels"},
    "eval": {"data", "kernels", "model", "optim"},
    "report": {"launch"},
    "train": {"data", "eval", "grouping", "kernels", "limits", "model", "optim", "launch", "report", "streams"},
    "integrations": {"grouping", "optim"},
    "speedrun": {"data", "eval", "grouping", "kernels", "limits", "model", "optim", "report", "train"},
}

# Files at the old path of a module that the documentation has named: they import the new one when they are used.
FORWARDERS = {"optim.interchange": "interchange"}

# Deciding about parameters needs views, names and the form of a group. Only `explain` makes an optimizer.
GROUPING_MAY_USE = {
    "optim.groups.assignment",
    "optim.groups.flattened",
    "optim.groups.names",
    "optim.groups.options",
    "optim.layout.views",
    "optim.rules.table",
}

OPEN = {"errors", "durable", "tables", "versions"}
PARTS = {*MAY_IMPORT, "cli", "commands"}

# The rooms of a part: each may import the ones before it. "" stands for the files outside of rooms: in the optimizer
# what users call, among the kernels what several rooms share.
ROOMS = {
    "optim": [
        "numeric",
        "rules",
        "layout",
        "polar",
        "groups",
        "comms",
        "state",
        "plan",
        "step",
        "qk_clip",
        "checkpoint",
        "",
        "verify",
    ],
    "kernels": ["", "update", "products", "linear", "loss", "lookup", "attention"],
}
# Rooms that have to do with the dictionaries in which PyTorch keeps groups.
UNTYPED_GROUPS = {"", "numeric", "rules", "groups", "checkpoint", "verify"}
FILES_OF_A_FOLDER = 14

# Names that two files of one package give to functions of their own.
HELPERS_WITH_TWO_BODIES = {
    "commands.run",  # the name that cli.py calls in each command
}

# Slow to load, or not installed with the optimizer alone: `import quintic` must do without them.
HEAVY = ["triton", "pyarrow", "tokenizers", "tyro", "rich", "huggingface_hub"]
HARNESS = [
    f"quintic.{part}"
    for part in ("model", "data", "train", "report", "eval", "speedrun", "cli", "commands", "integrations", "simulate")
]

# `device` has the order in which kernels find numbers.
MAY_LIST_OPTIONS = {"optim.groups.options", "optim.rules.device"}
LISTED_OPTIONS = 4

# The plan with all that follows from the groups, the record of steps, and what adds to it.
SHARED_OF_OPTIMIZER = {"_plans", "_step_history", "_record_step"}

# The last one tells gloo where to meet, in processes of its own.
MAY_READ_ENVIRONMENT = {"cli", "train.config", "launch", "kernels.dispatch", "testing.processes"}
MAY_COMMUNICATE_IN_OPTIM = {"optim.comms.collectives"}
MAY_RENAME = {"durable"}
# The rules declare state and are chosen in these files; the last reads what other libraries saved, under their names.
MAY_NAME_STATE = ("optim.rules.rule", "optim.rules.table", "optim.rules.library.")
READS_OTHERS_STATE = ("saved_formats", "integrations.")
STATE_NAMES = {"momentum_buffer", "second_momentum_buffer", "element_second_moment", "exp_avg", "exp_avg_sq"}
STATE_NAMES |= {"slow_momentum_buffer", "lookahead_buffer", "row_magnitude", "row_exp_avg", "row_exp_avg_sq"}
# Constants for state that only some rules have, and that a later rule may have under another name.
NAMES_OF_ONE_RULE = {"NEURON_MOMENT", "SECOND_MOMENT"}
# Names that are also values of options: these count where a state is asked for them.
SHORT_STATE_NAMES = {"step", "master", "mantissa"}
MAY_ASK_VERSIONS = {"versions"}
VERSIONED = {"torch", "triton"}
# Can be imported where a package that is not PyTorch's is installed.
OF_OTHERS = {"torch.utils.tensorboard"}
MAY_NOT_PRINT = {"optim", "model", "data", "kernels", "integrations"}


class Module(NamedTuple):
    """One source file: its dotted name inside quintic ("" for quintic itself), and its text."""

    name: str
    source: str
    is_package: bool = False

    @property
    def path(self) -> str:
        return "/".join(["quintic", *filter(None, self.name.split(".")), *(["__init__"] * self.is_package)]) + ".py"

    @property
    def part(self) -> str:
        return self.name.split(".")[0]

    @property
    def tree(self) -> ast.Module:
        return parse(self.source)


@functools.cache
def parse(source: str) -> ast.Module:
    return ast.parse(source)


def read_modules() -> list[Module]:
    modules = []
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        name = ".".join(parts[:-1] if is_package else parts)
        modules.append(Module(name, path.read_text("utf-8"), is_package))
    return modules


MODULES = read_modules()


def names_of(node: ast.AST, module: Module) -> list[str]:
    """The full names that an import statement brings in: `from torch import distributed` is
    "torch.distributed". Empty for other statements."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            package = ["quintic", *filter(None, module.name.split("."))]
            if not module.is_package:
                package.pop()
            package = package[: len(package) - node.level + 1]
            base = ".".join([*package, *filter(None, [base])])
        return [f"{base}.{alias.name}" for alias in node.names]
    return []


def imports(module: Module) -> Iterator[tuple[int, str]]:
    """All imports of a module, also those inside functions and by `import_module`: (line, full name)."""
    for node in ast.walk(module.tree):
        for name in names_of(node, module):
            yield getattr(node, "lineno", 0), name
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == "import_module":
            name = getattr(node.args[0], "value", None)
            if isinstance(name, str):
                yield node.lineno, name


def is_in(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


# -------------------------------------------------------------------------------------- the rules


def wrong_directions(module: Module) -> list[str]:
    """Imports against the arrows between the parts."""
    if module.part not in MAY_IMPORT:
        return []
    allowed = MAY_IMPORT[module.part] | {module.part, *OPEN, FORWARDERS.get(module.name, "")}
    found = []
    for line, name in imports(module):
        if is_in(name, "quintic"):
            part = [*name.split("."), ""][1]
            # `quintic` has all public names; one of them belongs to the part it is defined in.
            public = quintic._MODULES.get(part, "optim") if part else "grouping.param_groups"
            if (part if part in PARTS else public.partition(".")[0]) not in allowed:
                found.append(f"line {line}: {module.part} may not import {name}")
    return found


def stray_uses_of_optim(module: Module) -> list[str]:
    """An import of more than views, names, groups and rules where parameters are classified."""
    if module.part != "grouping" or module.name == "grouping.explain":
        return []
    return [
        f"line {line}: {module.name} may not import {name}"
        for line, name in imports(module)
        if is_in(name, "quintic.optim") and not any(is_in(name, f"quintic.{used}") for used in GROUPING_MAY_USE)
    ]


def room_of(part: str, name: str) -> int | None:
    """The place of a dotted name's room among those of a part; None for the part itself and names outside of it."""
    parts = name.split(".")
    if parts[0] != part or part not in ROOMS or len(parts) < 2:
        return None
    return ROOMS[part].index(parts[1] if parts[1] in ROOMS[part] else "")


def wrong_doors(module: Module) -> list[str]:
    """Imports of a room from one of the same part that comes before it."""
    room = room_of(module.part, module.name)
    if room is None:
        return []
    found = []
    for line, name in imports(module):
        other = room_of(module.part, name.removeprefix("quintic.")) if is_in(name, "quintic") else None
        if other is not None and other > room:
            found.append(f"line {line}: {module.name} may not import {name}")
    return found


def stray_communication(module: Module) -> list[str]:
    """torch.distributed in the optimizer library, outside the one file that communicates."""
    if module.part != "optim" or module.name in MAY_COMMUNICATE_IN_OPTIM:
        return []
    # Describing a layout (DTensor, device meshes) is not communicating.
    layout = ("torch.distributed.tensor", "torch.distributed.device_mesh")
    found = []
    for line, name in imports(module):
        if is_in(name, "torch.distributed") and not any(is_in(name, package) for package in layout):
            found.append(f"line {line}: only {sorted(MAY_COMMUNICATE_IN_OPTIM)} import {name}")
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.distributed":
            found.append(f"line {node.lineno}: only {sorted(MAY_COMMUNICATE_IN_OPTIM)} use torch.distributed")
    return found


def untyped_groups(module: Module) -> list[str]:
    """An option read from a group's dictionary in a room below `Muon`: `Group` of `groups/options.py` has it typed."""
    place = room_of("optim", module.name)
    if place is None or ROOMS["optim"][place] in UNTYPED_GROUPS:
        return []
    return [
        f"line {node.lineno}: {ast.unparse(node)}"
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Subscript)
        and isinstance(node.slice, ast.Constant)
        and isinstance(node.slice.value, str)
        and re.search(r"\b_?groups?(\[\w+\])?$", ast.unparse(node.value))
    ]


def second_declarations(module: Module) -> list[str]:
    """A list of options outside of the table that declares them: give their rows a property, and select by that."""
    if module.part != "optim" or module.name in MAY_LIST_OPTIONS:
        return []
    found = []
    for node in ast.walk(module.tree):
        entries = node.keys if isinstance(node, ast.Dict) else getattr(node, "elts", [])
        names = [entry.value for entry in entries if isinstance(entry, ast.Constant) and isinstance(entry.value, str)]
        listed = [name for name in names if name in OPTIONS]
        if len(listed) >= LISTED_OPTIONS:
            found.append(f"line {node.lineno}: {', '.join(listed)}")
    return found


def private_reads(module: Module) -> list[str]:
    """Private attributes of the optimizer, read outside of `muon.py`, other than those that the library shares."""
    if module.name == "optim.muon":
        return []
    return [
        f"line {node.lineno}: {ast.unparse(node)}"
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Attribute)
        and node.attr.startswith("_")
        and node.attr not in SHARED_OF_OPTIMIZER
        and not node.attr.startswith(("__", "_optimizer_"))  # these are PyTorch's
        and ast.unparse(node.value) in ("optimizer", "self._optimizer", "muon")
    ]


def environment_reads(module: Module) -> list[str]:
    """os.environ or os.getenv outside the few places where an environment variable may count."""
    if module.name in MAY_READ_ENVIRONMENT:
        return []
    found = [f"line {line}: {name}" for line, name in imports(module) if name in ("os.environ", "os.getenv")]
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node) in ("os.environ", "os.getenv"):
            found.append(f"line {node.lineno}: {ast.unparse(node)}")
    return found


def version_questions(module: Module) -> list[str]:
    """A question for PyTorch's or Triton's version, or whether one has a name yet, outside the one file for these."""
    if module.name in MAY_ASK_VERSIONS:
        return []
    # Names that stand for a part of either: imported, or assigned from such a part.
    bound = {"torch", "triton"}
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            for alias, name in zip(node.names, names_of(node, module), strict=True):
                if name.partition(".")[0] in VERSIONED or is_in(name, "quintic.kernels.jit"):
                    bound.add(alias.asname or alias.name.partition(".")[0])
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Attribute) and root_of(node.value) in bound:
            bound |= {target.id for target in node.targets if isinstance(target, ast.Name)}

    def is_part(node: ast.AST) -> bool:
        return root_of(node) in bound

    found = []
    for node in ast.walk(module.tree):
        what = ""
        if isinstance(node, ast.Attribute):
            # `torch.version.hip` and `.cuda` say how it was built.
            of_import = isinstance(node.value, ast.Call) and "import_module" in ast.unparse(node.value)
            is_version = node.attr == "__version__" and (of_import or is_part(node))
            what = ast.unparse(node) if is_version else ""
        elif isinstance(node, ast.Call) and node.args:
            function = ast.unparse(node.func).rpartition(".")[2]
            asks = function in ("hasattr", "signature", "getattr_static") or (function, len(node.args)) == (
                "getattr",
                3,
            )
            of_metadata = function == "version" and getattr(node.args[0], "value", None) in VERSIONED
            what = ast.unparse(node) if of_metadata or (asks and is_part(node.args[0])) else ""
        elif isinstance(node, ast.Try):
            caught = " ".join(ast.unparse(handler.type) for handler in node.handlers if handler.type)
            if "ImportError" in caught or "AttributeError" in caught or "ModuleNotFoundError" in caught:
                named = [name for line in node.body for inner in ast.walk(line) for name in names_of(inner, module)]
                tried = [name for name in named if name.partition(".")[0] in VERSIONED and name not in OF_OTHERS]
                what = f"try: {', '.join(tried)}" if tried else ""
        if what:
            found.append(f"line {node.lineno}: {what}")
    return found


def root_of(node: ast.AST) -> str:
    """Return the name that a chain of attributes begins with; "" for anything else."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def stray_renames(module: Module) -> list[str]:
    """A file or folder renamed outside the one file that flushes it to disk before and its folder after."""
    if module.name in MAY_RENAME:
        return []
    found = []
    for node in ast.walk(module.tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        name = ast.unparse(node.func)
        # `text.replace(old, new)` has two arguments, `dataclasses.replace` has keywords; `optim` writes no files.
        is_of_path = node.func.attr == "replace" and len(node.args) == 1 and not node.keywords
        if is_of_path and module.part == "optim":
            continue
        if is_of_path or name in ("os.replace", "shutil.move") or node.func.attr == "rename":
            found.append(f"line {node.lineno}: {name}()")
    return found


def names_of_state(module: Module) -> list[str]:
    """A name of optimizer state spelt outside the rules that declare it, or the name of one rule's state used there."""
    if module.name.startswith(MAY_NAME_STATE) or any(part in module.name for part in READS_OTHERS_STATE):
        return []
    found = [
        f"line {node.lineno}: {node.value!r}"
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Constant) and node.value in STATE_NAMES
    ]
    if module.part != "interchange":
        found += [
            f"line {node.lineno}: {node.id}, a rule with such state may call it otherwise: `rule.vector_state`"
            for node in ast.walk(module.tree)
            if isinstance(node, ast.Name) and node.id in NAMES_OF_ONE_RULE
        ]
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            of_state = re.search(r"states?\b", ast.unparse(node.value))
            if of_state and module.part == "optim" and node.slice.value in SHORT_STATE_NAMES:
                found.append(f"line {node.lineno}: {ast.unparse(node)}")
    return found


def comparisons_of_algorithms(module: Module) -> list[str]:
    """An `algorithm` compared with a name outside the table of rules: ask the rule, `rule.orthogonalizes`."""
    if module.name == "optim.rules.table" or any(part in module.name for part in READS_OTHERS_STATE):
        return []
    found = []
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Compare):
            sides = [ast.unparse(side) for side in (node.left, *node.comparators)]
            if any("algorithm" in side for side in sides) and any(re.search("'(muon|adamw)'", side) for side in sides):
                found.append(f"line {node.lineno}: {ast.unparse(node)}")
    return found


def awareness_of_tests(module: Module) -> list[str]:
    """Code that asks whether it is being tested."""
    found = []
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Compare) and isinstance(node.left, ast.Constant) and node.left.value == "pytest":
            found.append(f'line {node.lineno}: `"pytest" in ...`')
    return found


def prints(module: Module) -> list[str]:
    """print() where only the command line should speak."""
    if module.part not in MAY_NOT_PRINT:
        return []
    return [
        f"line {node.lineno}: print()"
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]


def loose_ends(module: Module) -> list[str]:
    """TODO without an issue number, and words that stand for one."""
    pattern = re.compile(r"\b(TODO(?!\(#\d+\))|FIXME|XXX|HACK|breakpoint\(\)|pdb\.set_trace)")
    return [
        f"line {number}: {match[1]}"
        for number, line in enumerate(module.source.splitlines(), 1)
        if (match := pattern.search(line))
    ]


def too_long(module: Module) -> list[str]:
    """A file with more lines than a reader can hold."""
    count = len(module.source.splitlines())
    limit = LONG_LINE_LIMIT if module.name in LONG_FILES else LINE_LIMIT
    return [f"{count} lines, {limit} at most: look for its second subject"] if count > limit else []


Rule = Callable[[Module], list[str]]
RULES: list[Rule] = [
    wrong_directions,
    stray_uses_of_optim,
    wrong_doors,
    stray_communication,
    untyped_groups,
    second_declarations,
    private_reads,
    environment_reads,
    version_questions,
    stray_renames,
    names_of_state,
    comparisons_of_algorithms,
    awareness_of_tests,
    prints,
    loose_ends,
    too_long,
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_every_file_keeps_the_rule(rule: Rule):
    violations = [f"{module.path}, {violation}" for module in MODULES for violation in rule(module)]
    assert not violations, "\n".join([(rule.__doc__ or "").splitlines()[0], *violations])


@pytest.mark.parametrize(
    ("rule", "name", "source"),
    [
        (wrong_directions, "optim.muon", "def f():\n    from quintic.train import loop\n"),
        (wrong_directions, "optim.muon", "from ..model import gpt\n"),
        (wrong_directions, "optim.muon", "from quintic.grouping.assign import assign\n"),
        (wrong_directions, "optim.muon", "def f():\n    from quintic import param_groups\n"),
        (wrong_directions, "optim.muon", "import quintic\n"),
        (wrong_directions, "optim.checkpoint.loading", "from quintic.interchange import import_state\n"),
        (wrong_directions, "optim.undecided", "import importlib\nimportlib.import_module('quintic.grouping.assign')\n"),
        (wrong_directions, "grouping.registry", "from quintic.interchange import import_state\n"),
        (wrong_directions, "grouping.registry", "from quintic.train import loop\n"),
        (stray_uses_of_optim, "grouping.registry", "from quintic.optim.muon import Muon\n"),
        (stray_uses_of_optim, "grouping.assign", "def f():\n    from quintic.optim.state.state import copy_\n"),
        (wrong_directions, "kernels.loss.loss", "import quintic.optim.rules.update\n"),
        (wrong_directions, "data.loader", "from quintic.model.gpt import GPT\n"),
        (wrong_directions, "data.loader", "from quintic import Muon\n"),
        (wrong_directions, "model.gpt", "from quintic import optim\n"),
        (wrong_directions, "model.gpt", "import quintic\n"),
        (wrong_directions, "train.loop", "from quintic import cli\n"),
        (wrong_directions, "eval.score", "from quintic.train.loop import train\n"),
        (wrong_directions, "optim.muon", "from quintic.integrations import muon_for\n"),
        (wrong_directions, "train.loop", "from quintic.speedrun.stages import Track\n"),
        (wrong_directions, "integrations.titan", "from quintic.kernels import dispatch\n"),
        (wrong_doors, "optim.rules.update", "from quintic.optim.plan.bucket import Bucket\n"),
        (wrong_doors, "optim.state.state", "def f():\n    from quintic.optim.muon import Muon\n"),
        (wrong_doors, "optim.muon", "from quintic.optim.verify.verify import verify\n"),
        (wrong_doors, "kernels.launch", "from quintic.kernels.update.weights import flags_of\n"),
        (wrong_doors, "kernels.linear.fp8", "def f():\n    from quintic.kernels.loss import rows\n"),
        (stray_communication, "optim.plan", "import torch.distributed as dist\n"),
        (stray_communication, "optim.plan", "from torch import distributed\n"),
        (stray_communication, "optim.plan", "import torch\ntorch.distributed.barrier()\n"),
        (untyped_groups, "optim.plan.plan", "x = group['lr']\n"),
        (untyped_groups, "optim.step.runner", "x = self._groups[number]['lr']\n"),
        (second_declarations, "optim.state.state", "X = ('lr', 'comms', 'master', 'kernels')\n"),
        (second_declarations, "optim.muon", "def f():\n    return {'lr': 1, 'eps': 2, 'view': 3, 'betas': 4}\n"),
        (private_reads, "optim.clip", "x = optimizer._home\n"),
        (private_reads, "simulate.simulate", "optimizer._begin()\n"),
        (environment_reads, "optim.muon", "import os\nx = os.environ['X']\n"),
        (environment_reads, "train.loop", "from os import getenv\n"),
        (version_questions, "optim.muon", "import torch\nx = torch.__version__\n"),
        (version_questions, "optim.muon", "import importlib.metadata as m\nx = m.version('torch')\n"),
        (version_questions, "kernels.jit", "import importlib\nx = importlib.import_module('triton').__version__\n"),
        (version_questions, "optim.muon", "import torch\nx = hasattr(torch.optim, 'Muon')\n"),
        (version_questions, "train.loop", "import torch.distributed as dist\nx = getattr(dist, 'f', None) or dist.g\n"),
        (
            version_questions,
            "train.loop",
            "def f():\n    from torch.nn import attention\n    hasattr(attention, 'x')\n",
        ),
        (version_questions, "kernels.launch", "from quintic.kernels.jit import triton\nx = hasattr(triton, 'knobs')\n"),
        (version_questions, "optim.muon", "import torch\ns = torch.backends.cuda\nx = getattr(s, 'a', 1)\n"),
        (version_questions, "optim.muon", "from torch import bmm\nimport inspect\nx = inspect.signature(bmm)\n"),
        (version_questions, "optim.muon", "try:\n    from torch.optim import Muon\nexcept ImportError:\n    pass\n"),
        (stray_renames, "data.hub", "import os\nos.replace(a, b)\n"),
        (stray_renames, "data.hub", "partial.replace(path)\n"),
        (stray_renames, "train.runs", "partial.rename(path)\n"),
        (names_of_state, "optim.step.operands", "x = value['exp_avg']\n"),
        (names_of_state, "optim.step.operands", "x = state['step']\n"),
        (names_of_state, "optim.step.operands", "x = state[NEURON_MOMENT]\n"),
        (names_of_state, "commands.plan", "for key in ('momentum_buffer',): pass\n"),
        (comparisons_of_algorithms, "optim.step.runner", "x = bucket.algorithm == 'adamw'\n"),
        (comparisons_of_algorithms, "train.recipe", "x = group['algorithm'] != 'muon'\n"),
        (comparisons_of_algorithms, "optim.validate", "x = group['algorithm'] in ('muon', 'adamw')\n"),
        (awareness_of_tests, "optim.muon", "import sys\nif 'pytest' in sys.modules: pass\n"),
        (prints, "data.loader", "print('hello')\n"),
        (loose_ends, "cli", "# TODO: later\n"),
        (too_long, "cli", "\n" * (LINE_LIMIT + 1)),
        (too_long, "kernels.loss.loss", "\n" * (LINE_LIMIT + 1)),
        (too_long, "optim.muon", "\n" * (LONG_LINE_LIMIT + 1)),
        (too_long, "simulate.simulate", "\n" * (LINE_LIMIT + 1)),
    ],
)
def test_the_rule_finds_a_violation(rule: Rule, name: str, source: str):
    assert rule(Module(name, source))


@pytest.mark.parametrize(
    ("rule", "name", "source"),
    [
        (wrong_directions, "optim.muon", "from quintic.kernels import dispatch\nfrom . import update\n"),
        (wrong_directions, "optim.interchange", "import importlib\nimportlib.import_module('quintic.interchange')\n"),
        (wrong_directions, "simulate.table", "import quintic\n"),
        (stray_uses_of_optim, "grouping.registry", "from quintic.optim.layout.views import View\n"),
        (stray_uses_of_optim, "grouping.explain", "from quintic.optim.muon import Muon\n"),
        (wrong_directions, "data.loader", "from quintic.errors import QuinticError\nimport numpy\n"),
        (wrong_directions, "train.loop", "import quintic\nfrom quintic import Muon\nfrom quintic.eval import score\n"),
        (wrong_doors, "optim.plan.plan", "from quintic.optim.rules.update import apply_\n"),
        (wrong_doors, "optim.verify.verify", "from quintic.optim.muon import Muon\n"),
        (wrong_doors, "train.loop", "from quintic.optim.muon import Muon\n"),
        (wrong_doors, "kernels", "from quintic.kernels.attention.attention import attention\n"),
        (wrong_doors, "kernels.loss.chunks", "from quintic.kernels import launch\nimport quintic.kernels.linear.fp8\n"),
        (stray_communication, "optim.comms.collectives", "import torch.distributed\n"),
        (stray_communication, "optim.layout", "from torch.distributed.tensor import DTensor\n"),
        (stray_communication, "train.loop", "import torch.distributed\n"),
        (untyped_groups, "optim.muon", "x = group['lr']\n"),
        (untyped_groups, "optim.step.runner", "x = state['step']\n"),
        (second_declarations, "optim.groups.options", "X = ('lr', 'comms', 'master', 'kernels')\n"),
        (second_declarations, "optim.groups.ties", "X = ('comms', 'process_group', 'step_every')\n"),
        (private_reads, "optim.muon", "x = optimizer._home\n"),
        (private_reads, "optim.clip", "x = optimizer._plans\n"),
        (environment_reads, "kernels.dispatch", "import os\nx = os.environ['X']\n"),
        (version_questions, "versions", "import torch\nx = torch.__version__\n"),
        (version_questions, "cli", "import quintic\nx = quintic.__version__\n"),
        (version_questions, "optim.muon", "import torch\nx = torch.version.hip, getattr(torch, name)\n"),
        (
            version_questions,
            "optim.muon",
            "import torch\np = torch.zeros(1)\nx = getattr(p, 'a', 1), hasattr(p, 'b')\n",
        ),
        (stray_renames, "durable", "import os\nos.replace(a, b)\n"),
        (stray_renames, "data.hub", "text.replace('a', 'b')\nreplace(a, b)\n"),
        (names_of_state, "optim.rules.table", "x = 'exp_avg', NEURON_MOMENT\n"),
        (names_of_state, "interchange.importing", "x = state[NEURON_MOMENT]\n"),
        (names_of_state, "optim.step.operands", "x = state[STEP], group['master'], state['own']\n"),
        (comparisons_of_algorithms, "optim.rules.table", "x = algorithm == 'muon'\n"),
        (comparisons_of_algorithms, "optim.muon", "x = old.algorithm == new.algorithm\n"),
        (prints, "cli", "print('hello')\n"),
        (loose_ends, "cli", "# TODO(#12): later\n"),
        (too_long, "cli", "\n" * LINE_LIMIT),
        (too_long, "optim.muon", "\n" * LONG_LINE_LIMIT),
    ],
)
def test_the_rule_leaves_good_code_alone(rule: Rule, name: str, source: str):
    assert rule(Module(name, source)) == []


# ------------------------------------------------------------------------------------- the house


def edges_of(modules: list[Module]) -> dict[str, set[str]]:
    """For each module of quintic the ones it imports, also inside functions and for types alone."""
    names = {module.name for module in modules}
    edges: dict[str, set[str]] = {module.name: set() for module in modules}
    for module in modules:
        for _, full in imports(module):
            name = full.removeprefix("quintic.")
            if is_in(full, "quintic") and full != "quintic":
                target = name if name in names else name.rpartition(".")[0]
                if target in names and target != module.name:
                    edges[module.name].add(target)
    return edges


def circles(edges: dict[str, set[str]]) -> list[list[str]]:
    """Groups of modules that import each other: those that reach each other, by depth-first search from each."""

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        waiting = [start]
        while waiting:
            for name in edges[waiting.pop()] - seen:
                seen.add(name)
                waiting.append(name)
        return seen

    reach = {name: reached(name) for name in edges}
    inside = [name for name in edges if name in reach[name]]
    return [list(group) for group in {tuple(n for n in inside if n in reach[m] and m in reach[n]) for m in inside}]


def test_no_files_import_each_other():
    assert circles(edges_of(MODULES)) == []


def test_circles_are_found():
    sources = {
        "a": "from quintic import b\n",
        "b": "def f():\n    from quintic.c import x\n",
        "c": "import quintic.a\n",
    }
    modules = [Module(name, source) for name, source in sources.items()]
    assert [sorted(circle) for circle in circles(edges_of(modules))] == [["a", "b", "c"]]
    assert circles(edges_of(modules[:2])) == []


def helpers(modules: list[Module]) -> dict[str, list[str]]:
    """Return {package.name: paths} of the functions of modules whose name has a body in several files of a package."""
    places: dict[str, set[str]] = {}
    for module in modules:
        for node in module.tree.body:
            if isinstance(node, ast.FunctionDef) and node.name != "_":
                places.setdefault(f"{module.part}.{node.name}", set()).add(module.path)
    return {name: sorted(paths) for name, paths in places.items() if len(paths) > 1}


def test_no_helper_has_two_bodies_in_one_package():
    found = helpers(MODULES)
    assert set(found) == HELPERS_WITH_TWO_BODIES, found


def test_helpers_with_two_bodies_are_found():
    source = "def f(): ...\n"
    modules = [Module("optim.a", source), Module("optim.step.b", source), Module("data.c", source)]
    assert helpers(modules) == {"optim.f": ["quintic/optim/a.py", "quintic/optim/step/b.py"]}


def test_no_two_classes_have_one_name():
    places: dict[str, list[str]] = {}
    for module in MODULES:
        for node in module.tree.body:
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(module.path)
    assert {name: paths for name, paths in places.items() if len(paths) > 1} == {}


def test_folders_have_few_files():
    roots = [PACKAGE, REPOSITORY / "benchmarks"]
    folders = Counter(path.parent for root in roots for path in root.rglob("*.py"))
    assert len(folders) > 15
    assert {str(folder): count for folder, count in folders.items() if count > FILES_OF_A_FOLDER} == {}


def test_benchmarks_are_short():
    lengths = {path: len(path.read_text("utf-8").splitlines()) for path in (REPOSITORY / "benchmarks").rglob("*.py")}
    assert {str(path): length for path, length in lengths.items() if length > LINE_LIMIT} == {}


# -------------------------------------------------------------------------------- import quintic


def test_import_quintic_loads_nothing_heavy_and_nothing_of_the_harness():
    # Compared with torch alone: what torch itself loads is not ours to forbid.
    code = (
        "import sys, torch; before = set(sys.modules); from quintic import *; import quintic; "
        "[getattr(quintic, name) for name in dir(quintic)]; print(*(set(sys.modules) - before))"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = answer.stdout.split()
    assert {"quintic", "quintic.optim.muon", "quintic.optim.verify.verify"} <= set(loaded)
    unwanted = [name for name in loaded if any(is_in(name, package) for package in [*HEAVY, *HARNESS])]
    assert unwanted == []


def module_level(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements that run on import; `if TYPE_CHECKING:` does not."""
    for statement in body:
        yield statement
        if isinstance(statement, ast.If):
            if "TYPE_CHECKING" not in ast.unparse(statement.test):
                yield from module_level(statement.body)
            yield from module_level(statement.orelse)
        elif isinstance(statement, ast.Try):
            for block in (statement.body, statement.orelse, statement.finalbody):
                yield from module_level(block)
            for handler in statement.handlers:
                yield from module_level(handler.body)
        elif isinstance(statement, ast.With | ast.ClassDef):
            yield from module_level(statement.body)


def reachable() -> set[str]:
    """The modules of quintic that its public names are imported with, by following module-level imports."""
    by_name = {module.name: module for module in MODULES}
    seen: set[str] = set()
    waiting = ["", *sorted(edges_of(MODULES)[""])]  # the package itself imports them for type checkers, else later
    while waiting:
        name = waiting.pop()
        if name in seen or name not in by_name:
            continue
        seen.add(name)
        for statement in module_level(by_name[name].tree.body):
            for full in names_of(statement, by_name[name]):
                if is_in(full, "quintic"):
                    parts = full.split(".")[1:]
                    waiting += [".".join(parts[:length]) for length in range(len(parts) + 1)]
    return seen


def test_nothing_heavy_is_imported_at_module_level_within_reach_of_import_quintic():
    # Catches what the test above cannot see: an import guarded by `if torch.cuda.is_available()`.
    within = reachable()
    assert {"optim.muon", "optim.verify.verify", "kernels.dispatch"} <= within
    found = [
        f"quintic.{module.name}: {name}"
        for module in MODULES
        if module.name in within
        for statement in module_level(module.tree.body)
        for name in names_of(statement, module)
        if any(is_in(name, package) for package in HEAVY)
    ]
    assert found == []


def test_public_names_exist_and_are_sorted():
    missing = [name for name in quintic.__all__ if not hasattr(quintic, name)]
    assert missing == []
    assert quintic.__all__ == sorted(quintic.__all__)
    assert len(quintic.__all__) == len(set(quintic.__all__))

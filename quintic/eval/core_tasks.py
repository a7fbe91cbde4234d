"""The in-context tasks of the CORE metric of DCLM (arXiv 2406.11794): `CORE_TASKS`, and `load_core` to read a folder.

A folder has one of two layouts:

- nanochat's `eval_bundle`: `core.yaml` with the tasks, `eval_data/` with their files, `eval_meta_data.csv` with the
  accuracies of guessing;
- JSONL files named as in `CORE_TASKS` (`arc_easy.jsonl`, ...), which also has their shots, delimiters and accuracies of
  guessing. Tasks without a file are left out, and listed in `CoreSuite.missing`.

A file has one item per line, a JSON object with fields by the kind of its task:

    multiple_choice      query: text; choices: list of texts; gold: number of the right one, from 0
    schema               context_options: list of texts; continuation: text; gold: number of the right context
    language_modeling    context: text; continuation: text
"""

import csv
import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from quintic.errors import DataError

__all__ = ["CORE_TASKS", "CoreSuite", "CoreTask", "load_core"]

TaskKind = Literal["multiple_choice", "schema", "language_modeling"]
Item = Mapping[str, Any]

_KINDS: dict[str, TaskKind] = {kind: kind for kind in get_args(TaskKind)}
# Draws the items to ask if a task has more than requested; the seed of nanochat, for the same choice.
_SHUFFLE_SEED = 1337


@dataclass(frozen=True, kw_only=True)
class CoreTask:
    """A task, and the form of its questions.

    Attributes:
        label: name of the task.
        file: path of its file within the data folder.
        kind: form of its items, see this module's docstring.
        num_shots: number of solved examples before the item that is asked.
        baseline: accuracy of guessing, at least 0 and below 1; accuracies are centred on it.
        delimiter: text between a question and its answer.
    """

    label: str
    file: str
    kind: TaskKind
    num_shots: int
    baseline: float
    delimiter: str = " "


def _task(label: str, kind: TaskKind, shots: int, percent: float, file: str = "", delimiter: str = " ") -> CoreTask:
    return CoreTask(
        label=label,
        file=f"{file or label}.jsonl",
        kind=kind,
        num_shots=shots,
        baseline=percent / 100,
        delimiter=delimiter,
    )


_ANSWER = "\nAnswer: "

# From DCLM's repository: eval/heavy.yaml, eval/eval_meta_data_v1.csv. Baselines are not always one over the number of
# choices.
CORE_TASKS = (
    _task("hellaswag_zeroshot", "multiple_choice", 0, 25, file="hellaswag"),
    _task("jeopardy", "language_modeling", 10, 0, file="jeopardy_all", delimiter=_ANSWER),
    _task("bigbench_qa_wikidata", "language_modeling", 10, 0),
    _task("arc_easy", "multiple_choice", 10, 25, delimiter=_ANSWER),
    _task("arc_challenge", "multiple_choice", 10, 25, delimiter=_ANSWER),
    _task("copa", "multiple_choice", 0, 50),
    _task("commonsense_qa", "multiple_choice", 10, 20),
    _task("piqa", "multiple_choice", 10, 50, delimiter=_ANSWER),
    _task("openbook_qa", "multiple_choice", 0, 25),
    _task("lambada_openai", "language_modeling", 0, 0),
    _task("hellaswag", "multiple_choice", 10, 25),
    _task("winograd", "schema", 0, 50, file="winograd_wsc"),
    _task("winogrande", "schema", 0, 50),
    _task("bigbench_dyck_languages", "language_modeling", 10, 0),
    _task("agi_eval_lsat_ar", "multiple_choice", 3, 20),
    _task("bigbench_cs_algorithms", "language_modeling", 10, 0),
    _task("bigbench_operators", "language_modeling", 10, 0),
    _task("bigbench_repeat_copy_logic", "language_modeling", 10, 0),
    _task("squad", "language_modeling", 10, 0),
    _task("coqa", "language_modeling", 0, 0),
    _task("boolq", "multiple_choice", 10, 62, delimiter=_ANSWER),
    _task("bigbench_language_identification", "multiple_choice", 10, 9.1),
)
"""The 22 tasks of CORE."""


@dataclass(frozen=True, kw_only=True)
class CoreSuite:
    """Tasks with their items.

    Attributes:
        tasks: tasks with a file, in the order of `CORE_TASKS`, or of a bundle's `core.yaml`.
        items: items of each task, in the order of its file.
        missing: labels of `CORE_TASKS` that are not among `tasks`.
    """

    tasks: tuple[CoreTask, ...]
    items: tuple[tuple[Item, ...], ...]
    missing: tuple[str, ...]

    def chosen(self, number: int, max_items: int | None) -> tuple[list[Item], int]:
        """Return the items of a task in the order in which they are asked, and the number of items to ask.

        If there are more than `max_items`, a fixed random choice is asked. Further items are returned only if the
        chosen ones are too few to serve as examples.
        """
        items = list(self.items[number])
        random.Random(_SHUFFLE_SEED).shuffle(items)
        asked = len(items) if max_items is None else min(max_items, len(items))
        return items[: max(asked, self.tasks[number].num_shots + 1)], asked


def load_core(folder: str | Path) -> CoreSuite:
    """Return the tasks in a folder of either layout, with their items.

    Raises:
        DataError: the folder holds no task, or a line of a file is not an item of its task; the message names the line.
    """
    folder = Path(folder)
    if (folder / "core.yaml").is_file():
        tasks, data = _bundle_tasks(folder), folder / "eval_data"
    else:
        tasks, data = CORE_TASKS, folder
    # A folder may hold some of the tasks only.
    tasks = tuple(task for task in tasks if (data / task.file).is_file())
    if not tasks:
        raise DataError(
            f"{folder}: holds no task of CORE; give a folder with files such as {CORE_TASKS[3].file}, or nanochat's "
            "eval_bundle with core.yaml and eval_data"
        )
    present = {task.label for task in tasks}
    return CoreSuite(
        tasks=tasks,
        items=tuple(_items(data / task.file, task) for task in tasks),
        missing=tuple(task.label for task in CORE_TASKS if task.label not in present),
    )


def _bundle_tasks(folder: Path) -> tuple[CoreTask, ...]:
    import yaml

    described, table = folder / "core.yaml", folder / "eval_meta_data.csv"
    try:
        with table.open(encoding="utf-8", newline="") as file:
            baselines = {row["Eval Task"]: float(row["Random baseline"]) / 100 for row in csv.DictReader(file)}
        tasks = []
        for entry in yaml.safe_load(described.read_text(encoding="utf-8"))["icl_tasks"]:
            (shots,) = entry["num_fewshot"]
            tasks.append(
                CoreTask(
                    label=entry["label"],
                    file=entry["dataset_uri"],
                    kind=_KINDS[entry["icl_task_type"]],
                    num_shots=int(shots),
                    baseline=baselines[entry["label"]],
                    delimiter=entry.get("continuation_delimiter", " "),
                )
            )
    except (OSError, KeyError, TypeError, ValueError, yaml.YAMLError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise DataError(
            f"{folder}: core.yaml and eval_meta_data.csv are not those of an eval_bundle ({reason})"
        ) from None
    return tuple(tasks)


def _items(path: Path, task: CoreTask) -> tuple[Item, ...]:
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read ({error})") from None
    items = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            item = json.loads(line)
            # Fails for lone surrogates, which JSON can contain but UTF-8 cannot.
            json.dumps(item, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise DataError(f"{path}, line {number}: a character is half of a pair (a surrogate); remove it") from None
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path}, line {number}: not JSON ({error}); remove the line") from None
        if (wrong := _wrong(item, task.kind)) is not None:
            raise DataError(f"{path}, line {number}: {wrong}; correct the line, or remove it")
        items.append(item)
    if len(items) <= task.num_shots:
        raise DataError(f"{path}: {len(items)} items; {task.label} needs more than its {task.num_shots} examples")
    return tuple(items)


def _wrong(item: Any, kind: TaskKind) -> str | None:
    """Return a description of the first mistake in an item; None for a valid item."""
    if not isinstance(item, dict):
        return "not a JSON object"
    texts, choices = {
        "multiple_choice": (["query"], "choices"),
        "schema": (["continuation"], "context_options"),
        "language_modeling": (["context", "continuation"], None),
    }[kind]
    for name in texts:
        if not isinstance(item.get(name), str):
            return f'"{name}" is not a text'
    if kind != "multiple_choice" and not item["continuation"].strip():
        return '"continuation" is empty'
    if choices is not None:
        options, gold = item.get(choices), item.get("gold")
        if not (isinstance(options, list) and len(options) > 1 and all(isinstance(text, str) for text in options)):
            return f'"{choices}" is not a list of texts'
        if not (type(gold) is int and 0 <= gold < len(options)):
            return f'"gold" is not the number of one of the {len(options)} in "{choices}"'
    return None

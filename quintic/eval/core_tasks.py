"""The in-context tasks of the CORE metric of DCLM (arXiv 2406.11794): `CORE_TASKS`, and `load_core` to read a folder.

A folder has one of two layouts:

- nanochat's `eval_bundle`: `core.yaml` with the tasks, `eval_data/` with their files, `eval_meta_data.csv` with the
  accuracies of guessing;
- JSONL files named as in `CORE_TASKS` (`arc_easy.jsonl`, ...), which also has their shots, delimiters and accuracies of
  guessing. Tasks without a file are left out.

A file has one item per line, a JSON object with the fields that `_FORMS` has for the kind of its task.
"""

import csv
import json
import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from quintic.errors import DataError

__all__ = ["CORE_TASKS", "CoreTask", "load_core"]

TaskKind = Literal["multiple_choice", "schema", "language_modeling"]
Item = Mapping[str, Any]

# Draws the items to ask if a task has more than requested; the seed of nanochat, for the same choice.
_SHUFFLE_SEED = 1337

# The fields of an item, for users.
_FORMS = {
    "multiple_choice": '"query", a text; "choices", a list of texts; and "gold", the number of the right one, from 0',
    "schema": '"context_options", a list of texts; "gold", the number of the right one, from 0; "continuation", a text',
    "language_modeling": '"context", a text; and "continuation", a text that is not empty',
}


@dataclass(frozen=True)
class CoreTask:
    """A task, the form of its questions, and its items."""

    label: str
    file: str  # path within the data folder
    kind: TaskKind
    num_shots: int  # solved examples before the item that is asked
    baseline: float  # accuracy of guessing, at least 0 and below 1; accuracies are centred on it
    delimiter: str = " "  # text between a question and its answer
    items: tuple[Item, ...] = field(default=(), repr=False)  # in the order of the file

    def chosen(self, max_items: int | None) -> tuple[list[Item], int]:
        """Return the items in the order in which they are asked, and the number of items to ask.

        If there are more than `max_items`, a fixed random choice is asked. Further items are returned only if the
        chosen ones are too few to serve as examples.
        """
        items = list(self.items)
        random.Random(_SHUFFLE_SEED).shuffle(items)
        asked = len(items) if max_items is None else min(max_items, len(items))
        return items[: max(asked, self.num_shots + 1)], asked


_ANSWER = "\nAnswer: "

# From DCLM's repository: eval/heavy.yaml, eval/eval_meta_data_v1.csv. Baselines are not always one over the number of
# choices.
CORE_TASKS = (
    CoreTask("hellaswag_zeroshot", "hellaswag.jsonl", "multiple_choice", 0, 0.25),
    CoreTask("jeopardy", "jeopardy_all.jsonl", "language_modeling", 10, 0, _ANSWER),
    CoreTask("bigbench_qa_wikidata", "bigbench_qa_wikidata.jsonl", "language_modeling", 10, 0),
    CoreTask("arc_easy", "arc_easy.jsonl", "multiple_choice", 10, 0.25, _ANSWER),
    CoreTask("arc_challenge", "arc_challenge.jsonl", "multiple_choice", 10, 0.25, _ANSWER),
    CoreTask("copa", "copa.jsonl", "multiple_choice", 0, 0.5),
    CoreTask("commonsense_qa", "commonsense_qa.jsonl", "multiple_choice", 10, 0.2),
    CoreTask("piqa", "piqa.jsonl", "multiple_choice", 10, 0.5, _ANSWER),
    CoreTask("openbook_qa", "openbook_qa.jsonl", "multiple_choice", 0, 0.25),
    CoreTask("lambada_openai", "lambada_openai.jsonl", "language_modeling", 0, 0),
    CoreTask("hellaswag", "hellaswag.jsonl", "multiple_choice", 10, 0.25),
    CoreTask("winograd", "winograd_wsc.jsonl", "schema", 0, 0.5),
    CoreTask("winogrande", "winogrande.jsonl", "schema", 0, 0.5),
    CoreTask("bigbench_dyck_languages", "bigbench_dyck_languages.jsonl", "language_modeling", 10, 0),
    CoreTask("agi_eval_lsat_ar", "agi_eval_lsat_ar.jsonl", "multiple_choice", 3, 0.2),
    CoreTask("bigbench_cs_algorithms", "bigbench_cs_algorithms.jsonl", "language_modeling", 10, 0),
    CoreTask("bigbench_operators", "bigbench_operators.jsonl", "language_modeling", 10, 0),
    CoreTask("bigbench_repeat_copy_logic", "bigbench_repeat_copy_logic.jsonl", "language_modeling", 10, 0),
    CoreTask("squad", "squad.jsonl", "language_modeling", 10, 0),
    CoreTask("coqa", "coqa.jsonl", "language_modeling", 0, 0),
    CoreTask("boolq", "boolq.jsonl", "multiple_choice", 10, 0.62, _ANSWER),
    CoreTask(
        "bigbench_language_identification", "bigbench_language_identification.jsonl", "multiple_choice", 10, 0.091
    ),
)
"""The 22 tasks of CORE."""


def load_core(folder: str | Path) -> tuple[CoreTask, ...]:
    """Return the tasks in a folder of either layout, in the order of `CORE_TASKS`, or of a bundle's `core.yaml`.

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
            f"{folder}: holds no task of CORE; give a folder with files such as arc_easy.jsonl, or nanochat's "
            "eval_bundle with core.yaml and eval_data"
        )
    return tuple(replace(task, items=_items(data / task.file, task)) for task in tasks)


def _bundle_tasks(folder: Path) -> tuple[CoreTask, ...]:
    import yaml

    try:
        with (folder / "eval_meta_data.csv").open(encoding="utf-8", newline="") as file:
            baselines = {row["Eval Task"]: float(row["Random baseline"]) / 100 for row in csv.DictReader(file)}
        tasks = [
            CoreTask(
                label=entry["label"],
                file=entry["dataset_uri"],
                kind=entry["icl_task_type"],
                num_shots=int(entry["num_fewshot"][0]),
                baseline=baselines[entry["label"]],
                delimiter=entry.get("continuation_delimiter", " "),
            )
            for entry in yaml.safe_load((folder / "core.yaml").read_text(encoding="utf-8"))["icl_tasks"]
        ]
        if unknown := {task.kind for task in tasks} - set(_FORMS):
            raise ValueError(f"unknown icl_task_type {', '.join(unknown)}")
    except (OSError, LookupError, TypeError, ValueError, yaml.YAMLError) as error:
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
            json.dumps(item, ensure_ascii=False).encode()  # half a surrogate pair cannot be tokenized
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path}, line {number}: not JSON ({error}); remove the line") from None
        if not _is_item(item, task.kind):
            raise DataError(
                f"{path}, line {number}: not an item of a {task.kind} task, which has {_FORMS[task.kind]}; correct the "
                "line, or remove it"
            )
        items.append(item)
    if len(items) <= task.num_shots:
        raise DataError(f"{path}: {len(items)} items; {task.label} needs more than its {task.num_shots} examples")
    return tuple(items)


def _is_item(item: Any, kind: TaskKind) -> bool:
    """Return whether a line has the fields of `_FORMS`."""
    if not isinstance(item, dict):
        return False
    if kind == "language_modeling":
        texts = [item.get("context"), item.get("continuation")]
    else:
        other, options = ("query", "choices") if kind == "multiple_choice" else ("continuation", "context_options")
        choices, gold = item.get(options), item.get("gold")
        # A truth value would pass as the number 0 or 1.
        if not isinstance(choices, list) or len(choices) < 2 or type(gold) is not int or not 0 <= gold < len(choices):
            return False
        texts = [item.get(other), *choices]
    is_empty = kind != "multiple_choice" and not str(item.get("continuation")).strip()
    return all(isinstance(text, str) for text in texts) and not is_empty

"""An item of a CORE task as tokens, with the place of its answer: the rules of nanochat's `core_eval`."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from quintic.data.tokenizer import Tokenizer
from quintic.eval.core_tasks import CoreTask, Item

__all__ = ["Candidate", "candidates", "num_candidates", "prompts"]

# Plus the number of an item: the seed that draws its examples.
_SHOT_SEED = 1234


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A question with a possible answer behind it.

    Attributes:
        tokens: all of it, `bos_id` first.
        start: first token of the answer, at least 1; the answer goes to the end.
        cropped: whether the beginning was cut off to fit the model.
    """

    tokens: list[int]
    start: int
    cropped: bool


def num_candidates(item: Item) -> int:
    """Return the number of an item's candidates, without making them."""
    return len(item.get("choices") or item.get("context_options") or [""])


def prompts(task: CoreTask, items: Sequence[Item], index: int) -> list[str]:
    """Return the texts that are compared for item `index`, examples first.

    One for each choice or context; for language modelling two, of which the first ends before the answer.
    """
    item = items[index]
    others = [other for other in range(len(items)) if other != index]
    shots = random.Random(_SHOT_SEED + index).sample(others, task.num_shots)
    examples = "".join(_solved(task, items[shot]) + "\n\n" for shot in shots)
    if task.kind == "multiple_choice":
        return [f"{examples}{item['query']}{task.delimiter}{choice}" for choice in item["choices"]]
    if task.kind == "schema":
        return [f"{examples}{context}{task.delimiter}{item['continuation']}" for context in item["context_options"]]
    question = f"{examples}{item['context'].strip()}{task.delimiter}"
    # Without the space at its end, which belongs to the first token of the answer.
    return [question.strip(), question + item["continuation"]]


def candidates(
    task: CoreTask, items: Sequence[Item], index: int, tokenizer: Tokenizer, *, max_tokens: int
) -> list[Candidate]:
    """Return the candidates of item `index`, one for language modelling.

    The answer is, for multiple choice, everything behind the tokens with which all choices begin; for a schema,
    everything with which all of them end; for language modelling, the tokens behind the question's. It has at least one
    token. A candidate with more than `max_tokens` tokens loses the oldest, but keeps `bos_id`.
    """
    rows = [[tokenizer.bos_id, *ids] for ids in tokenizer.encode_batch(prompts(task, items, index))]
    if task.kind == "schema":
        common = _common([row[::-1] for row in rows])
        starts = [len(row) - common for row in rows]
    else:
        common = _common(rows)
        starts = [common] * len(rows)
    if task.kind == "language_modeling":
        rows, starts = rows[1:], starts[1:]
    made = []
    for row, start in zip(rows, starts, strict=True):
        surplus = max(0, len(row) - max_tokens)
        start = min(max(start, 1), len(row) - 1)
        if surplus:
            row, start = [row[0], *row[surplus + 1 :]], max(start - surplus, 1)
        made.append(Candidate(tokens=row, start=start, cropped=surplus > 0))
    return made


def _solved(task: CoreTask, item: Item) -> str:
    if task.kind == "multiple_choice":
        return f"{item['query']}{task.delimiter}{item['choices'][item['gold']]}"
    if task.kind == "schema":
        return f"{item['context_options'][item['gold']]}{task.delimiter}{item['continuation']}"
    return f"{item['context'].strip()}{task.delimiter}{item['continuation']}"


def _common(rows: Sequence[Sequence[int]]) -> int:
    """Length of the longest common beginning."""
    for length, column in enumerate(zip(*rows, strict=False)):
        if len(set(column)) > 1:
            return length
    return min(map(len, rows))

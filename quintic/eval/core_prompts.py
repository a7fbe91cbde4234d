"""Turns an item of a CORE task into tokens, with the position of its answer, by the rules of nanochat's `core_eval`."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from quintic.data.tokenizer import Tokenizer
from quintic.eval.core_tasks import CoreTask, Item

__all__ = ["Candidate", "candidates", "num_candidates", "prompts"]

# The seed for the examples of an item is this number plus the item's index.
_SHOT_SEED = 1234


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A question followed by a possible answer.

    Attributes:
        tokens: all tokens, `bos_id` first.
        start: index of the answer's first token, at least 1; the answer extends to the end.
        cropped: whether tokens at the beginning were dropped to fit the model.
    """

    tokens: list[int]
    start: int
    cropped: bool


def num_candidates(item: Item) -> int:
    """Return the number of candidates of an item, without making them."""
    return len(item.get("choices") or item.get("context_options") or [""])


def prompts(task: CoreTask, items: Sequence[Item], index: int) -> list[str]:
    """Return the texts to compare for item `index`, each beginning with the examples.

    There is one text for each choice or context. For language modelling there are two, the question alone and the
    question with its answer.
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
    # The question without its last space, which belongs to the first token of the answer.
    return [question.strip(), question + item["continuation"]]


def candidates(
    task: CoreTask, items: Sequence[Item], index: int, tokenizer: Tokenizer, *, max_tokens: int
) -> list[Candidate]:
    """Return the candidates of item `index`; a single one for language modelling.

    The answer consists of the tokens after the common beginning of all candidates (multiple choice), of the common end
    of all candidates (schema), or of the tokens after the question (language modelling), and of at least one token. A
    candidate with more than `max_tokens` tokens loses tokens at the beginning, but keeps `bos_id`.
    """
    rows = [[tokenizer.bos_id, *ids] for ids in tokenizer.encode_batch(prompts(task, items, index))]
    if task.kind == "schema":
        # The common end: the reversed rows' common beginning.
        common = _common([row[::-1] for row in rows])
        starts = [len(row) - common for row in rows]
    else:
        common = _common(rows)
        starts = [common] * len(rows)
    if task.kind == "language_modeling":
        rows, starts = rows[1:], starts[1:]
    made = []
    for row, start in zip(rows, starts, strict=True):
        # At least one token of answer, and one of context before it.
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
    """Return the length of the longest common beginning."""
    for length, column in enumerate(zip(*rows, strict=False)):
        if len(set(column)) > 1:
            return length
    return min(map(len, rows))

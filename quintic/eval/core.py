"""CORE: the mean centred accuracy of a model in in-context tasks (DCLM, arXiv 2406.11794).

In multiple-choice and schema tasks the model's answer is the candidate with the lowest mean loss per token. In language
modelling every token of the answer must be the likeliest one. The accuracy a of a task is centred, (a - b) / (1 - b),
with the accuracy b of guessing; CORE is the mean over the tasks. Prompts follow the rules of nanochat's `core_eval`.

Phases: `prompts` makes the texts of an item, `candidates` turns them into tokens, `answers` asks the model, `core_sums`
counts right answers, and `core_score` turns counts into a `CoreScore`. Ranks that were given different items add up
their counts before the last of these.
"""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from quintic.data.tokenizer import Tokenizer
from quintic.eval.core_tasks import CORE_TASKS, CoreTask, Item

__all__ = ["CoreScore", "TaskScore", "core_lines", "core_score", "core_sums"]

# The seed for the examples of an item is this number plus the item's index.
_SHOT_SEED = 1234


class Candidate(NamedTuple):
    """A question followed by a possible answer."""

    tokens: list[int]  # `bos_id` first
    start: int  # index of the answer's first token, at least 1; the answer extends to the end
    cropped: bool  # whether tokens at the beginning were dropped to fit the model


class ItemAnswer(NamedTuple):
    """A model's answer to an item."""

    choice: int  # index of the candidate with the lowest loss; 0 for language modelling
    correct: bool
    cropped: bool  # whether a candidate was cropped to fit the model


@dataclass(frozen=True, kw_only=True)
class TaskScore:
    """The result of a task."""

    label: str
    accuracy: float  # fraction of right answers
    centred: float  # centred accuracy, 0 for guessing and 1 for no mistake
    stderr: float | None  # standard error of `centred` over items; None for a single item
    num_items: int
    num_cropped: int  # items with a cropped candidate


@dataclass(frozen=True)
class CoreScore:
    """The result of all tasks."""

    tasks: tuple[TaskScore, ...]  # tasks in the folder

    @property
    def missing(self) -> tuple[str, ...]:
        """Labels of the tasks of CORE that are not in the folder."""
        present = {task.label for task in self.tasks}
        return tuple(task.label for task in CORE_TASKS if task.label not in present)

    @property
    def core(self) -> float:
        """Mean of the centred accuracies."""
        return math.fsum(task.centred for task in self.tasks) / len(self.tasks)

    @property
    def stderr(self) -> float | None:
        """Standard error of `core` over items; None if it is unknown.

        It is unknown if a task has a single item, or if in every task all answers are right or all are wrong.
        """
        errors = [task.stderr for task in self.tasks if task.stderr is not None]
        if len(errors) < len(self.tasks) or not any(errors):
            return None
        return math.sqrt(math.fsum(error**2 for error in errors)) / len(self.tasks)

    @property
    def name(self) -> str:
        """Title of the mean: "CORE" if no task is missing, else a title with the number of tasks."""
        return "CORE" if not self.missing else f"mean over {len(self.tasks)} of the {len(CORE_TASKS)} tasks of CORE"


def core_sums(
    model: Callable[..., Tensor],
    tokenizer: Tokenizer,
    suite: Sequence[CoreTask],
    device: torch.device,
    *,
    max_tokens: int,
    max_items: int | None = 500,
    rows: int = 32,
    rank: int = 0,
    world_size: int = 1,
) -> Tensor:
    """Return the counts (right answers, items, cropped items) of each task on this rank: (tasks, 3) int64.

    The function does not communicate; the sum over all ranks is the result of a single process. Every rank calls the
    model equally often, as sharded models need.

    Args:
        model: called as `model(inputs, document_starts=..., positions=...)` for (N, vocab_size) logits.
        tokenizer: the model's tokenizer.
        suite: the tasks, from `load_core`.
        device: device of the model and of the result.
        max_tokens: length of the longest input, at least 2; longer ones lose their beginning. Usually `seq_len`.
        max_items: largest number of items per task; None for all items.
        rows: largest number of inputs per call of the model; all candidates of an item are in one call.
        rank: index of this process among the processes that divide the items.
        world_size: number of these processes.
    """
    sums = torch.zeros((len(suite), 3), dtype=torch.int64)
    for number, task in enumerate(suite):
        items, asked = task.chosen(max_items)
        batches = _batches(items[:asked], rows)
        # Batches go to the ranks in turn, a round at a time. A rank that has none left repeats another's, and drops the
        # answers, because all ranks must call the model equally often.
        for first in range(0, len(batches), world_size):
            is_own = first + rank < len(batches)
            batch = batches[first + rank if is_own else first]
            for answer in answers(model, tokenizer, task, items, batch, device, max_tokens=max_tokens):
                sums[number] += is_own * torch.tensor([answer.correct, 1, answer.cropped])
    return sums.to(device)


def core_score(suite: Sequence[CoreTask], sums: Tensor) -> CoreScore:
    """Return the score for the summed counts of all ranks, (tasks, 3) from `core_sums`."""
    results = []
    for task, (correct, num_items, num_cropped) in zip(suite, sums.tolist(), strict=True):
        accuracy = correct / num_items
        # Of a binomial fraction, scaled like the centred accuracy.
        error = math.sqrt(accuracy * (1 - accuracy) / num_items) / (1 - task.baseline)
        results.append(
            TaskScore(
                label=task.label,
                accuracy=accuracy,
                centred=(accuracy - task.baseline) / (1 - task.baseline),
                stderr=error if num_items > 1 else None,
                num_items=num_items,
                num_cropped=num_cropped,
            )
        )
    return CoreScore(tuple(results))


def core_lines(result: CoreScore) -> list[str]:
    """Return a result as lines of text for users: a row per task, the missing tasks, and CORE last."""
    lines = [f"{'task':<34}{'items':>6}{'accuracy':>10}{'centred':>9}"]
    lines += [
        f"{task.label:<34}{task.num_items:>6,}{task.accuracy:>10.4f}{task.centred:>9.4f}" for task in result.tasks
    ]
    if cropped := sum(task.num_cropped for task in result.tasks):
        total = sum(task.num_items for task in result.tasks)
        lines.append(f"longer than the model's rows, so that their beginning was lost: {cropped:,} of {total:,} items")
    if result.missing:
        lines.append(f"missing: {', '.join(result.missing)}")
    error = f"{result.stderr:.4f}" if result.stderr is not None else "unknown, as these items are too few to tell"
    lines.append(f"{result.name}: {result.core:.4f} (standard error over items {error})")
    return lines


def _batches(items: Sequence[Item], rows: int) -> list[list[int]]:
    """Return batches of indices of items with similar lengths, the same on every rank."""
    batches: list[list[int]] = []
    room = 0
    # Longest first, by the length of their text, so that the inputs of a batch need little padding.
    for index in sorted(range(len(items)), key=lambda index: -len(str(items[index]))):
        needed = len(items[index].get("choices") or items[index].get("context_options") or [""])
        if not batches or needed > room:
            batches.append([])
            room = rows
        batches[-1].append(index)
        room -= needed
    return batches


@torch.no_grad()
def answers(
    model: Callable[..., Tensor],
    tokenizer: Tokenizer,
    task: CoreTask,
    items: Sequence[Item],
    indices: Sequence[int],
    device: torch.device,
    *,
    max_tokens: int,
) -> list[ItemAnswer]:
    """Return the answers to some items of a task, by one call of the model; all items serve as examples for each other.

    See `core_sums` for the other arguments.
    """
    options = [candidates(task, items, index, tokenizer, max_tokens=max_tokens) for index in indices]
    asked = [candidate for of_item in options for candidate in of_item]
    length = max(len(candidate.tokens) for candidate in asked)
    inputs = torch.tensor([one.tokens + [tokenizer.bos_id] * (length - len(one.tokens)) for one in asked]).to(device)
    targets = torch.cat([torch.tensor(one.tokens[one.start :]) for one in asked]).to(device)
    # (first position of the flattened inputs whose logits predict the answer, number of tokens) for each candidate.
    spans = [(row * length + one.start - 1, len(one.tokens) - one.start) for row, one in enumerate(asked)]
    positions = torch.cat([torch.arange(first, first + count) for first, count in spans]).to(device)
    # One document per row. Padding is at the end, where causal attention hides it from the candidate's tokens.
    starts = torch.arange(0, inputs.numel() + 1, length, dtype=torch.int32, device=device)
    logits_NV = model(inputs, document_starts=starts, positions=positions)
    losses = F.cross_entropy(logits_NV.float(), targets, reduction="none").double().cpu()
    hits = (logits_NV.argmax(dim=-1) == targets).cpu()
    counts = [count for _, count in spans]
    # For each candidate: its mean loss, and whether all of its answer's tokens are the likeliest.
    results = iter(zip(losses.split(counts), hits.split(counts), strict=True))
    made = []
    for index, of_item in zip(indices, options, strict=True):
        own = [(float(loss.mean()), bool(hit.all())) for loss, hit in islice(results, len(of_item))]
        choice = min(range(len(own)), key=lambda number: own[number][0])
        correct = own[0][1] if task.kind == "language_modeling" else choice == items[index]["gold"]
        made.append(ItemAnswer(choice, correct, any(candidate.cropped for candidate in of_item)))
    return made


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
        starts = [_common(rows)] * len(rows)
    if task.kind == "language_modeling":
        rows, starts = rows[1:], starts[1:]
    made = []
    for row, start in zip(rows, starts, strict=True):
        # At least one token of answer, and one of context before it.
        surplus = max(0, len(row) - max_tokens)
        start = min(max(start, 1), len(row) - 1)
        if surplus:
            row, start = [row[0], *row[surplus + 1 :]], max(start - surplus, 1)
        made.append(Candidate(row, start, surplus > 0))
    return made


def _common(rows: Sequence[Sequence[int]]) -> int:
    """Return the length of the longest common beginning."""
    return len(list(takewhile(lambda column: len(set(column)) == 1, zip(*rows, strict=False))))


def prompts(task: CoreTask, items: Sequence[Item], index: int) -> list[str]:
    """Return the texts to compare for item `index`, each beginning with the examples.

    There is one text for each choice or context. For language modelling there are two, the question alone and the
    question with its answer.
    """
    others = [other for other in range(len(items)) if other != index]
    shots = random.Random(_SHOT_SEED + index).sample(others, task.num_shots)
    # For language modelling, the text with the answer is the second one.
    gold = [1 if task.kind == "language_modeling" else items[shot]["gold"] for shot in shots]
    solved = [_texts(task, items[shot])[number] for shot, number in zip(shots, gold, strict=True)]
    texts = ["\n\n".join([*solved, text]) for text in _texts(task, items[index])]
    if task.kind == "language_modeling":
        # The question without its last space, which belongs to the first token of the answer.
        texts[0] = texts[0].strip()
    return texts


def _texts(task: CoreTask, item: Item) -> list[str]:
    """Return the texts of `prompts` without examples."""
    if task.kind == "multiple_choice":
        return [f"{item['query']}{task.delimiter}{choice}" for choice in item["choices"]]
    if task.kind == "schema":
        return [f"{context}{task.delimiter}{item['continuation']}" for context in item["context_options"]]
    question = f"{item['context'].strip()}{task.delimiter}"
    return [question, question + item["continuation"]]

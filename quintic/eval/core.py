"""CORE: the mean centred accuracy of a model in in-context tasks (DCLM, arXiv 2406.11794).

In multiple-choice and schema tasks the model's answer is the candidate with the lowest mean loss per token. In language
modelling every token of the answer must be the likeliest one. The accuracy a of a task is centred, (a - b) / (1 - b),
with the accuracy b of guessing; CORE is the mean over the tasks.

`core_sums` counts right answers, `core_score` turns counts into a `CoreScore`. Ranks that were given different items
add up their counts in between.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from quintic.data.tokenizer import Tokenizer
from quintic.eval.core_prompts import Candidate, candidates, num_candidates
from quintic.eval.core_tasks import CORE_TASKS, CoreSuite, CoreTask, Item

__all__ = ["CoreScore", "ItemAnswer", "TaskScore", "answers", "core_lines", "core_score", "core_sums"]


@dataclass(frozen=True, kw_only=True)
class ItemAnswer:
    """A model's answer to an item.

    Attributes:
        index: index of the item.
        choice: index of the candidate with the lowest loss; 0 for language modelling.
        correct: whether the answer is right.
        cropped: whether a candidate was cropped to fit the model.
    """

    index: int
    choice: int
    correct: bool
    cropped: bool


@dataclass(frozen=True, kw_only=True)
class TaskScore:
    """The result of a task.

    Attributes:
        label: name of the task.
        accuracy: fraction of right answers.
        centred: centred accuracy, 0 for guessing and 1 for no mistake.
        stderr: standard error of `centred` over items; None for a single item.
        num_items: number of items asked.
        num_cropped: number of items with a cropped candidate.
    """

    label: str
    accuracy: float
    centred: float
    stderr: float | None
    num_items: int
    num_cropped: int


@dataclass(frozen=True, kw_only=True)
class CoreScore:
    """The result of all tasks.

    Attributes:
        tasks: results of the tasks in the folder.
        missing: labels of the tasks of CORE that are not in the folder.
    """

    tasks: tuple[TaskScore, ...]
    missing: tuple[str, ...]

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


@torch.no_grad()
def core_sums(
    model: Callable[..., Tensor],
    tokenizer: Tokenizer,
    suite: CoreSuite,
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
        suite: the tasks.
        device: device of the model and of the result.
        max_tokens: length of the longest input; longer ones lose their beginning. Usually the model's `seq_len`.
        max_items: largest number of items per task; None for all items.
        rows: largest number of inputs per call of the model; all candidates of an item are in one call.
        rank: index of this process among the processes that divide the items.
        world_size: number of these processes.

    Raises:
        ValueError: `max_tokens` is below 2, or `max_items` below 1.
    """
    if max_tokens < 2 or (max_items is not None and max_items < 1):
        raise ValueError(f"max_tokens={max_tokens}, max_items={max_items}: must be at least 2 and 1")
    sums = []
    for number, task in enumerate(suite.tasks):
        items, asked = suite.chosen(number, max_items)
        counts = [0, 0, 0]
        for answer in answers(
            model,
            tokenizer,
            task,
            items,
            device,
            asked=asked,
            max_tokens=max_tokens,
            rows=rows,
            rank=rank,
            world_size=world_size,
        ):
            counts = [count + added for count, added in zip(counts, (answer.correct, 1, answer.cropped), strict=True)]
        sums.append(counts)
    return torch.tensor(sums, device=device)


def core_score(suite: CoreSuite, sums: Tensor) -> CoreScore:
    """Return the score for the summed counts of all ranks, (tasks, 3) from `core_sums`."""
    results = []
    for task, (correct, num_items, num_cropped) in zip(suite.tasks, sums.tolist(), strict=True):
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
    return CoreScore(tasks=tuple(results), missing=suite.missing)


def core_lines(result: CoreScore) -> list[str]:
    """Return a result as lines of text for users: a row per task, the missing tasks, and CORE last."""
    lines = [f"{'task':<34}{'items':>6}{'accuracy':>10}{'centred':>9}"]
    lines += [
        f"{task.label:<34}{task.num_items:>6,}{task.accuracy:>10.4f}{task.centred:>9.4f}" for task in result.tasks
    ]
    if cropped := sum(task.num_cropped for task in result.tasks):
        total = sum(task.num_items for task in result.tasks)
        words = ("item is", "its") if total == 1 else ("items is", "its") if cropped == 1 else ("items are", "their")
        lines.append(f"{cropped:,} of {total:,} {words[0]} longer than the model's rows and lost {words[1]} beginning")
    if result.missing:
        lines.append(f"missing: {', '.join(result.missing)}")
    error = f"{result.stderr:.4f}" if result.stderr is not None else "unknown, as these items are too few to tell"
    lines.append(f"{result.name}: {result.core:.4f} (standard error over items {error})")
    return lines


@torch.no_grad()
def answers(
    model: Callable[..., Tensor],
    tokenizer: Tokenizer,
    task: CoreTask,
    items: Sequence[Item],
    device: torch.device,
    *,
    asked: int,
    max_tokens: int,
    rows: int = 32,
    rank: int = 0,
    world_size: int = 1,
) -> Iterator[ItemAnswer]:
    """Yield this rank's answers to the first `asked` items; items also serve as examples for each other.

    See `core_sums` for the other arguments.
    """
    # Batches go to the ranks in turn, a round at a time.
    batches = _batches(items[:asked], rows)
    for start in range(0, len(batches), world_size):
        # A rank without a batch of its own still calls the model, because all ranks must call it equally often.
        has_own = start + rank < len(batches)
        batch = batches[start + rank] if has_own else batches[start]
        options = [candidates(task, items, index, tokenizer, max_tokens=max_tokens) for index in batch]
        losses, likeliest = _ask(model, [one for some in options for one in some], tokenizer.bos_id, device)
        first = 0
        for index, some in zip(batch, options, strict=True) if has_own else ():
            mine = losses[first : first + len(some)]
            choice = mine.index(min(mine))
            if task.kind == "language_modeling":
                correct = likeliest[first]
            else:
                correct = choice == items[index]["gold"]
            first += len(some)
            yield ItemAnswer(index=index, choice=choice, correct=correct, cropped=any(one.cropped for one in some))


def _batches(items: Sequence[Item], rows: int) -> list[list[int]]:
    """Return batches of indices of items with similar lengths, the same on every rank."""
    batches: list[list[int]] = []
    room = 0
    # Longest first, by the length of their text, so that the inputs of a batch need little padding.
    for index in sorted(range(len(items)), key=lambda index: -len(str(items[index]))):
        needed = num_candidates(items[index])
        if not batches or needed > room:
            batches.append([])
            room = rows
        batches[-1].append(index)
        room -= needed
    return batches


def _ask(
    model: Callable[..., Tensor], asked: list[Candidate], bos_id: int, device: torch.device
) -> tuple[list[float], list[bool]]:
    """Return for each candidate the mean loss per token of its answer, and whether all its tokens are the likeliest."""
    length = max(len(one.tokens) for one in asked)
    inputs = torch.tensor([one.tokens + [bos_id] * (length - len(one.tokens)) for one in asked])
    targets = torch.cat([torch.tensor(one.tokens[one.start :]) for one in asked]).to(device)
    # (first position of the flattened inputs whose logits predict the answer, number of tokens) for each candidate.
    spans = [(row * length + one.start - 1, len(one.tokens) - one.start) for row, one in enumerate(asked)]
    positions = torch.cat([torch.arange(first, first + count) for first, count in spans]).to(device)
    # One document per row. Padding is at the end, where causal attention hides it from the candidate's tokens.
    starts = torch.arange(0, inputs.numel() + 1, length, dtype=torch.int32, device=device)
    inputs = inputs.to(device)
    logits_NV = model(inputs, document_starts=starts, positions=positions)
    losses = F.cross_entropy(logits_NV.float(), targets, reduction="none").double().cpu()
    hits = (logits_NV.argmax(dim=-1) == targets).cpu()
    counts = [count for _, count in spans]
    return [float(part.mean()) for part in losses.split(counts)], [bool(part.all()) for part in hits.split(counts)]

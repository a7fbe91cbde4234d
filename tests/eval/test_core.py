"""CORE: prompts by the letter, answers as transformers gives them one by one, and counts that add up over ranks."""

import json
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from module_cache import copy_modules_to
from test_generate import model_of

from quintic.data.dataset import Dataset
from quintic.errors import DataError
from quintic.eval.core import answers, candidates, core_lines, core_score, core_sums, prompts
from quintic.eval.core_tasks import CORE_TASKS, CoreTask, TaskKind, load_core
from quintic.model.gpt import GPT

CPU = torch.device("cpu")
WORDS = ["model", "weight", "step", "loss", "batch", "token", "epoch", "rows", "cache", "state", "gradient", "résumé"]


def words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choices(WORDS, k=count))


def task_of(kind: TaskKind, shots: int, *, delimiter: str = " ", baseline: float = 0.25) -> CoreTask:
    return CoreTask(label=kind, file="f", kind=kind, num_shots=shots, baseline=baseline, delimiter=delimiter)


def items_of(kind: TaskKind, count: int) -> list[dict[str, Any]]:
    rng = random.Random(3)
    made: list[dict[str, Any]] = []
    for number in range(count):
        # Choices of different lengths, some with a common beginning.
        texts = [words(rng, 1 + number % 3) + " " + words(rng, 1 + choice) for choice in range(2 + number % 3)]
        if number % 4 == 0:
            texts = [f"{texts[0]} {text}" for text in texts]
        gold = rng.randrange(len(texts))
        if kind == "multiple_choice":
            made.append({"query": words(rng, 5), "choices": texts, "gold": gold})
        elif kind == "schema":
            made.append({"context_options": texts, "continuation": words(rng, 4), "gold": gold})
        else:
            made.append({"context": f" {words(rng, 5)}\n", "continuation": words(rng, 2)})
    return made


def tiny_model(dataset: Dataset) -> GPT:
    return model_of("SL", vocab_size=dataset.vocab_size, bos_id=dataset.bos_id)


@pytest.fixture
def model(tiny_dataset: Dataset) -> GPT:
    return tiny_model(tiny_dataset)


# -- prompts ----------------------------------------------------------------------------------------------------------


def test_prompts_are_the_examples_and_the_question() -> None:
    questions = [{"query": f"Q{n}", "choices": [f"a{n}", f"b{n}"], "gold": n % 2} for n in range(4)]
    task = task_of("multiple_choice", 2, delimiter="\nAnswer: ")
    first, second = random.Random(1234 + 1).sample([0, 2, 3], 2)
    solved = [f"Q{n}\nAnswer: {'ab'[n % 2]}{n}\n\n" for n in (first, second)]
    assert prompts(task, questions, 1) == ["".join(solved) + f"Q1\nAnswer: {c}1" for c in "ab"]
    schemas = [{"context_options": [f"x{n}", f"y{n}"], "continuation": f"c{n}", "gold": 1} for n in range(2)]
    assert prompts(task_of("schema", 1), schemas, 0) == ["y1 c1\n\nx0 c0", "y1 c1\n\ny0 c0"]
    gaps = [{"context": f" g{n}\n", "continuation": f"c{n}"} for n in range(2)]
    assert prompts(task_of("language_modeling", 1), gaps, 0) == ["g1 c1\n\ng0", "g1 c1\n\ng0 c0"]
    assert prompts(task_of("language_modeling", 0, delimiter="\nAnswer: "), gaps, 1) == [
        "g1\nAnswer:",
        "g1\nAnswer: c1",
    ]


@pytest.mark.parametrize("kind", ["multiple_choice", "schema", "language_modeling"])
def test_candidates_are_tokens_with_an_answer_at_the_end(kind: TaskKind, tiny_dataset: Dataset) -> None:
    tokenizer, task, items = tiny_dataset.tokenizer, task_of(kind, 2), items_of(kind, 9)
    for index in range(9):
        found = candidates(task, items, index, tokenizer, max_tokens=10_000)
        texts = prompts(task, items, index)
        for candidate, text in zip(found, texts[1:] if kind == "language_modeling" else texts, strict=True):
            assert candidate.tokens == [tokenizer.bos_id, *tokenizer.encode(text)]
            assert not candidate.cropped
            assert 1 <= candidate.start < len(candidate.tokens)
        tails = [tokenizer.decode(candidate.tokens[candidate.start :]) for candidate in found]
        if kind == "schema":
            assert len({tuple(c.tokens[c.start :]) for c in found}) == 1
            assert tails[0].endswith(" " + items[index]["continuation"])
        elif kind == "multiple_choice":
            assert all(
                choice.endswith(tail.strip()) for choice, tail in zip(items[index]["choices"], tails, strict=True)
            )
            assert len({candidate.start for candidate in found}) == 1
        else:
            assert tails == [" " + items[index]["continuation"]]


def test_an_answer_has_a_token_where_choices_leave_none(tiny_dataset: Dataset) -> None:
    item = {"query": "step", "choices": ["loss", "loss batch", "loss"], "gold": 0}
    found = candidates(task_of("multiple_choice", 0), [item], 0, tiny_dataset.tokenizer, max_tokens=100)
    assert [len(c.tokens) - c.start for c in found][::2] == [1, 1]
    same = {"context_options": ["x", "x"], "continuation": "y", "gold": 0}
    for candidate in candidates(task_of("schema", 0), [same], 0, tiny_dataset.tokenizer, max_tokens=100):
        assert candidate.start == 1


@pytest.mark.parametrize("kind", ["multiple_choice", "schema", "language_modeling"])
def test_long_candidates_lose_their_beginning(kind: TaskKind, tiny_dataset: Dataset) -> None:
    task, items = task_of(kind, 2), items_of(kind, 5)
    whole = candidates(task, items, 0, tiny_dataset.tokenizer, max_tokens=10_000)
    for max_tokens in (2, 12, 40):
        for candidate, full in zip(
            candidates(task, items, 0, tiny_dataset.tokenizer, max_tokens=max_tokens), whole, strict=True
        ):
            assert candidate.cropped
            assert candidate.tokens == [tiny_dataset.bos_id, *full.tokens[-(max_tokens - 1) :]]
            answer = len(full.tokens) - full.start
            assert len(candidate.tokens) - candidate.start == min(answer, max_tokens - 1)


# -- answers ----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def oracle(exported: Any, tokenizer: Any, task: CoreTask, items: list[dict[str, Any]], index: int) -> tuple[int, bool]:
    """The answer by the definition: one candidate after the other, one token after the other, in double precision."""
    item = items[index]
    others = [other for position, other in enumerate(items) if position != index]
    start = "".join(
        {
            "multiple_choice": lambda e: e["query"] + task.delimiter + e["choices"][e["gold"]],
            "schema": lambda e: e["context_options"][e["gold"]] + task.delimiter + e["continuation"],
            "language_modeling": lambda e: e["context"].strip() + task.delimiter + e["continuation"],
        }[task.kind](example)
        + "\n\n"
        for example in random.Random(1234 + index).sample(others, task.num_shots)
    )

    def log_probabilities(tokens: list[int]) -> torch.Tensor:
        return exported(torch.tensor([tokens])).logits[0, -1].double().log_softmax(-1)

    if task.kind == "language_modeling":
        asked = start + item["context"].strip() + task.delimiter
        seen, whole = (tokenizer(text)["input_ids"] for text in (asked.strip(), asked + item["continuation"]))
        assert whole[: len(seen)] == seen
        right = all(int(log_probabilities(whole[:i]).argmax()) == whole[i] for i in range(len(seen), len(whole)))
        return 0, right
    if task.kind == "multiple_choice":
        texts = [start + item["query"] + task.delimiter + choice for choice in item["choices"]]
    else:
        texts = [start + context + task.delimiter + item["continuation"] for context in item["context_options"]]
    rows = [tokenizer(text)["input_ids"] for text in texts]
    common = 0
    step = 1 if task.kind == "multiple_choice" else -1
    while len({row[::step][common] for row in rows}) == 1:
        common += 1
    means = []
    for row in rows:
        first = common if task.kind == "multiple_choice" else len(row) - common
        terms = [-float(log_probabilities(row[:i])[row[i]]) for i in range(first, len(row))]
        means.append(math.fsum(terms) / len(terms))
    choice = min(range(len(means)), key=means.__getitem__)
    return choice, choice == item["gold"]


def likely_items(model: GPT, tokenizer: Any, count: int) -> list[dict[str, Any]]:
    """Items: one as the model would continue, one with another second token, one with other words, and so on."""
    rng, made = random.Random(5), []
    while len(made) < count:
        context = words(rng, 6)
        tokens = [tokenizer.bos_id, *tokenizer.encode(context)]
        for place in range(2):
            with torch.no_grad():
                logits = model(torch.tensor([tokens]))[0, -1]
            second_best = len(made) % 3 == 1 and place == 1
            tokens.append(int(logits.topk(2).indices[int(second_best)]))
        continuation = words(rng, 2) if len(made) % 3 == 2 else tokenizer.decode(tokens)[len(context) :]
        survives = [tokenizer.bos_id, *tokenizer.encode(context + continuation)] == tokens
        if len(made) % 3 == 2 or (survives and continuation.strip()):
            made.append({"context": context, "continuation": continuation})
    return made


@pytest.fixture(scope="module")
def exported(tiny_dataset: Dataset, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """The model of `model` as transformers reads it: (model, tokenizer)."""
    transformers = pytest.importorskip("transformers")
    from quintic.eval.export import export_hf

    folder = tmp_path_factory.mktemp("exported")
    with pytest.MonkeyPatch.context() as patch:
        copy_modules_to(folder / "modules", patch)
        export_hf(tiny_model(tiny_dataset), tiny_dataset.tokenizer, folder / "model")
        read = transformers.AutoModelForCausalLM.from_pretrained(folder / "model", trust_remote_code=True).eval()
        return read, transformers.AutoTokenizer.from_pretrained(folder / "model", trust_remote_code=True)


@pytest.mark.parametrize(
    ("kind", "shots"),
    [
        ("multiple_choice", 0),
        pytest.param("multiple_choice", 2, marks=pytest.mark.slow),
        ("schema", 2),
        pytest.param("schema", 0, marks=pytest.mark.slow),
        ("language_modeling", 0),
        ("language_modeling", 2),
    ],
)
def test_answers_are_those_of_a_plain_loop_over_transformers(
    kind: TaskKind, shots: int, model: GPT, exported: tuple[Any, Any], tiny_dataset: Dataset
) -> None:
    if kind == "language_modeling" and shots == 0:
        task, items = task_of(kind, 0, delimiter=""), likely_items(model, tiny_dataset.tokenizer, 10)
    else:
        task, items = task_of(kind, shots), items_of(kind, 10)
    expected = {index: oracle(*exported, task, items, index) for index in range(10)}
    for indices in ([3], [9, 0, 4, 1], [2, 5, 6, 7, 8]):
        found = answers(model, tiny_dataset.tokenizer, task, items, indices, CPU, max_tokens=10_000)
        assert [(answer.choice, answer.correct) for answer in found] == [expected[index] for index in indices]
    right = [correct for _, correct in expected.values()]
    assert any(right) or (kind == "language_modeling" and shots)
    assert not all(right)


def suite_of(*counts: int) -> list[CoreTask]:
    kinds: list[TaskKind] = ["multiple_choice", "schema", "language_modeling"]
    return [
        replace(task_of(kind, 2), items=tuple(items_of(kind, count)))
        for kind, count in zip(kinds[: len(counts)], counts, strict=True)
    ]


@pytest.mark.parametrize("rows", [1, 5, 64])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_counts_of_ranks_add_up_and_calls_are_equal(
    world_size: int, rows: int, model: GPT, tiny_dataset: Dataset
) -> None:
    suite = suite_of(11, 4, 7)
    calls = [0] * world_size
    sums = []
    for rank in range(world_size):

        def counted(*inputs: Any, rank: int = rank, **options: Any) -> torch.Tensor:
            calls[rank] += 1
            assert len(inputs[0]) <= max(rows, 4)
            return model(*inputs, **options)

        sums.append(
            core_sums(
                counted, tiny_dataset.tokenizer, suite, CPU, max_tokens=64, rows=rows, rank=rank, world_size=world_size
            )
        )
    whole = core_sums(model, tiny_dataset.tokenizer, suite, CPU, max_tokens=64)
    assert torch.equal(torch.stack(sums).sum(0), whole)
    assert whole[:, 1].tolist() == [11, 4, 7]
    assert len(set(calls)) == 1


def test_only_some_items_are_asked(model: GPT, tiny_dataset: Dataset) -> None:
    suite = suite_of(11, 4, 7)
    sums = core_sums(model, tiny_dataset.tokenizer, suite, CPU, max_tokens=64, max_items=5)
    assert sums[:, 1].tolist() == [5, 4, 5]
    shuffled = list(suite[0].items)
    random.Random(1337).shuffle(shuffled)
    assert suite[0].chosen(5) == (shuffled[:5], 5)
    assert suite[0].chosen(1) == (shuffled[:3], 1)  # two more, as examples
    assert suite[0].chosen(None) == (shuffled, 11)


def test_accuracies_are_centred_on_chance() -> None:
    suite = suite_of(8, 8)
    result = core_score(suite, torch.tensor([[5, 8, 1], [2, 8, 0]]))
    accuracies = [5 / 8, 2 / 8]
    centred = [(5 / 8 - 0.25) / 0.75, 0.0]
    assert [task.accuracy for task in result.tasks] == accuracies
    assert [task.centred for task in result.tasks] == pytest.approx(centred)
    errors = [math.sqrt(a * (1 - a) / 8) / 0.75 for a in accuracies]
    assert [task.stderr for task in result.tasks] == pytest.approx(errors)
    assert result.core == pytest.approx(sum(centred) / 2)
    assert result.stderr == pytest.approx(math.hypot(*errors) / 2)
    assert [task.num_cropped for task in result.tasks] == [1, 0]
    assert result.name == "mean over 2 of the 22 tasks of CORE"


@pytest.mark.parametrize(
    "sums",
    [
        [[1, 1, 0], [0, 1, 0]],  # one item a task
        [[3, 8, 0], [1, 1, 0]],  # one task has one item
        [[8, 8, 0], [0, 8, 0]],  # all items of each task answered alike
    ],
)
def test_a_standard_error_that_items_cannot_tell_is_unknown(sums: list[list[int]]) -> None:
    result = core_score(suite_of(8, 8), torch.tensor(sums))
    assert result.stderr is None
    assert core_lines(result)[-1].endswith("(standard error over items unknown, as these items are too few to tell)")
    assert "0.0000)" not in core_lines(result)[-1]
    # One task whose items differ is enough where each has several.
    result = core_score(suite_of(8, 8), torch.tensor([[8, 8, 0], [4, 8, 0]]))
    assert result.stderr == pytest.approx(math.sqrt(0.25 / 8) / 0.75 / 2)


# -- folders ----------------------------------------------------------------------------------------------------------


def write(path: Path, items: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(item) + "\n" for item in items), encoding="utf-8")


def test_the_table_is_that_of_dclm() -> None:
    assert len(CORE_TASKS) == len({task.label for task in CORE_TASKS}) == 22
    by_kind = {kind: sum(task.kind == kind for task in CORE_TASKS) for kind in ("multiple_choice", "schema")}
    assert by_kind == {"multiple_choice": 11, "schema": 2}
    assert all(task.baseline == 0 for task in CORE_TASKS if task.kind == "language_modeling")


def test_a_folder_of_files_has_the_tasks_that_are_there(tmp_path: Path) -> None:
    write(tmp_path / "copa.jsonl", items_of("multiple_choice", 3))
    write(tmp_path / "winograd_wsc.jsonl", items_of("schema", 3))
    write(tmp_path / "hellaswag.jsonl", items_of("multiple_choice", 12))  # counts twice
    suite = load_core(tmp_path)
    assert [task.label for task in suite] == ["hellaswag_zeroshot", "copa", "hellaswag", "winograd"]
    assert [len(task.items) for task in suite] == [12, 3, 12, 3]
    score = core_score(suite, torch.ones(4, 3))
    assert len(score.missing) == 18
    assert "squad" in score.missing


def test_a_bundle_says_itself_what_its_tasks_are(tmp_path: Path) -> None:
    (tmp_path / "core.yaml").write_text(
        "icl_tasks:\n"
        "-\n  label: copa\n  dataset_uri: a/b.jsonl\n  num_fewshot: [3]\n  icl_task_type: multiple_choice\n"
        '  continuation_delimiter: "\\nAnswer: "\n'
        "-\n  label: squad\n  dataset_uri: a/absent.jsonl\n  num_fewshot: [10]\n  icl_task_type: language_modeling\n"
        "-\n  label: mine\n  dataset_uri: c.jsonl\n  num_fewshot: [0]\n  icl_task_type: language_modeling\n"
    )
    (tmp_path / "eval_meta_data.csv").write_text(
        'Eval Task,#shots,Random baseline,Description\ncopa,0,40,"a, b"\nsquad,10,0,x\nmine,0,12.5,\n'
    )
    write(tmp_path / "eval_data" / "a" / "b.jsonl", items_of("multiple_choice", 4))
    write(tmp_path / "eval_data" / "c.jsonl", items_of("language_modeling", 1))
    suite = load_core(tmp_path)
    assert [len(task.items) for task in suite] == [4, 1]
    assert tuple(replace(task, items=()) for task in suite) == (
        CoreTask(
            label="copa", file="a/b.jsonl", kind="multiple_choice", num_shots=3, baseline=0.4, delimiter="\nAnswer: "
        ),
        CoreTask(label="mine", file="c.jsonl", kind="language_modeling", num_shots=0, baseline=0.125),
    )
    score = core_score(suite, torch.ones(2, 3))
    assert "squad" in score.missing
    assert "copa" not in score.missing
    (tmp_path / "eval_meta_data.csv").write_text("Eval Task,Random baseline\ncopa,40\n")
    with pytest.raises(DataError, match=r"not those of an eval_bundle \(KeyError: 'squad'\)"):
        load_core(tmp_path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 3: not JSON"),
        ('{"query": "\\ud800", "choices": ["a", "b"], "gold": 0}', "line 3: not JSON .*surrogates"),
        ("[" * 100_000, "line 3: not JSON"),
        ("[]", 'line 3: not an item of a multiple_choice task, which has "query", a text; .*; correct the line, or'),
        ('{"choices": ["a", "b"], "gold": 0}', "line 3: not an item"),
        ('{"query": "q", "choices": ["a"], "gold": 0}', "line 3: not an item"),
        ('{"query": "q", "choices": ["a", 1], "gold": 0}', "line 3: not an item"),
        ('{"query": "q", "choices": ["a", "b"], "gold": 2}', "line 3: not an item"),
        ('{"query": "q", "choices": ["a", "b"], "gold": true}', "line 3: not an item"),
    ],
)
def test_what_is_no_item_is_named(line: str, message: str, tmp_path: Path) -> None:
    write(tmp_path / "copa.jsonl", items_of("multiple_choice", 2))
    whole = (tmp_path / "copa.jsonl").read_text().splitlines()
    (tmp_path / "copa.jsonl").write_text("\n".join([whole[0], "", line, whole[1]]))
    with pytest.raises(DataError, match=message):
        load_core(tmp_path)


def test_a_byte_order_mark_is_no_part_of_an_item(tmp_path: Path) -> None:
    write(tmp_path / "copa.jsonl", items_of("multiple_choice", 2))
    plain = load_core(tmp_path)
    (tmp_path / "copa.jsonl").write_bytes(b"\xef\xbb\xbf" + (tmp_path / "copa.jsonl").read_bytes())
    assert load_core(tmp_path) == plain


def test_folders_without_tasks(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"holds no task of CORE; give a folder with files such as arc_easy\.jsonl"):
        load_core(tmp_path)
    write(tmp_path / "arc_easy.jsonl", items_of("multiple_choice", 10))
    with pytest.raises(DataError, match="10 items; arc_easy needs more than its 10 examples"):
        load_core(tmp_path)
    (tmp_path / "arc_easy.jsonl").unlink()
    write(tmp_path / "coqa.jsonl", [{"context": "c", "continuation": " "}])
    with pytest.raises(DataError, match="line 1: not an item of a language_modeling task"):
        load_core(tmp_path)

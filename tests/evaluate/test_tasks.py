"""Retrieval tasks: what is made out of a text, and how answers are scored."""

import json
import math
import random
from dataclasses import replace

import pytest
import torch
from PIL import Image
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from kvpact.data import book_path
from kvpact.evaluate import EvaluationError, Question, TaskCase, evaluate, make_cases, write_report
from kvpact.evaluate.task_scores import TaskResult, TaskScore, score_tasks
from kvpact.evaluate.tasks import DEPTHS

TASKS = ["needle", "variables", "common words", "key-value", "tools"]


@pytest.fixture(scope="module")
def book():
    return book_path().read_text("utf-8")


@pytest.fixture(scope="module")
def cases(book):
    return make_cases(book, len, tokens=12_000, samples=2, seed=3)


def by_task(cases, task):
    return [case for case in cases if case.task == task]


# --- cases -----------------------------------------------------------------------------------


def test_there_is_a_question_for_each_task_sample_and_depth(cases):
    assert [(case.task, case.sample) for case in cases] == [(t, i) for t in TASKS for i in (0, 1)]
    for case in cases:
        each = 9 if case.task == "tools" else 1
        assert [q.depth for q in case.questions] == [x for x in DEPTHS for _ in range(each)]
        assert 11_000 < len(case.context) <= 12_000


def test_same_seed_same_cases(book, cases):
    assert make_cases(book, len, tokens=12_000, samples=2, seed=3) == cases
    assert make_cases(book, len, tokens=12_000, samples=1, seed=3) == cases[::2]
    other = make_cases(book, len, tokens=12_000, samples=2, seed=4)
    assert all(a.context != b.context for a, b in zip(cases, other, strict=True))
    random.seed(0)
    before = random.getstate()
    make_cases(book, len, tokens=12_000, samples=1)
    assert random.getstate() == before


def place(context, words):
    assert context.count(words) == 1, words
    return context.index(words) / (len(context) - len(words))


def test_needles_stand_at_their_depths_and_hold_their_answers(cases):
    for case in by_task(cases, "needle"):
        for question in case.questions:
            name = question.prompt.partition("number of the ")[2].partition("?")[0]
            needle = f"The secret number of the {name} is{question.answer}."
            assert place(case.context, needle) == pytest.approx(question.depth, abs=0.06)
            assert question.prompt.endswith(f"The secret number of the {name} is")


def test_chains_lead_from_the_variable_asked_for_to_its_number(cases):
    for case in by_task(cases, "variables"):
        for question in case.questions:
            name = question.prompt.partition("value of VAR ")[2].partition("?")[0]
            for _ in range(2):
                _, _, rest = case.context.partition(f"VAR {name} = VAR ")
                name = rest[:2]
            assigned = f"VAR {name} ={question.answer}."
            assert place(case.context, assigned) == pytest.approx(question.depth, abs=0.15)


def test_the_common_word_is_the_most_common_of_its_list(cases):
    for case in by_task(cases, "common words"):
        for question in case.questions:
            number = question.prompt.partition("in list ")[2][0]
            words = case.context.partition(f"List {number}: ")[2].partition(".")[0].split()
            assert (len(words), len(set(words))) == (18, 11)
            assert words.count(question.answer.strip()) == 8
            found = place(case.context, f"List {number}: ")
            assert found == pytest.approx(question.depth, abs=0.08)


def test_keys_stand_at_their_depths_with_their_values(cases):
    for case in by_task(cases, "key-value"):
        lines = case.context.splitlines()
        for question in case.questions:
            key = question.prompt.partition("number of ")[2].partition("?")[0]
            index = lines.index(f"{key}:{question.answer}")
            assert index == round(question.depth * (len(lines) - 1))


def test_arguments_of_tool_calls_are_copied_from_the_first_three_quarters(cases):
    for case in by_task(cases, "tools"):
        listed = [line for line in case.context.splitlines() if line.startswith('{"file"')]
        files = {file["file"]: file for file in map(json.loads, listed)}
        assert len(files) == len(listed) == 20
        shown = case.context.rpartition("\n\nUser: ")[0].count("\n\nUser: ") + 1
        assert shown == 5 and case.context.rstrip().endswith("}}")
        for i, question in enumerate(case.questions):
            name = question.prompt.partition("Archive the file ")[2].partition(".")[0]
            argument = ("id", "path", "bytes")[i % 3]
            assert question.prompt.endswith(f'"{argument}":')
            assert json.dumps(files[name][argument]).rstrip('"') == question.answer[1:]
            called = {"name": "archive_file", "arguments": files[name]}
            whole = f"\nUser: Archive the file {name}.\nAssistant: {json.dumps(called)}\n"
            assert whole.startswith(question.prompt + question.answer)
            assert whole not in case.context
            found = place(case.context, json.dumps(files[name]))
            assert found == pytest.approx(0.75 * question.depth, abs=0.12)


def test_sentences_end_behind_quotes_and_not_after_titles():
    words = [f"{a}{b}word" for a in "abcdefgh" for b in "xyz"]
    text = " ".join(f'Then Mr. {word} said "Go!" and "Why?"' for word in words)
    seen = set()
    for seed in range(40):
        chosen = {"depths": [0.5], "samples": 1, "seed": seed, "tasks": ["needle"]}
        (case,) = make_cases(text, len, tokens=350 + seed, **chosen)
        before = case.context.partition(" The secret")[0]
        seen.add(before.rpartition(" ")[2])
    assert seen == {'"Go!"', '"Why?"'}, "never the title"


@pytest.mark.parametrize(("options", "words"), [
    ({"samples": 0}, "1 or more samples"),
    ({"depths": []}, "depths"),
    ({"depths": [0.5, 1.1]}, "from 0 to 1"),
    ({"tokens": 100}, "100 tokens are too few"),
    ({"tokens": 2500, "tasks": ["tools"]}, "2500 tokens are too few"),
    ({"tasks": ["tools", "hay"]}, "hay is no task; take all, needle"),
    ({"tokens": 10**6}, "too short for tasks of 1000000"),
])  # fmt: skip
def test_cases_that_are_not_possible(book, options, words):
    with pytest.raises(EvaluationError, match=words):
        make_cases(book, len, **options)


def test_a_text_without_words_is_named():
    with pytest.raises(EvaluationError, match="2 different words"):
        make_cases("Some words here. 1 2 3.", len)


# --- scores ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(model_folder):
    model = LlamaForCausalLM.from_pretrained(model_folder).eval()
    return model, PreTrainedTokenizerFast.from_pretrained(model_folder)


CASE = TaskCase(
    "needle", 0, "abcdefgh" * 20, (Question(0.0, " what?", " 123"), Question(1.0, " why?", " 45"))
)


def test_scores_are_those_of_whole_texts_by_hand(tiny):
    model, tokenizer = tiny
    seen = []
    result = score_tasks(
        model, tokenizer, [CASE], ["none", "int:bits=2"], chunk=64, seed=5,
        progress=lambda *step: seen.append(step),
    )  # fmt: skip
    assert (result.context_tokens, result.seed) == (160, 5)
    assert [(done, total) for done, total, _ in seen] == [(1, 3), (2, 3), (3, 3)]
    for score, question in zip(result.scores, CASE.questions * 2, strict=True):
        ids = torch.tensor([[ord(c) for c in CASE.context + question.prompt + question.answer]])
        with torch.inference_mode():
            log_p = model(ids).logits[0].double().log_softmax(-1)
        length = len(question.answer)
        answer = ids[0, -length:]
        own = log_p[-length - 1 : -1]
        assert score.exact_logprob == pytest.approx(own.gather(1, answer[:, None]).sum().item())
        assert score.exact_correct == bool((own.argmax(-1) == answer).all())
    exact, coded = result.scores[:2], result.scores[2:]
    assert all(s.logprob == pytest.approx(s.exact_logprob) for s in exact)
    assert all(abs(s.logprob - s.exact_logprob) > 1e-4 for s in coded)


def test_a_right_answer_is_one_that_is_always_the_likeliest(tiny):
    model, tokenizer = tiny
    ids = tokenizer(CASE.context + " what?", return_tensors="pt")["input_ids"]
    said = tokenizer.decode(model.generate(ids, max_new_tokens=3, do_sample=False)[0, -3:])
    wrong = said[:2] + ("a" if said[2] != "a" else "b")
    case = replace(CASE, questions=(Question(0, " what?", said), Question(1, " what?", wrong)))
    scores = score_tasks(model, tokenizer, [case], ["none"], chunk=64).scores
    assert [score.correct for score in scores] == [True, False]


def test_questions_do_not_see_one_another(tiny):
    model, tokenizer = tiny
    both = score_tasks(model, tokenizer, [CASE], ["int:bits=2"], chunk=64).scores
    case = replace(CASE, questions=CASE.questions[1:])
    (alone,) = score_tasks(model, tokenizer, [case], ["int:bits=2"], chunk=64).scores
    assert alone.logprob == both[1].logprob and alone.exact_logprob == both[1].exact_logprob


def test_contexts_that_do_not_fit_and_missing_cases(tiny):
    model, tokenizer = tiny
    with pytest.raises(EvaluationError, match=r"1034 tokens, the model 1024"):
        score_tasks(model, tokenizer, [replace(CASE, context="x" * 1024)], ["none"])
    with pytest.raises(EvaluationError, match="make_cases"):
        score_tasks(model, tokenizer, [], ["none"])
    with pytest.raises(EvaluationError, match="give a spec"):
        score_tasks(model, tokenizer, [CASE], [])
    with pytest.raises(EvaluationError, match="chunk 0"):
        score_tasks(model, tokenizer, [CASE], ["none"], chunk=0)


# --- means -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def result():
    found = []
    for spec, loss in (("a", 1.0), ("b", 3.0)):
        for i, (task, depth) in enumerate([(t, d) for t in ("x", "y") for d in (0.0, 1.0)]):
            right = (spec == "a", True)
            found.append(TaskScore(spec, False, task, 0, depth, -5 - loss * i, -5.0, *right))
    return TaskResult(found, 900, 3)


def test_means_by_hand(result):
    rows = {(row.spec, row.task, row.depth): row for row in result.rows()}
    assert list(rows)[:7] == [
        ("a", "x", 0.0), ("a", "x", 1.0), ("a", "x", None), ("a", "y", 0.0), ("a", "y", 1.0),
        ("a", "y", None), ("a", None, None),
    ]  # fmt: skip
    whole = rows["b", None, None]
    assert (whole.questions, whole.difference, whole.exact_logprob) == (4, -4.5, -5)
    assert whole.difference_se == pytest.approx(3 * math.sqrt(5 / 3) / 2)
    assert (whole.correct, whole.exact_correct) == (0, 100)
    assert rows["a", "y", None].difference == -2.5
    assert math.isnan(rows["a", "y", 0.0].difference_se)
    assert whole.right == ("0.0 ± 0.0", "-100.0 ± 0.0")
    half = [replace(score, correct=i % 2 == 0) for i, score in enumerate(result.scores[:4])]
    row = TaskResult(half, 900, 3).rows()[-1]
    error = 100 * math.sqrt(1 / 3) / 2
    assert (row.correct, row.exact_correct_se) == (50, 0)
    assert row.correct_se == pytest.approx(error) and row.change_se == pytest.approx(error)


def test_report_has_tables_numbers_and_a_plot(tiny, result, tmp_path):
    ids = torch.arange(100) % 128
    run = evaluate(tiny[0], ids, ["int:bits=4"], chunk=40, model_name="tiny", seed=3)
    files = write_report(replace(run, tasks=result), tmp_path)
    assert [path.name for path in files[-2:]] == ["tasks.json", "tasks.png"]
    (data,) = json.loads(files[-2].read_text("utf-8"))
    assert (data["model"], data["seed"], len(data["scores"])) == ("tiny", 3, 8)
    assert data["rows"][2]["difference"] == -0.5
    text = (tmp_path / "eval.md").read_text("utf-8")
    for words in ("| b | -1.500 ± 1.500 |", "depth 0 | depth 1 |", "4 questions", "seed 3"):
        assert words in text
    with Image.open(files[-1]) as image:
        image.load()
        assert len(image.convert("RGB").getcolors(1 << 24)) > 20

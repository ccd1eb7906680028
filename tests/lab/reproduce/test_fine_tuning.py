"""Sentence tasks and what is fine-tuned on them."""

import random
from collections import Counter

import pytest
import torch
from sklearn.metrics import matthews_corrcoef

from subulp.lab.reproduce.check import Check
from subulp.lab.reproduce.claim import Options, Watch
from subulp.lab.reproduce.collage.experiments import FINE_TUNED
from subulp.lab.reproduce.fine_tuning import (
    AVERAGE,
    UNTRAINED,
    Examples,
    Recipe,
    _parts,
    fine_tuned,
    peak_bytes,
    score,
)
from subulp.lab.reproduce.sentence_tasks import TASKS, Example, Material, SentenceTask
from subulp.lab.tasks.lm import bpe
from subulp.lab.tasks.lm.models import BERT, Shape

TRAIN, TEST = _parts(None)
LINES = [line.lower() for line in TRAIN.splitlines()]
KNOWN = {*LINES}
WORDS = {tuple(sorted(line.split())) for line in LINES}


def examples(name, count=400, text=TRAIN, seed=0):
    return TASKS[name].examples(Material(text, seed), count)


@pytest.mark.parametrize("name", TASKS)
def test_answers_are_balanced_and_repeatable(name):
    found = examples(name)
    counts = Counter(example.answer for example in found)
    assert len(found) == 400
    assert set(counts) == set(range(TASKS[name].classes))
    assert min(counts.values()) > 400 / TASKS[name].classes * 0.7
    assert found == examples(name)
    assert found != examples(name, seed=1)


@pytest.mark.parametrize("name", TASKS)
def test_what_is_tested_is_not_trained_on(name):
    trained = {example.first for example in examples(name, 3000)}
    tested = [example.first for example in examples(name, 1000, TEST, 1)]
    # Short lines stand in both parts.
    assert sum(first in trained for first in tested) < 0.01 * len(tested)


def test_answers_are_right():
    for first, _, answer in examples("word order"):
        assert tuple(sorted(first.split())) in WORDS
        assert answer == 0 or first in KNOWN
    assert sum(e.first in KNOWN for e in examples("word order") if e.answer == 0) < 5
    for first, _, answer in examples("odd words"):
        assert (answer == 1) <= (first in KNOWN)
    for first, _, answer in examples("three answers"):
        assert answer != 0 or first in KNOWN
        assert answer != 2 or tuple(sorted(first.split())) in WORDS
    whole = " ".join(TRAIN.split())
    for first, _, answer in examples("question"):
        assert not first.endswith(("?", ".", "!"))
        assert not answer or f"{first}?" in whole
        assert answer or f"{first}." in whole or f"{first}!" in whole
    for first, second, answer in examples("paraphrase"):
        own = set("".join(c if c.isalpha() or c == "'" else " " for c in first.lower()).split())
        assert not answer or set(second.split()) <= own


@pytest.mark.parametrize("right", [[0, 1, 1, 0, 1, 0, 1], [1, 1, 1, 1, 1, 1, 1]])
def test_scores_are_those_of_scikit_learn(right):
    draw = random.Random(0)
    for _ in range(20):
        answers = [draw.randrange(2) for _ in right]
        found = score(torch.tensor(answers), torch.tensor(right), matthews=True)
        assert found == pytest.approx(matthews_corrcoef(right, answers), abs=1e-12)
    assert score(torch.tensor([0, 1, 2, 2]), torch.tensor([0, 1, 1, 2]), matthews=False) == 0.75


TOKENIZER = bpe.learn(TRAIN[:20_000], 300)
SHAPE = Shape(301, 12, 32, 2, 2, model="bert")
RECIPE = Recipe(256, 128, 8, 16, 3e-3)


def told_apart(count, seed):
    """Sentences that one word decides."""
    draw = random.Random(seed)
    return [
        Example(f"the {('king', 'duke')[answer]} {draw.choice(('is', 'was', 'has'))}", None, answer)
        for answer in (draw.randrange(2) for _ in range(count))
    ]


@pytest.mark.parametrize("precision", [None, "fp32", "extra-bits-8", "nearest"])
def test_fine_tuning_learns_repeats_and_leaves_the_model_alone(precision):
    torch.manual_seed(0)
    model = BERT(SHAPE).requires_grad_(False).eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    train, test = (Examples(told_apart(n, s), TOKENIZER) for n, s in ((256, 0), (128, 1)))
    task = SentenceTask(lambda *_: [])
    assert fine_tuned(model, task, train, test, RECIPE, 0, precision) == 1.0
    # Too short to be right everywhere: another seed would show.
    short = Recipe(64, 128, 1, 16, 1e-3)
    odd = Examples(examples("odd words", 64), TOKENIZER)
    order = TASKS["word order"]
    answers = [fine_tuned(model, order, odd, odd, short, s, precision) for s in (0, 0, 1)]
    assert answers[0] == answers[1]
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_extra_bits_take_less_memory():
    model = BERT(SHAPE).requires_grad_(False).eval()
    train = Examples(told_apart(256, 0), TOKENIZER)
    task = SentenceTask(lambda *_: [])
    wide, narrow = (
        peak_bytes(model, task, train, RECIPE, 0, precision)
        for precision in ("fp32", "extra-bits-8")
    )
    assert narrow < wide


def test_sentences_are_filled_up_and_cut_off():
    long = "word " * 40
    made = Examples([Example("a king", "a duke", 0), Example(long, None, 1)], TOKENIZER)
    ids = made.batch(torch.tensor([0, 1]), 12)
    assert ids.shape == (2, 12)
    first = bpe.read(TOKENIZER).encode("a king").ids
    assert ids[0, : len(first) + 1].tolist() == [*first, made.end]
    assert ids[0, -1] == made.end != ids[1, -1]


def test_too_short_a_text_is_refused():
    with pytest.raises(ValueError, match="data has no sentences to make tasks of"):
        Examples(examples("question", text="a line\nand another"), TOKENIZER)


def test_what_was_fine_tuned_is_kept(tmp_path, monkeypatch):
    part = FINE_TUNED.parts(Options("smallest"))[0]
    whole = part.run(tmp_path / "a", Watch(jobs=1))
    stopped = 3

    def stops(*arguments):
        nonlocal stopped
        stopped -= 1
        if not stopped:
            raise KeyboardInterrupt
        return fine_tuned(*arguments)

    monkeypatch.setattr("subulp.lab.reproduce.fine_tuning.fine_tuned", stops)
    with pytest.raises(KeyboardInterrupt):
        part.run(tmp_path / "b", Watch(jobs=1))
    stopped = 1000
    resumed = part.run(tmp_path / "b", Watch(jobs=1))
    numbers = {name: whole.values(f"BERT, {UNTRAINED}", name) for name in (*TASKS, AVERAGE)}
    assert all(numbers.values())
    for case in (f"BERT, {UNTRAINED}", "BERT, nearest", "BERT, master"):
        for name in numbers:
            assert resumed.values(case, name) == whole.values(case, name)
    monkeypatch.setattr("subulp.lab.reproduce.fine_tuning.fine_tuned", pytest.fail)
    again = part.run(tmp_path / "b", Watch(jobs=1))
    assert again.observations == resumed.observations
    assert Check("", AVERAGE, f"BERT, {UNTRAINED}").on(again).seeds == 1

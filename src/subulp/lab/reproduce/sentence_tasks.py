"""Sentence tasks made of a text, in the kinds of GLUE's: what a text has and what was done to it.

Each stands for one of Collage's Table 4, which cannot ship, and for what the extra-bits paper
fine-tunes BERT on. None needs more than the text, so that
whoever has another text has its tasks.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

_LEAST_WORDS, _MOST_WORDS = 4, 12
_WORD = re.compile(r"[A-Za-z']+")
_SPEECH = re.compile(r"\n\s*\n(?:.*:\n)?")
_SENTENCE = re.compile(r"[A-Z][^.?!:;]*[.?!]")


class Example(NamedTuple):
    """A sentence, or two, and the answer: the number of a class."""

    first: str
    second: str | None
    answer: int


class Material:
    """What the examples are made of.

    Args:
        text: A text in lines.
        seed: Seed of what is drawn.
    """

    def __init__(self, text: str, seed: int) -> None:
        self.draw = random.Random(seed)
        self.lines = [
            line
            for line in text.splitlines()
            if _LEAST_WORDS <= len(line.split()) <= _MOST_WORDS and not line.endswith(":")
        ]
        self.words = [word for line in self.lines for word in line.split()]
        # Sentences go over the ends of lines, but not from one speech to the next.
        found = [sentence for part in _SPEECH.split(text) for sentence in _SENTENCE.findall(part)]
        self.sentences = [
            " ".join(s.split()) for s in found if _LEAST_WORDS <= len(s.split()) <= _MOST_WORDS
        ]

    def shuffled(self, line: str) -> str:
        """The words of a line in any order."""
        words = line.split()
        self.draw.shuffle(words)
        return " ".join(words)

    def replaced(self, line: str) -> str:
        """A line, two words of which are any others."""
        words = line.split()
        for place in self.draw.sample(range(len(words)), 2):
            words[place] = self.draw.choice(self.words)
        return " ".join(words)


def _acceptable(material: Material, line: str) -> Example:
    answer = material.draw.randrange(2)
    # In small letters: the first word's capital would tell.
    return Example((line if answer else material.shuffled(line)).lower(), None, answer)


def _usual(material: Material, line: str) -> Example:
    answer = material.draw.randrange(2)
    return Example((line if answer else material.replaced(line)).lower(), None, answer)


def _three(material: Material, line: str) -> Example:
    answer = material.draw.randrange(3)
    made = (line, material.replaced(line), material.shuffled(line))[answer]
    return Example(made.lower(), None, answer)


def _paraphrase(material: Material, line: str) -> Example:
    answer = material.draw.randrange(2)
    other = line if answer else material.draw.choice(material.lines)
    words = _WORD.findall(other.lower())
    material.draw.shuffle(words)
    return Example(line, " ".join(words[: max(2, len(words) - 2)]), answer)


def _of_lines(make: Callable[[Material, str], Example]) -> Callable[[Material, int], list[Example]]:
    def examples(material: Material, count: int) -> list[Example]:
        chosen = material.draw.sample(material.lines, min(count, len(material.lines)))
        return [make(material, line) for line in chosen]

    return examples


def _questions(material: Material, count: int) -> list[Example]:
    """As many questions as other sentences, all without the mark at the end."""
    kinds = (
        [s for s in material.sentences if not s.endswith("?")],
        [s for s in material.sentences if s.endswith("?")],
    )
    each = min(count // 2, *map(len, kinds))
    found = [
        Example(sentence[:-1], None, answer)
        for answer, kind in enumerate(kinds)
        for sentence in material.draw.sample(kind, each)
    ]
    material.draw.shuffle(found)
    return found


@dataclass(frozen=True)
class SentenceTask:
    """How examples are made, and what they are measured by.

    Attributes:
        examples: Makes at most so many of some material.
        classes: Number of answers.
        matthews: Measured by Matthews' correlation, as CoLA is, instead of the share that is right.
    """

    examples: Callable[[Material, int], list[Example]]
    classes: int = 2
    matthews: bool = False


TASKS: dict[str, SentenceTask] = {
    # As CoLA: are the words in the order of a line?
    "word order": SentenceTask(_of_lines(_acceptable), matthews=True),
    # As CoLA too: does every word belong there?
    "odd words": SentenceTask(_of_lines(_usual), matthews=True),
    # As SST-2: something about the whole of a sentence.
    "question": SentenceTask(_questions),
    # As MRPC and QQP: are both of the same words, two of which may be missing?
    "paraphrase": SentenceTask(_of_lines(_paraphrase)),
    # As MNLI has three answers: a line as it is, with odd words, or without order.
    "three answers": SentenceTask(_of_lines(_three), classes=3),
}

"""Pre-trained BERTs, fine-tuned on sentence tasks.

Collage's Table 4, the appendix of "Memory Efficient Mixed-Precision Optimizers", and what MoR
leaves to a model's later tasks.
"""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ... import optim
from ...diagnostics import track_memory
from ...nn import convert_from_mor
from ..engine.loop import thread_count
from ..engine.trained import load
from ..tasks.lm import bpe
from ..tasks.lm.config import LMConfig
from ..tasks.lm.models import BERT, build, use_bf16
from ..tasks.lm.text import VALIDATION_SHARE, decoded, read_text
from ..tasks.lm.trained import Trained
from .claim import Watch
from .found import Found, Observation
from .measurement import Measurement
from .sentence_tasks import TASKS, Example, Material, SentenceTask
from .training import Training

UNTRAINED = "not pre-trained"
"""The same model as it is drawn: what pre-training is worth."""

AVERAGE, PEAK = "average of the tasks", "peak MiB of fine-tuning"

_WARMUP = 0.1
_DECAY = 0.01
_TESTED_AT_ONCE = 256


@dataclass(frozen=True)
class Recipe:
    """How models are fine-tuned: AdamW with a linear schedule, BF16 activations.

    Attributes:
        examples: At most so many, from the part of the text that models are pre-trained on.
        tested: At most so many, from the part that validates.
        epochs: Passes over the examples.
        batch: Examples of a step.
        lr: Highest learning rate.
    """

    examples: int
    tested: int
    epochs: int
    batch: int
    lr: float


@dataclass(frozen=True)
class FineTuning:
    """Models of every precision and seed of a pre-training, and untrained ones, on every task.

    Attributes:
        training: The pre-training: of BERT, by byte pairs.
        recipe: The fine-tuning.
        precisions: Of :class:`subulp.optim.AdamW`, each of which fine-tunes the models of the first
            precision of the pre-training; none for ``torch.optim.AdamW`` in FP32, which fine-tunes
            the models of all of them (default: none).
    """

    training: Training
    recipe: Recipe
    precisions: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Its folder in the experiment's."""
        return self.training.name

    @property
    def settings(self) -> Mapping[str, object]:
        """Of the pre-training and the fine-tuning."""
        own = {"fine_tuning": asdict(self.recipe), "tasks": [*TASKS]}
        if self.precisions:
            own["precisions"] = [*self.precisions]
        return {**self.training.settings, **own}

    def run(self, folder: Path, watch: Watch) -> Found:
        """Train and fine-tune, or go on; what a model has reached is kept."""
        run = folder / "pre-training"
        found = [self.training.run(run, watch)]
        config = self.training.config
        for fit in self._fits(config.variants):
            for seed in config.seeds:
                name = f"{fit.case}, seed {seed}"
                measure = partial(self._fitted, run, fit, seed)
                part = Measurement(f"{self.name}: fine-tuning {name}", measure)
                found.append(part.run(folder / name.replace(", ", "-").replace(" ", "-"), watch))
        return Found.of_all(found)

    def _fits(self, variants: Sequence[str]) -> list[_Fit]:
        if not self.precisions:
            return [
                _Fit(UNTRAINED, variants[0], None),
                *(_Fit(name, name, None) for name in variants),
            ]
        return [
            _Fit(UNTRAINED, variants[0], self.precisions[0]),
            *(_Fit(name, variants[0], name) for name in self.precisions),
        ]

    def _fitted(self, run: Path, fit: _Fit, seed: int) -> Found:
        config = self.training.config
        assert isinstance(config, LMConfig)
        trained = load(run, fit.model, seed, device=config.device)
        assert isinstance(trained, Trained)
        assert trained.built.tokenizer is not None
        model = trained.model
        if fit.case == UNTRAINED:
            torch.manual_seed(seed)
            model = build(trained.built.shape).to(trained.device)
            if trained.built.activations == "bf16":
                use_bf16(model)
        elif trained.built.variant.is_mixture:
            # Plain layers, however it was pre-trained: only what was learned differs.
            convert_from_mor(model)
        assert isinstance(model, BERT)
        parts = _parts(config.data)
        case = f"{self.training.case} {fit.case}".strip()
        scores, peaks = [], []
        # The last bits of matrix products depend on the number of threads.
        with thread_count(config.threads):
            for name, task in TASKS.items():
                train, test = (
                    Examples(task.examples(Material(part, i), count), trained.built.tokenizer)
                    for i, (part, count) in enumerate(
                        zip(parts, (self.recipe.examples, self.recipe.tested), strict=True)
                    )
                )
                arguments = (model, task, train)
                score = fine_tuned(*arguments, test, self.recipe, seed, fit.precision)
                scores.append(Observation(case, name, score, seed))
                if fit.precision is not None:
                    peaks.append(peak_bytes(*arguments, self.recipe, seed, fit.precision))
        average = statistics.fmean(o.value for o in scores)
        found = [*scores, Observation(case, AVERAGE, average, seed)]
        if peaks:
            found.append(Observation(case, PEAK, max(peaks) / 2**20, seed))
        return Found(tuple(found))


@dataclass(frozen=True)
class _Fit:
    """What is called ``case``: which pre-trained model, or one of its shape, in which precision."""

    case: str
    model: str
    precision: str | None


def _parts(data: str | Path | None) -> tuple[str, str]:
    """The text that models are pre-trained on, and the rest."""
    name, raw = read_text(data)
    text = decoded(raw, f"data={name}")
    cut = len(text) - int(len(text) * VALIDATION_SHARE)
    return text[:cut], text[cut:]


class Examples:
    """Examples as tokens.

    Args:
        examples: The examples, at least one.
        tokenizer: What tokens are made by, see :mod:`..tasks.lm.bpe`.

    Raises:
        ValueError: There are none: the text has too few lines.
    """

    def __init__(self, examples: list[Example], tokenizer: str) -> None:
        if not examples:
            raise ValueError("data has no sentences to make tasks of: give a longer text in lines")
        read = bpe.read(tokenizer)
        (self.end,) = read.encode("\n").ids
        self.tokens: list[list[int]] = []
        for first, second, _ in examples:
            behind = [] if second is None else [self.end, *read.encode(second).ids]
            self.tokens.append([*read.encode(first).ids, *behind])
        self.answers = torch.tensor([example.answer for example in examples])

    def batch(self, chosen: Tensor, context: int) -> Tensor:
        """Tokens ``(batch, context)``: ends of lines fill up, what is too long is cut off."""
        ids = torch.full((len(chosen), context), self.end)
        for row, i in zip(ids, chosen.tolist(), strict=True):
            own = torch.tensor(self.tokens[i][:context])
            row[: len(own)] = own
        return ids


class Classifier(nn.Module):
    """An encoder, the mean of its vectors but those of ends of lines, and two layers on it.

    BERT's first token has no meaning here, as the next sentence is not pre-trained.

    Args:
        encoder: The model; its parameters are copied, in FP32.
        classes: Number of answers.
        end: The token of an end of line.
    """

    def __init__(self, encoder: BERT, classes: int, end: int) -> None:
        super().__init__()
        self.encoder = copy.deepcopy(encoder).float().requires_grad_(True)
        self.end = end
        width = encoder.tokens.weight.shape[1]
        self.hidden = nn.Linear(width, width)
        self.out = nn.Linear(width, classes)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits of tokens ``(batch, time)``."""
        counted = (ids != self.end).unsqueeze(-1).float()
        vectors = self.encoder.encoded(ids).float() * counted
        mean = vectors.sum(1) / counted.sum(1).clamp(min=1)
        logits: Tensor = self.out(torch.tanh(self.hidden(mean.to(self.hidden.weight.dtype))))
        return logits.float()


class _Run:
    """One fine-tuning, step by step.

    Args:
        encoder: The model, which stays as it is.
        task: The task.
        train: Examples to train on.
        recipe: How.
        seed: Of the two layers, the order of examples and random bits.
        precision: Of :class:`subulp.optim.AdamW`, with parameters in BF16 but for ``"fp32"``, and
            with the step inside the backward pass where it has extra bits; ``None`` for
            ``torch.optim.AdamW`` in FP32.
    """

    def __init__(
        self,
        encoder: BERT,
        task: SentenceTask,
        train: Examples,
        recipe: Recipe,
        seed: int,
        precision: str | None,
    ) -> None:
        positions = encoder.positions
        assert positions is not None
        self.context = positions.weight.shape[0]
        torch.manual_seed(seed)
        self.device = encoder.tokens.weight.device
        self.model = Classifier(encoder, task.classes, train.end).to(self.device)
        # What predicts masked tokens has no gradient here.
        self.optimizer = self._optimizer(recipe, seed, precision)
        self.train, self.batch = train, recipe.batch
        steps = recipe.epochs * math.ceil(len(train.tokens) / recipe.batch)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: min((step + 1) / (_WARMUP * steps), 1 - step / steps, 1.0)
        )

    def _optimizer(self, recipe: Recipe, seed: int, precision: str | None) -> torch.optim.Optimizer:
        if precision is None:
            return torch.optim.AdamW(self.model.parameters(), lr=recipe.lr, weight_decay=_DECAY)
        if precision != "fp32":
            self.model.bfloat16()
        optimizer = optim.AdamW(
            self.model.parameters(),
            lr=recipe.lr,
            weight_decay=_DECAY,
            precision=precision,
            seed=seed,
        )
        if precision.startswith("extra-bits"):
            optim.fuse_backward(self.model, optimizer)
        return optimizer

    def order(self) -> Sequence[Tensor]:
        """The examples of each step of an epoch."""
        return torch.split(torch.randperm(len(self.train.tokens)), self.batch)

    def step(self, chosen: Tensor) -> None:
        """One step on some examples."""
        logits = self.model(self.train.batch(chosen, self.context).to(self.device))
        loss = F.cross_entropy(logits, self.train.answers[chosen].to(self.device))
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.schedule.step()


def peak_bytes(
    encoder: BERT,
    task: SentenceTask,
    train: Examples,
    recipe: Recipe,
    seed: int,
    precision: str,
) -> int:
    """Live bytes of tensors at the peak of the second step; the arguments of :func:`fine_tuned`."""
    run = _Run(encoder, task, train, recipe, seed, precision)
    chosen = run.order()[0]
    # The first step makes the states.
    run.step(chosen)
    with track_memory(run.model, run.optimizer) as memory:
        run.step(chosen)
    return memory.peak_bytes["total"]


def fine_tuned(
    encoder: BERT,
    task: SentenceTask,
    train: Examples,
    test: Examples,
    recipe: Recipe,
    seed: int,
    precision: str | None = None,
) -> float:
    """The share of answers that are right, or their Matthews correlation, after fine-tuning.

    Args:
        encoder: The model, which stays as it is.
        task: The task.
        train: Examples to train on.
        test: Examples to measure on.
        recipe: How.
        seed: Of the two layers, the order of examples and random bits.
        precision: Of :class:`subulp.optim.AdamW`, see :class:`_Run` (default: ``None``).
    """
    run = _Run(encoder, task, train, recipe, seed, precision)
    for _ in range(recipe.epochs):
        for chosen in run.order():
            run.step(chosen)
    with torch.no_grad():
        parts = torch.split(torch.arange(len(test.tokens)), _TESTED_AT_ONCE)
        ids = (test.batch(part, run.context).to(run.device) for part in parts)
        answers = [run.model(batch).argmax(1) for batch in ids]
    return score(torch.cat(answers).cpu(), test.answers, matthews=task.matthews)


def score(answers: Tensor, right: Tensor, *, matthews: bool) -> float:
    """The share of answers that are right, or Matthews' correlation: 0 if all are the same.

    Args:
        answers: Numbers of classes.
        right: The right ones.
        matthews: Which of both.
    """
    if not matthews:
        return float((answers == right).double().mean())
    # Of two classes it is Pearson's of their numbers.
    a, b = (x.double() - x.double().mean() for x in (answers, right))
    scale = float(a.norm() * b.norm())
    return float(a @ b) / scale if scale else 0.0

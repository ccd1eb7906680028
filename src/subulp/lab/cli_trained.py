"""Commands that use trained models. Everything heavy is imported by the command that needs it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO, Literal

from cyclopts import Parameter

from . import console

if TYPE_CHECKING:
    from .engine.trained import TrainedModel

Device = Literal["auto", "cpu", "cuda"]
Weights = Literal["stored", "full"]


def predict(
    run: Path,
    file: Path,
    *,
    precision: str | None = None,
    seed: int | None = None,
    k: Annotated[int | None, Parameter(show_default=False)] = None,
    format: Literal["jsonl", "tsv"] = "jsonl",
    out: Path | None = None,
    batch_size: int = 256,
    weights: Weights = "stored",
    device: Device = "auto",
) -> int:
    """Predict with a model that `train xmc`, `train image` or `train ctr` made.

    For example, three labels of each text as a table:

        subulp predict runs/xmc texts.txt --precision fp8 --k 3 --format tsv --out labels.tsv

    Args:
        run: The run directory.
        file: xmc: a text a line, UTF-8; for a model of a bag-of-words data set, feature:value
            feature:value ... a line. image: a picture a line, its pixels with commas between them,
            or a NumPy array. ctr: lines as the training data has them, with or without the label.
            Text may be .gz.
        precision: Precision of the model; without it, the best one is taken and named.
        seed: Seed of the model, likewise.
        k: Labels per instance, for xmc and image; by default 5.
        format: jsonl, one object per instance; or tsv, a header and rows. Instances count from 1;
            a header and, for image and ctr, empty lines are none.
        out: File to write, which is replaced; without it, standard output.
        batch_size: Instances per batch.
        weights: stored: the weights as the run stored and measured them; full: in FP32, rebuilt
            from all that its optimizer kept.
        device: Where to predict; auto uses a GPU if one is available.
    """
    from .engine.run_directory import check_output  # noqa: PLC0415

    if out is not None:
        check_output(out)
    model = _chosen(run, precision, seed, weights, device)
    with _written(out, file) as target:
        count = model.predict_file(file, target, k=k, form=format, batch=batch_size)
    if out is not None:
        _say(f"wrote {out}: {count:,} {'line' if count == 1 else 'lines'}")
    return 0


def sample(
    run: Path,
    *,
    prompt: str,
    precision: str | None = None,
    seed: int | None = None,
    length: int = 200,
    temperature: float = 1.0,
    top: int | None = None,
    sampling_seed: int = 0,
    weights: Weights = "stored",
    device: Device = "auto",
) -> int:
    """Continue a text with a model that `train lm` made.

    For example:

        subulp sample runs/lm --prompt "To be, or not" --temperature 0.7

    Args:
        run: The run directory.
        prompt: The text to continue, of characters that the training text has.
        precision: Precision of the model; without it, the best one is taken and named.
        seed: Seed of the model, likewise.
        length: Characters, bytes or tokens to add, as the model has them.
        temperature: Below 1 keeps to what is probable, above 1 departs from it; 0 always takes the
            most probable.
        top: Draw from so many of the most probable characters; by default from all.
        sampling_seed: Seed of what is drawn: the same one gives the same text.
        weights: stored: the weights as the run stored and measured them; full: in FP32, rebuilt
            from all that its optimizer kept.
        device: Where to compute; auto uses a GPU if one is available.
    """
    model = _chosen(run, precision, seed, weights, device)
    added = model.sample(prompt, length, temperature=temperature, top=top, seed=sampling_seed)
    with _standard_output() as target:
        target.write(prompt.encode("utf-8", "surrogateescape") + added + b"\n")
    return 0


def evaluate(
    run: Path,
    *,
    data: str | None = None,
    precision: str | None = None,
    seed: int | None = None,
    weights: Weights = "stored",
    device: Device = "auto",
    json: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Measure trained models of a run again, on its own test data or on other data.

    For example, the language models of a run on another text:

        subulp evaluate runs/lm --data sonnets.txt

    Args:
        run: The run directory.
        data: lm: a text file; image: digits, generated or cifar10:DIR; xmc: a folder with the same
            labels; ctr: files with the columns of the training data, or criteo:FILE and the like.
            Without it, the test part that the run has measured on.
        precision: Precision of the models; by default all.
        seed: Seed of the models; by default all.
        weights: stored: the weights as the run stored and measured them; full: in FP32, rebuilt
            from all that its optimizer kept.
        device: Where to compute; auto uses a GPU if one is available.
        json: Print one JSON object instead of the table.
    """
    from .engine.metrics import to_json  # noqa: PLC0415
    from .engine.run_directory import task_of_run  # noqa: PLC0415
    from .engine.saved_model import choose_models  # noqa: PLC0415
    from .engine.task import task_named  # noqa: PLC0415
    from .engine.trained import evaluate as evaluate_model  # noqa: PLC0415
    from .report.terminal_table import print_evaluations  # noqa: PLC0415

    found = [
        (*name, evaluate_model(run, name, data=data, weights=weights, device=device))
        for name in choose_models(run, precision, seed)
    ]
    if json:
        runs = [
            {"precision": variant, "seed": own_seed, **measured}
            for variant, own_seed, measured in found
        ]
        console.show(to_json({"data": data, "weights": weights, "runs": runs}))
    else:
        task = task_of_run(run)
        assert task is not None
        print_evaluations(console.output(), task_named(task).METRICS, found)
    return 0


def _chosen(
    run: Path, precision: str | None, seed: int | None, weights: Weights, device: Device
) -> TrainedModel:
    """The best model of those that are meant; it is named if there are others."""
    from .engine.saved_model import choose_models  # noqa: PLC0415
    from .engine.trained import load_named  # noqa: PLC0415

    best, *others = choose_models(run, precision, seed)
    if others:
        _say(
            f"with {best}, the best of {1 + len(others)} models; choose another with --precision "
            "and --seed"
        )
    return load_named(run, best, weights, device)


def _say(words: str) -> None:
    console.say(words)


@contextmanager
def _written(out: Path | None, source: Path) -> Iterator[BinaryIO]:
    """The file to write, whole or not there; standard output without one."""
    from .engine.files import replacing  # noqa: PLC0415

    if out is None:
        with _standard_output() as target:
            yield target
        return
    if out.exists() and source.exists() and out.samefile(source):
        raise ValueError(f"out={out} is the file that is read: give another name")
    with replacing(out) as unfinished, unfinished.open("wb") as file:
        yield file


@contextmanager
def _standard_output() -> Iterator[BinaryIO]:
    if sys.stdout is None:
        # It was closed before the program began.
        with open(os.devnull, "wb") as null:
            yield null
        return
    try:
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        # The reader, such as head, has seen enough. Nothing is left for the interpreter to flush
        # into the closed pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

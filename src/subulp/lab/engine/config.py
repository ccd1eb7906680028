"""The configuration of a comparison: one frozen object, one option per field.

The command line makes its options and their help from the tasks' configurations, so a field needs
a type, a default and a docstring, and nothing else. Annotations are objects here and in the tasks'
configurations, not strings: a subclass's are looked up in its own module, which lacks these names.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar, cast

from cyclopts import Group, Parameter, Token


class Option(Parameter):
    """A parameter that cyclopts alone converts and checks.

    Once pydantic is imported, cyclopts lets it check every value again, and it rejects a
    :class:`Default`.
    """

    def __get_pydantic_core_schema__(self, source: object, handler: object) -> dict[str, str]:
        return {"type": "any"}


COMPARED = Option(group=Group("What is compared", sort_key=0))
MODEL = Option(group=Group("Model", sort_key=1))
OPTIMIZER = Option(group=Group("Optimizer", sort_key=2))
MEASURED = Option(group=Group("Measurements", sort_key=3))
CHECKPOINTS = Option(group=Group("Checkpoints", sort_key=4))
MACHINE = Option(group=Group("Machine", sort_key=5))

MOST_STEPS = 10**9
"""Steps of a run: more have no end."""

MOST_THREADS = 1024
"""Threads of a run, also where there are fewer cores: the last bits depend on their number."""

T = TypeVar("T")


@dataclass(frozen=True)
class Default:
    """The value of a field that nobody set.

    Attributes:
        value: The value unless a preset decides.
    """

    value: Any

    def __str__(self) -> str:
        return str(self.value)

    __repr__ = __str__


def overridable(value: T) -> T:
    """A default that a preset may replace, unlike the same value given explicitly.

    The configuration's ``__post_init__`` puts a value in its place, so fields have their type.
    """
    return cast(T, Default(value))


def _list_text(values: Sequence[object] | Default) -> str:
    return ",".join(map(str, values.value if isinstance(values, Default) else values))


def _names(type_: object, tokens: Sequence[Token]) -> tuple[str, ...]:
    return tuple(part.strip() for token in tokens for part in token.value.split(","))


def _a_list(
    converter: Callable[[object, Sequence[Token]], tuple[object, ...]],
    name: tuple[str, ...] | None = None,
) -> Parameter:
    return Option(
        name=name,
        converter=converter,
        negative=(),
        group=COMPARED.group,
        show_default=_list_text,
    )


def numbers(
    name: str, kind: type[int] | type[float], example: str, options: tuple[str, ...] | None = None
) -> Parameter:
    """A list of numbers separated by commas.

    Args:
        name: The field, for messages.
        kind: Type of the numbers.
        example: A list, for messages.
        options: Names of the option; ``None`` takes the name of the field (default: ``None``).
    """
    noun = "integers" if kind is int else "numbers"

    def convert(type_: object, tokens: Sequence[Token]) -> tuple[float, ...]:
        try:
            return tuple(kind(part) for part in _names(type_, tokens))
        except ValueError:
            given = ",".join(token.value for token in tokens)
            raise ValueError(
                f"{name}={given} is not a list of {noun}: give one, or several as in {example}"
            ) from None

    return _a_list(convert, options)


NAMES = _a_list(_names)
"""A list of names separated by commas."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Options that every task has: one run for every precision and seed.

    Raises:
        ValueError: A field is out of range, or two fields contradict each other.
    """

    task: ClassVar[str]

    decides: ClassVar[tuple[str, ...]] = ()
    """Fields that decide defaults of other fields."""

    data_fields: ClassVar[tuple[str, ...]] = ("data",)
    """Fields that say where the data is; a digest identifies its content."""

    earlier: ClassVar[dict[str, Any]] = {"max_norm": None}
    """Values of fields that the files of earlier versions lack: what those did."""

    precision: Annotated[tuple[str, ...], NAMES]
    """Precisions to compare, separated by commas."""

    seeds: Annotated[
        tuple[int, ...],
        numbers("seeds", int, "0,1,2", ("--seed", "--seeds")),
    ] = (0,)
    """Seed of initial weights, data order, dropout and stochastic rounding. A list, as in 0,1,2,
    repeats every precision and reports mean and spread."""

    fuse_backward: Annotated[bool, OPTIMIZER] = False
    """Step each parameter inside the backward pass and free its gradient at once; same result."""

    max_norm: Annotated[float | None, OPTIMIZER] = None
    """Largest norm of all gradients together, as of torch's clip_grad_norm_: larger ones are scaled
    down to it. Rows of tables and of classifiers, which update themselves, are not among them. With
    --fuse-backward it costs a second backward pass."""

    nonfinite: Annotated[Literal["raise", "skip", "propagate", "rollback"] | None, OPTIMIZER] = None
    """What to do about an infinite or NaN gradient: raise by default. With --fuse-backward the
    default is propagate, because raise, skip and rollback cost a second backward pass; a loss that
    is not finite still ends the run. rollback returns to the last checkpoint with the learning rate
    halved, and needs --checkpoint-every."""

    max_skips: Annotated[int | None, OPTIMIZER] = None
    """Consecutive steps that may be skipped because they are not finite, under --nonfinite skip or
    by a loss scaler, before the run ends; 100 by default."""

    max_rollbacks: Annotated[int | None, OPTIMIZER] = None
    """Rollbacks before a run ends, under --nonfinite rollback; 5 by default."""

    watch_every: Annotated[int, MEASURED] = 100
    """Steps between measurements of what the optimizer loses to rounding."""

    log_every: Annotated[int, MEASURED] = 25
    """Steps between lines of metrics.jsonl."""

    checkpoint_every: Annotated[int | None, CHECKPOINTS] = None
    """Steps between checkpoints; every new best evaluation and the end write one too. 0 writes none
    until the run is stopped. By default one every ten minutes."""

    keep_checkpoints: Annotated[int, CHECKPOINTS] = 2
    """Newest checkpoints of a run to keep, besides the one of the best evaluation."""

    threads: Annotated[int, MACHINE] = 1
    """CPU threads of each run, or of each of its ranks. The last bits of matrix products depend on
    their number."""

    device: Annotated[Literal["auto", "cpu", "cuda"], MACHINE] = "auto"
    """Device to train on; auto uses a GPU if one is available."""

    def __post_init__(self) -> None:
        self._resolve()
        self.check()
        self.check_effects()

    def _resolve(self) -> None:
        """Give every field the value that was given, else its default."""
        self._fill_defaults({})

    def check(self) -> None:
        """Compare the fields with their ranges and with each other.

        Raises:
            ValueError: A field is out of range, or two fields contradict each other.
        """
        for name in ("precision", "seeds"):
            check_list(name, getattr(self, name))
        check_fields(self, ("log_every", "keep_checkpoints"), 1)
        check_threads(self.threads)
        # The second step is measured for memory, and must not carry the copies of the watch.
        check_fields(self, ("watch_every",), 2)
        check_fields(self, ("checkpoint_every",), 0)
        check_fields(self, ("seeds",), 0, 2**32 - 1)
        if self.max_norm is not None and not 0 < self.max_norm < math.inf:
            raise ValueError(
                f"max_norm={self.max_norm} is out of range: give a number above 0, or leave it out"
            )
        self._check_recovery()

    def check_effects(self) -> None:
        """Refuse what is given and would change nothing. Files of earlier versions may have it.

        Raises:
            ValueError: Something would.
        """
        if self.checkpoint_every == 0:
            self._refuse(("keep_checkpoints",), "checkpoint_every=0, which never has more than one")

    def _refuse(self, names: Iterable[str], where: str) -> None:
        """Raise ValueError for a field that is not at its default and has no effect there."""
        for field in fields(self):
            value, default = getattr(self, field.name), field.default
            plain = default.value if isinstance(default, Default) else default
            if field.name in names and value != plain:
                text = ",".join(map(str, value)) if isinstance(value, tuple) else value
                raise ValueError(
                    f"{field.name}={text} has no effect on {where}: leave {field.name} out"
                )

    def _fill_defaults(self, decided: Mapping[str, Any]) -> None:
        """Give every :func:`overridable` field that was not set its value.

        Args:
            decided: Values by name, such as a preset's, that replace defaults.
        """
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Default):
                chosen = decided.get(field.name, value.value)
                object.__setattr__(self, field.name, chosen)  # The class is frozen.

    def _decided_epochs(self) -> dict[str, Any]:
        """What ``steps`` decides about ``epochs``, in a task that has both.

        Raises:
            ValueError: Both are given.
        """
        steps, epochs = getattr(self, "steps"), getattr(self, "epochs")  # noqa: B009
        if steps is None:
            return {}
        if epochs is not None and not isinstance(epochs, Default):
            raise ValueError(
                f"steps={steps} and epochs={epochs} contradict each other: give one of the two"
            )
        return {"epochs": None}

    def _check_length(self) -> None:
        """Compare ``steps`` and ``epochs``, in a task that has both."""
        # The second step is measured for memory.
        check_fields(self, ("steps",), 2, MOST_STEPS)
        check_fields(self, ("epochs",), 1, MOST_STEPS)
        steps, epochs = getattr(self, "steps"), getattr(self, "epochs")  # noqa: B009
        if steps is None and epochs is None:
            raise ValueError("steps and epochs are both missing: give one of the two")

    def _check_recovery(self) -> None:
        back = self.nonfinite == "rollback"
        if back and not self.checkpoint_every:
            raise ValueError(
                f"nonfinite=rollback and checkpoint_every={self.checkpoint_every} contradict each "
                "other: it goes back to a checkpoint at a known step; give checkpoint_every"
            )
        for name, used, needed in (
            ("max_skips", self.may_skip, "steps are skipped under nonfinite=skip, or by a scaler"),
            ("max_rollbacks", back, "runs roll back under nonfinite=rollback"),
        ):
            value = getattr(self, name)
            if value is None:
                continue
            check_range(name, value, 1)
            if not used:
                raise ValueError(f"{name}={value} has no effect: {needed} alone; leave it out")

    @property
    def may_skip(self) -> bool:
        """Whether steps that are not finite may be skipped."""
        return self.nonfinite == "skip"

    @property
    def variants(self) -> tuple[str, ...]:
        """Names of the runs of one seed: the precisions, unless a task varies more."""
        return self.precision

    def settings(self, variant: str) -> dict[str, Any]:
        """Settings of a variant as plain JSON: ``"precision"`` and what else the task varies."""
        return {"precision": variant}

    def located(self) -> Self:
        """The same comparison with absolute paths, so that it resumes in any working directory."""
        found = copy(self)
        for field in fields(self):
            value = self._located(field.name, getattr(self, field.name))
            object.__setattr__(found, field.name, value)  # The class is frozen.
        return found

    def _located(self, name: str, value: Any) -> Any:
        """The value of a field with absolute paths."""
        return value.absolute() if isinstance(value, Path) else value

    @property
    def gradient_policy(self) -> Literal["raise", "skip", "propagate"]:
        """The optimizer's ``nonfinite``; the training loop does the rest."""
        if self.nonfinite == "rollback":
            return "raise"
        return self.nonfinite or ("propagate" if self.fuse_backward else "raise")


def check_list(name: str, values: tuple[object, ...]) -> None:
    """Raise ValueError if the list of an option is empty or repeats itself."""
    if not values or "" in values:
        raise ValueError(f"{name} is empty, or has an empty entry: give at least one")
    twice = sorted({str(v) for v in values if values.count(v) > 1})
    if twice:
        raise ValueError(f"{name} repeats {', '.join(twice)}: give each once")


def check_names(name: str, given: Iterable[str], known: Sequence[str]) -> None:
    """Raise ValueError if a value of an option is not one that is known."""
    for value in given:
        if value not in known:
            raise ValueError(f"{name}={value!r} is unknown: use one of {', '.join(known)}")


def check_fields(
    config: RunConfig,
    names: Iterable[str],
    low: float,
    high: float = math.inf,
    *,
    top_included: bool = True,
) -> None:
    """:func:`check_range` on every number in these fields; ``None`` passes."""
    for name in names:
        value = getattr(config, name)
        for number in value if isinstance(value, tuple) else (value,):
            if number is not None:
                check_range(name, number, low, high, top_included=top_included)


def parameter_dtype(name: str, precision: str, dtype: Literal["bf16", "fp16"]) -> str:
    """The name in torch of the dtype that parameters have under a strategy.

    Args:
        name: Field that gave the strategy.
        precision: The strategy; under ``fp32`` parameters are in FP32.
        dtype: Of parameters under all others.

    Raises:
        ValueError: The strategy is unknown, or not available for the dtype.
    """
    if precision == "fp32":
        return "float32"
    # Torch takes a second to import, which help need not wait for.
    import torch  # noqa: PLC0415

    from ...optim import parse_precision  # noqa: PLC0415
    from ...optim.options import strategy_for  # noqa: PLC0415

    found = {"bf16": "bfloat16", "fp16": "float16"}[dtype]
    try:
        strategy_for(parse_precision(precision), getattr(torch, found))
    except ValueError as error:
        raise ValueError(f"{name}={precision}: {error}") from None
    return found


def check_threads(threads: int) -> None:
    """Raise ValueError if there can be no so many threads: making them would end the process."""
    check_range("threads", threads, 1, MOST_THREADS)


_FP32_MAX = (2 - 2**-23) * 2.0**127


def check_range(
    name: str, value: float, low: float, high: float = math.inf, *, top_included: bool = True
) -> None:
    """Raise ValueError unless ``low <= value <= high`` (``< high`` without the top)."""
    # An integer may be beyond any float, and has a limit of its own.
    finite = isinstance(value, int) or abs(value) <= _FP32_MAX
    if finite and low <= value and (value < high or (top_included and value == high)):
        return
    if high == math.inf:
        wanted = f"at least {low}, and a number that FP32 has"
        if isinstance(value, int) or not value > _FP32_MAX:
            wanted = f"at least {low}"
    else:
        wanted = f"from {low} to {high}" + ("" if top_included else ", which is excluded")
    raise ValueError(f"{name}={value} is out of range: give {wanted}")

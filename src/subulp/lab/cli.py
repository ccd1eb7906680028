"""The command line. Everything heavy is imported by the command that needs it."""

from __future__ import annotations

import errno
import re
import signal
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from cyclopts import (
    App,
    ArgumentCollection,
    CycloptsError,
    Group,
    Parameter,
    UnknownOptionError,
    UnusedCliTokensError,
)
from cyclopts.config import Dict

from .._version import version
from . import console
from .cli_reproduce import reproduce
from .cli_trained import evaluate, predict, sample
from .engine.config import CHECKPOINTS, MACHINE, RunConfig
from .engine.launched import Silent, is_first, speaker_of
from .launch import RanksWanted, launch, want_ranks
from .tasks.ctr.config import CTRConfig
from .tasks.image.config import ImageConfig
from .tasks.lm.config import LMConfig
from .tasks.xmc.config import XMCConfig

if TYPE_CHECKING:
    from rich.console import Console

    from .compare import Comparison

FAILED = 1
WRONG_INPUT = 2
INTERRUPTED = 130
_BY_SIGNAL = 128

_CONFIG = "--config"

_FILE = Parameter(group=Group("Options from a file", sort_key=-1))
_OUTPUT = Parameter(group=Group("Output", sort_key=6), negative=())

app = App(
    name="subulp",
    help="""Training in low precision without losing what low precision rounds away.

    Exit codes: 0, done; 1, a run diverged or a check failed; 2, wrong input, named in one line;
    130, Ctrl-C; 143, SIGTERM. The last two leave checkpoints to resume from.
    """,
    version=version,
    version_flags=["--version"],
    help_flags=["--help", "-h"],
    console=console.pages(),
)
train = App(
    name="train",
    help="""Train on real data under several precisions, and compare them.

    A run that was stopped with Ctrl-C, or killed, resumes bit for bit from its last
    checkpoint:

        subulp train --resume RUN
    """,
)
app.command(train)
data = App(name="data", help="Build data sets in the form that the tasks read.")
app.command(data)


def _from_file(app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Take options that the command line does not set from the file of ``--config``."""
    file = next((a for a in arguments if a.name == _CONFIG), None)
    if file is None or not file.tokens:
        return
    from .engine.config_file import Option, read_config  # noqa: PLC0415

    options = [
        Option(
            tuple(name.removeprefix("--") for name in a.names if name not in a.negatives), a.hint
        )
        for a in arguments
        if a.name.startswith("--") and a.name != _CONFIG
    ]
    path = Path(file.tokens[0].value)
    values: dict[str, Any] = read_config(path, commands[-1], options)
    # By command: at the top of the file, cyclopts would take the key data for the command.
    for command in reversed(commands):
        values = {command: values}
    Dict(values, source=str(path))(app, commands, arguments)


def _whole_numbers(app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Refuse fractions where whole numbers are asked for: cyclopts would round them."""
    for argument in arguments:
        kinds = set(get_args(argument.hint) or (argument.hint,)) - {type(None)}
        for token in argument.tokens if kinds == {int} else ():
            if _is_fraction(token.value):
                raise ValueError(
                    f'Invalid value "{token.value}" for "{argument.name}": it is no whole number'
                )


def _is_fraction(text: str) -> bool:
    """Whether it is a number that is not written as a whole one."""
    try:
        float(text)
    except ValueError:
        return False
    try:
        int(text)
    except ValueError:
        return True
    return False


app.config = (_whole_numbers,)
train.config = (_from_file, _whole_numbers)
# main() turns Ctrl-C into an exit code.
app.suppress_keyboard_interrupt = app.meta.suppress_keyboard_interrupt = False


@dataclass(frozen=True, kw_only=True)
class Output:
    """Where options come from and results go."""

    config: Annotated[Path | None, _FILE] = None
    """TOML file whose keys are names of options, as in steps = 500 and seeds = [0, 1], or
    config.json of an earlier run; options on the command line take precedence."""

    out: Annotated[Path | None, _OUTPUT] = None
    """Run directory to make, for config.json, metrics.jsonl, summary.json, report.html, plots and
    checkpoints; without it, runs/TASK-TIMESTAMP."""

    overwrite: Annotated[bool, _OUTPUT] = False
    """Replace an earlier run in --out."""

    jobs: Annotated[int | None, MACHINE] = None
    """Runs that train at the same time; one per core by default. It changes no result."""

    ranks: Annotated[int | None, MACHINE] = None
    """Processes that make each run together, each with its part of every batch; started here by
    torchrun, which may also start this command itself, on several machines for instance."""

    parallel: Annotated[Literal["ddp", "fsdp"] | None, MACHINE] = None
    """How ranks share dense parameters: ddp, each has all of them, or fsdp, each has a shard. Rows
    of heads and tables are split either way. ddp by default."""

    log: Annotated[Literal["tensorboard"] | None, _OUTPUT] = None
    """Write TensorBoard's event files too, into the folder tensorboard of the run; it needs
    pip install tensorboard."""

    json: Annotated[bool, _OUTPUT] = False
    """Print one JSON object instead of the table."""


@train.command(name="lm")
def train_lm(
    config: Annotated[LMConfig, Parameter(name="*")] = LMConfig(),  # noqa: B008 - frozen
    output: Annotated[Output, Parameter(name="*")] = Output(),
) -> int:
    """Train a small GPT once for every precision and seed, and show what each precision lost.

    For example, two precisions over three seeds, each step inside the backward pass:

        subulp train lm --precision master,collage-light --seeds 0,1,2 --fuse-backward
    """
    return _compare(config, output)


@train.command(name="image")
def train_image(
    config: Annotated[ImageConfig, Parameter(name="*")] = ImageConfig(),  # noqa: B008 - frozen
    output: Annotated[Output, Parameter(name="*")] = Output(),
) -> int:
    """Train a ResNet-18 once for every precision and seed, and show what each precision lost.

    For example, FP16 with eight extra bits against mixed precision, on CIFAR-10:

        subulp train image --precision amp,extra-bits-8 --data cifar10:DIR
    """
    return _compare(config, output)


@train.command(name="xmc")
def train_xmc(
    config: Annotated[XMCConfig, Parameter(name="*")] = XMCConfig(),  # noqa: B008 - frozen
    output: Annotated[Output, Parameter(name="*")] = Output(),
) -> int:
    """Train a classifier over very many labels once for every storage of its rows and seed.

    For example, FP8 rows against mixed precision on a data set of the Extreme Classification
    Repository:

        subulp train xmc --precision renee,fp8 --data DIR
    """
    if config.preset is not None:
        from .tasks.xmc.presets import describe  # noqa: PLC0415

        _errors().print(describe(config.preset))
    return _compare(config, output)


@train.command(name="ctr")
def train_ctr(
    config: Annotated[CTRConfig, Parameter(name="*")] = CTRConfig(),  # noqa: B008 - frozen
    output: Annotated[Output, Parameter(name="*")] = Output(),
) -> int:
    """Train a click-through-rate model once for every precision, rounding and cache of its tables.

    For example, INT8 and INT4 rows with no cache and one of 5 % of the rows, over three seeds:

        subulp train ctr --precision fp32,int8,int4 --cache-fraction 0,0.05 --seeds 0,1,2
    """
    return _compare(config, output)


@train.default
def train_resume(
    *task: Annotated[str, Parameter(show=False, allow_leading_hyphen=True)],
    resume: Annotated[Path | None, CHECKPOINTS] = None,
    jobs: Annotated[int | None, MACHINE] = None,
    ranks: Annotated[int | None, MACHINE] = None,
    parallel: Annotated[Literal["ddp", "fsdp"] | None, MACHINE] = None,
    json: Annotated[bool, _OUTPUT] = False,
) -> int:
    """Resume a training run that was stopped or killed.

    Args:
        task: Not given: the run directory names its task.
        resume: Run directory to resume, each of its runs from its last checkpoint.
        jobs: Runs that train at the same time; one per core by default. It changes no result.
        ranks: Processes that make each run together; by default as many as it was started with.
            Another number rounds sums in another order.
        parallel: How they share dense parameters; by default as before.
        json: Print one JSON object instead of the table.
    """
    if task and task[0].startswith("-"):
        raise ValueError(
            f"Unknown option: {task[0]}"
            + (
                "; --resume keeps the options that the run was started with, and takes only "
                "--jobs, --ranks, --parallel and --json"
                if resume
                else ""
            )
        )
    if task:
        known = ", ".join(name for name in train if not name.startswith("-"))
        raise ValueError(f'Unknown command "{task[0]}": use one of {known}')
    if resume is None:
        given = {"jobs": jobs, "ranks": ranks, "parallel": parallel, "json": json}
        for name, value in given.items():
            if value:
                raise ValueError(f"{name}={value} and no task: name one, or give --resume RUN")
        train.help_print()
        return 0
    from .compare import resume as resume_comparison  # noqa: PLC0415
    from .engine.progress import reporter  # noqa: PLC0415
    from .engine.run_directory import read_ranks  # noqa: PLC0415

    want_ranks(read_ranks(resume)[0] if ranks is None else ranks, ranks)
    errors = _errors()
    found = resume_comparison(
        resume, jobs=jobs, parallel=parallel, reporter=lambda plan: reporter(plan, errors)
    )
    return _show(found, errors, json=json)


def _compare(config: RunConfig, output: Output) -> int:
    from .compare import compare  # noqa: PLC0415
    from .engine.progress import reporter  # noqa: PLC0415

    want_ranks(output.ranks, output.ranks)
    errors = _errors()
    found = compare(
        config,
        out=output.out,
        overwrite=output.overwrite,
        jobs=output.jobs,
        parallel=output.parallel,
        reporter=lambda plan: reporter(plan, errors),
        log=output.log,
    )
    return _show(found, errors, json=output.json)


def _show(found: Comparison, errors: Console, *, json: bool) -> int:
    from .engine.metrics import to_json  # noqa: PLC0415
    from .engine.run_directory import summary_object  # noqa: PLC0415
    from .report.terminal_table import print_comparison  # noqa: PLC0415

    if not is_first():
        return 0
    if json:
        console.show(to_json(summary_object(found.task, found.data, found.summaries)))
    else:
        print_comparison(console.output(), found.metrics, found.summaries)
    if found.data.get("skipped_lines"):
        errors.print(_skipped(found.data))
    ended = f"{found.directory} is complete" if found.was_complete else f"wrote {found.directory}"
    errors.print(ended)
    return 0


def _skipped(described: Mapping[str, object]) -> str:
    """How many unreadable lines of a data set were skipped."""
    count = described["skipped_lines"]
    return (
        f"skipped {count:,} unreadable line{'' if count == 1 else 's'}; the first: "
        f"{described['first_skipped']}"
    )


@data.command(name="dblp")
def data_dblp(
    file: Path,
    *,
    out: Path,
    test_share: float = 0.5,
    min_count: int = 1,
    keep_case: Annotated[bool, Parameter(negative=())] = False,
    json: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Build LF-Paper2Keywords from the DBLP-Citation-network V14: title and abstract to keywords.

    For example, with keywords of at least two papers:

        subulp data dblp dblp_v14.json.gz --out LF-Paper2Keywords --min-count 2

    Args:
        file: The JSON of the citation network, plain or .gz: one array of papers, or a paper a
            line.
        out: Folder to make, for trn_X.txt, trn_X_Y.txt, tst_X.txt, tst_X_Y.txt and Y.txt.
        test_share: Share of the papers in the test part, chosen by a hash of each paper's id.
        min_count: Training papers that a keyword needs to become a label.
        keep_case: Keep keywords that differ only in case apart.
        json: Print the counts as one JSON object.
    """
    from .engine.metrics import to_json  # noqa: PLC0415
    from .engine.progress import reading  # noqa: PLC0415
    from .tools.dblp import build_dblp  # noqa: PLC0415

    errors = _errors()
    with reading(file, errors) as on_read:
        built = build_dblp(
            file,
            out,
            test_share=test_share,
            min_count=min_count,
            keep_case=keep_case,
            on_read=on_read,
        )
    console.show(to_json(asdict(built)) if json else str(built))
    errors.print(f"wrote {out}")
    return 0


app.command(predict)
app.command(sample)
app.command(evaluate)
app.command(reproduce)


@app.command
def report(*runs: Path, out: Path | None = None) -> int:
    """Write a self-contained page about run directories: curves, memory, what was lost.

    For example, two runs side by side, finished or still training:

        subulp report runs/a runs/b --out comparison.html

    Args:
        runs: The run directories, of any task; those of the same task are compared.
        out: HTML file to write, which replaces an earlier report and nothing else; without it,
            report.html in the only run directory.
    """
    if out is None and len(runs) != 1:
        raise ValueError(
            f"{len(runs)} run directories and no out: give one directory, or several and the file "
            "to write with --out"
        )
    from .engine.run_directory import REPORT, check_output  # noqa: PLC0415
    from .report import write_report  # noqa: PLC0415

    out = out or runs[0] / REPORT
    check_output(out, page=True)
    write_report(runs, out)
    _errors().print(f"wrote {out}")
    return 0


@app.command
def runs(
    folder: Path = Path("runs"), *, json: Annotated[bool, Parameter(negative=())] = False
) -> int:
    """List run directories: task, data, quality of each precision, and state.

    For example, all runs of a folder, and those alone that can be continued:

        subulp runs experiments
        subulp runs experiments | grep "can be resumed"

    Args:
        folder: A folder of run directories, or one run directory.
        json: Print one JSON object instead of the table.
    """
    from .engine.metrics import to_json  # noqa: PLC0415
    from .engine.run_list import list_runs  # noqa: PLC0415
    from .report.terminal_table import print_runs  # noqa: PLC0415

    found = list_runs(folder)
    if json:
        console.show(to_json({"runs": [asdict(each) for each in found]}))
    else:
        print_runs(console.output(), found)
    return 0


@app.command
def doctor(*, json: Annotated[bool, Parameter(negative=())] = False) -> int:
    """Show what runs where: versions, the CPU, the GPU, the implementation of each operation.

    Every operation is compared with its reference, bit for bit; the exit code is 1 if one differs.

    Args:
        json: Print one JSON object instead of tables.
    """
    from ..diagnostics.doctor import run  # noqa: PLC0415

    return run(as_json=json)


@app.meta.default
def _launch(
    *tokens: Annotated[str, Parameter(show=False, allow_leading_hyphen=True)],
    verbose: Annotated[
        bool,
        Parameter(
            name=("--verbose", "-v"),
            negative=(),
            group=_OUTPUT.group,
            help="Show the traceback of an error.",
        ),
    ] = False,
) -> int:
    try:
        code = app(tokens, exit_on_error=False, print_error=False, result_action="return_value")
    except RanksWanted as wanted:
        return launch([*tokens, *(["--verbose"] if verbose else [])], wanted.count)
    except Silent as silent:
        return _failed(silent.error)
    except (CycloptsError, ValueError, OSError, FloatingPointError) as error:
        speaker = speaker_of(error)
        if speaker is None:
            return _failed(error)
        if verbose:
            traceback.print_exception(error)
        message = f"{speaker}{_place(tokens, error)}{_one_line(error)}{_hint(tokens, error)}"
        console.say(f"error: {message}")
        return _failed(error)
    # --help and --version return nothing.
    return int(code or 0)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: The words after ``subulp``; ``None`` takes them from ``sys.argv`` (default: ``None``).

    Returns:
        The exit code: 0, 1 after a run that failed, 2 after wrong input, 130 after Ctrl-C, 143
        after SIGTERM.
    """
    try:
        return int(app.meta(argv, result_action="return_value") or 0)
    except KeyboardInterrupt as error:
        if speaker_of(error) is not None:
            console.say(getattr(error, "hint", "interrupted"))
        return _failed(error)
    except OSError as error:
        # Of --help and --version, which are printed before a command begins.
        console.say(f"error: {_one_line(error)}")
        return _failed(error)


def _failed(error: BaseException) -> int:
    if isinstance(error, KeyboardInterrupt):
        return _BY_SIGNAL + getattr(error, "signum", signal.SIGINT)
    # A run that diverged, a process that died and a full disk are not wrong input.
    return FAILED if _is_failure(error) else WRONG_INPUT


def _is_failure(error: BaseException) -> bool:
    from .engine.files import UnwritableError  # noqa: PLC0415

    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return True
    return isinstance(error, FloatingPointError | ChildProcessError | UnwritableError)


def _place(tokens: Sequence[str], error: Exception) -> str:
    """The line in the file of ``--config`` that sets the option an error message begins with."""
    named = re.match(r"(\w+)=", str(error))
    given = [word for token in tokens for word in token.split("=", 1)]
    if named is None or _CONFIG not in given or _is_failure(error):
        return ""
    name, path = named[1], Path(given[given.index(_CONFIG) + 1])
    # --seed sets seeds.
    option = f"--{name.replace('_', '-')}"
    if (
        not {option, option.removesuffix("s")}.isdisjoint(given)
        or path.suffix == ".json"
        or not path.is_file()
    ):
        return ""
    from .engine.config_file import place_of  # noqa: PLC0415

    place = place_of(path, name)
    return "" if place is None else f"{place}: "


def _hint(tokens: Sequence[str], error: Exception) -> str:
    if isinstance(error, UnknownOptionError) and error.token.keyword == "--resume":
        return " It belongs to train itself: subulp train --resume RUN, without a task."
    if isinstance(error, UnusedCliTokensError):
        return " These words belong to no option: give options as --name value."
    return ""


def _one_line(error: Exception) -> str:
    text = str(error)
    # What the system says about a file, as a sentence.
    if isinstance(error, OSError) and text.startswith("[Errno ") and error.strerror:
        where = "" if error.filename is None else f"{error.filename}: "
        text = f"{where}{error.strerror.lower()}"
    return " ".join(text.split())


def _errors() -> Console:
    return console.errors(quiet=not is_first())

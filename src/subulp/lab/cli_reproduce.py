"""The command that repeats what the papers claim."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from . import console
from .engine.config import COMPARED, MACHINE, numbers

if TYPE_CHECKING:
    from .reproduce.claim import Claim, Options

_FLAG = Parameter(negative=())


def reproduce(
    *claims: str,
    size: Annotated[Literal["smallest", "small", "paper"], COMPARED] = "small",
    seeds: Annotated[
        tuple[int, ...] | None,
        numbers("seeds", int, "0,1,2", ("--seed", "--seeds")),
        Parameter(show_default=False),
    ] = None,
    data: Annotated[str | None, COMPARED] = None,
    encoder: Annotated[str | None, COMPARED] = None,
    jobs: Annotated[int | None, MACHINE] = None,
    out: Path = Path("runs") / "reproduce",
    json: Annotated[bool, _FLAG] = False,
) -> int:
    """Repeat tables, figures and claims of the papers, and say whether they hold.

    Without a claim, or with the word list, all of them are listed. A reproduction that was stopped
    goes on when its command is given again; claims that share runs train once. For example:

        subulp reproduce collage-table6 collage-figure12

    Args:
        claims: Their names; the name of a paper (collage, extra-bits, elmo, cached-tables, mor) is
            all of its claims, and all is every one.
        size: How much is run: smallest shows in seconds that the command works, and decides
            nothing; small is what two cores carry; paper is the paper's size.
        seeds: Seeds of the runs; by default three, and one for the smallest size.
        data: Data of the runs in the form that the task reads; by default what ships with the
            package, or is generated. The paper size of elmo takes a folder of its data sets, each
            under its name.
        encoder: Folder of a Hugging Face transformer, for the paper size of elmo.
        jobs: Runs that train at the same time; one per core by default. It changes no result.
        out: Folder of the runs, of the records, records/CLAIM-SIZE.json, and of report.html, one
            report of all records in it.
        json: Print one JSON object instead of tables.
    """
    from .engine.config import check_list, check_range  # noqa: PLC0415
    from .engine.metrics import to_json  # noqa: PLC0415
    from .engine.progress import reporter  # noqa: PLC0415
    from .reproduce.claim import Options, Watch  # noqa: PLC0415
    from .reproduce.index import CLAIMS, find  # noqa: PLC0415
    from .reproduce.pages import write_report  # noqa: PLC0415
    from .reproduce.run import RECORDS, record_file  # noqa: PLC0415
    from .reproduce.run import reproduce as run  # noqa: PLC0415
    from .reproduce.table import index_object, print_index, print_record  # noqa: PLC0415

    output = console.output()
    if not claims or [claim.lower() for claim in claims] == ["list"]:
        _check_list(size=size != "small", seeds=seeds, data=data, encoder=encoder, jobs=jobs)
        if json:
            console.show(to_json(index_object(CLAIMS)))
        else:
            print_index(output, CLAIMS)
        return 0
    if seeds is not None:
        check_list("seeds", seeds)
        for seed in seeds:
            check_range("seeds", seed, 0, 2**32 - 1)
    if jobs is not None:
        check_range("jobs", jobs, 1)
    chosen = find(claims)
    options = Options(size, seeds, data, encoder)
    _check_read(chosen, options, ",".join(claims))
    errors = console.errors()
    if size == "smallest" and jobs is None:
        # Starting a process takes longer than the run.
        jobs = 1
    watch = Watch(errors.print, lambda plan: reporter(plan, errors), jobs)
    files = []
    for claim in chosen:
        written = run(claim, options, out, watch)
        files.append(record_file(out / RECORDS, claim.name, size))
        if not json:
            print_record(output, claim, written)
    if json:
        console.show(
            '{"records": [' + ", ".join(file.read_text(encoding="utf-8") for file in files) + "]}"
        )
    report = out / "report.html"
    write_report(out / RECORDS, CLAIMS, report)
    errors.print(f"wrote {out / RECORDS} and {report}")
    return 0


def _check_list(**given: object) -> None:
    for name, value in given.items():
        if value:
            raise ValueError(f"{name} has no effect on a list: name the claims to repeat")


def _check_read(claims: Sequence[Claim], options: Options, named: str) -> None:
    """Raise ValueError unless all claims can be repeated so, before the first trains for hours, and
    some claim takes each option.
    """
    from .reproduce.run import check_runnable  # noqa: PLC0415

    experiments = [check_runnable(claim, options.size) for claim in claims]
    read = frozenset[str]().union(*(experiment.reads(options) for experiment in experiments))
    for name in ("seeds", "data", "encoder"):
        value = getattr(options, name)
        if value is None or name in read:
            continue
        text = ",".join(map(str, value)) if name == "seeds" else value
        raise ValueError(
            f"{name}={text} has no effect on claims={named} of size={options.size}: leave it out"
        )

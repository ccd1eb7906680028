"""``subulp doctor``: what runs where, and whether every op agrees with its reference."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

import torch

from .._version import version
from ..ops import backend, bf16_product, facts, native
from ..ops.triton import choices
from .self_check import Check, self_check


@dataclass(frozen=True)
class Operation:
    """The backend of one op on one device, and the result of its check."""

    device: str
    backend: str
    reason: str
    check: Check


def run(*, as_json: bool = False) -> int:
    """Print the report.

    Args:
        as_json: Print one object instead of tables (default: ``False``).

    Returns:
        0 if every op agrees with its reference on every device here, else 1.
    """
    parts = {
        "Versions": dict(_versions()),
        "Processor": dict(_processor()),
        "GPU": dict(_gpu()),
    }
    operations = list(_operations())
    if as_json:
        found = {title.lower(): rows for title, rows in parts.items()}
        _show(json.dumps(found | {"operations": [asdict(operation) for operation in operations]}))
    else:
        _show(_report(parts, operations))
    return int(any(operation.check.error is not None for operation in operations))


def _operations() -> Iterator[Operation]:
    for device in ("cpu", *(["cuda"] if torch.cuda.is_available() else [])):
        for op in backend.OPS:
            choice = backend.choose(torch.device(device))
            yield Operation(device, choice.backend, choice.reason, self_check(op, device))


def _show(text: str) -> None:
    try:
        print(text, flush=True)
    except BrokenPipeError:
        # The reader, such as head, has seen enough. Nothing is left for the interpreter to flush.
        with open(os.devnull, "w", encoding="utf-8") as null:
            os.dup2(null.fileno(), sys.stdout.fileno())


def _report(parts: Mapping[str, Mapping[str, str]], operations: Sequence[Operation]) -> str:
    header = ("op", "device", "backend", "why", "self-check")
    tables: dict[str, list[tuple[str, ...]]] = {t: list(r.items()) for t, r in parts.items()}
    tables["Operations"] = [header, *(_row(operation) for operation in operations)]
    return "\n".join(_columns(title, rows) for title, rows in tables.items())


def _row(operation: Operation) -> tuple[str, ...]:
    check = operation.check
    if check.error is None:
        verdict = f"ok: same bits in {check.cases} cases"
    else:
        verdict = f"FAILED: {check.error}"
    return check.name, operation.device, operation.backend, operation.reason, verdict


def _columns(title: str, rows: Sequence[Sequence[str]]) -> str:
    # Plain text: this runs where nothing but torch and numpy is installed.
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
    return "\n".join((title, *lines, ""))


def _versions() -> Iterator[tuple[str, str]]:
    yield "subulp", version()
    yield "python", sys.version.split()[0]
    yield "torch", torch.__version__
    if importlib.util.find_spec("triton"):
        import triton  # noqa: PLC0415 - optional, and slow to import

        yield "triton", triton.__version__
    else:
        yield "triton", "not installed (needed for GPU tensors only)"


def _processor() -> Iterator[tuple[str, str]]:
    yield "machine", platform.machine()
    yield "threads", str(torch.get_num_threads())
    try:
        lib = native.library()
    except RuntimeError as error:
        yield "C++ kernels", str(error)
        return
    have = [name for name, code in facts.ISAS.items() if lib.subulp_has_isa(code)]
    used = native.isa_name()
    yield "instruction sets", ", ".join(have)
    yield "in use", used + (" (SUBULP_ISA is set)" if os.environ.get("SUBULP_ISA") else "")
    units = bf16_product.units_at(torch.device("cpu"))
    yield "units of BF16", "multiply heads and narrow layers" if units else "none: FP32 multiplies"


def _gpu() -> Iterator[tuple[str, str]]:
    if not torch.cuda.is_available():
        yield "none", "PyTorch sees no CUDA device"
    for i in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(i)
        memory = properties.total_memory / 2**30
        yield (
            f"{i}",
            f"{properties.name}, sm_{properties.major}{properties.minor}, {memory:.0f} GiB",
        )
    try:
        file = choices.path()
    except ValueError as error:
        yield "tuned", str(error)
        return
    yield "tuned", f"{len(choices.read(file))} choices in {file}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Show what runs where.", allow_abbrev=False)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    sys.exit(run(as_json=parser.parse_args().json))

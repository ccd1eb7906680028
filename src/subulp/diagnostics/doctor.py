"""``subulp doctor``: what runs where, and whether every op agrees with its reference."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from .._version import version
from ..numerics.mixture import RECIPES
from ..ops import adam_step, all_finite, backend, native, parse_strategy, sgd_step, storage
from ..ops.mixture import mixture_encode
from ..ops.strategy import Strategy

STRATEGIES = (
    "fp32",
    "nearest",
    "stochastic",
    "kahan",
    "collage-light",
    "collage-plus",
    "fp32-states",
    "master",
    "extra-bits-8",
    "extra-bits-16-stochastic",
)
_NUMEL = 1000


@dataclass(frozen=True)
class Check:
    """One comparison of an op with its reference."""

    name: str
    cases: int
    error: str | None


@dataclass(frozen=True)
class Operation:
    """Where one op runs on one device, and whether it is right there."""

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
        print(json.dumps(found | {"operations": [asdict(operation) for operation in operations]}))
    else:
        _print(parts, operations)
    return int(any(operation.check.error is not None for operation in operations))


def _operations() -> Iterator[Operation]:
    for device in ("cpu", *(["cuda"] if torch.cuda.is_available() else [])):
        for op in backend.OPS:
            choice = backend.choose(torch.device(device))
            yield Operation(device, choice.backend, choice.reason, self_check(op, device))


def _print(parts: Mapping[str, Mapping[str, str]], operations: Sequence[Operation]) -> None:
    for title, rows in parts.items():
        _print_columns(title, list(rows.items()))
    header = ("op", "device", "backend", "why", "self-check")
    _print_columns("Operations", [header, *(_row(operation) for operation in operations)])


def _row(operation: Operation) -> tuple[str, ...]:
    check = operation.check
    if check.error is None:
        verdict = f"ok: same bits in {check.cases} cases"
    else:
        verdict = f"FAILED: {check.error}"
    return check.name, operation.device, operation.backend, operation.reason, verdict


def _print_columns(title: str, rows: Sequence[Sequence[str]]) -> None:
    # Plain text: this runs where nothing but torch and numpy is installed.
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    print(title)
    for row in rows:
        print("  " + "  ".join(map(str.ljust, row, widths)).rstrip())
    print()


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
    have = [name for name, code in native.ISAS.items() if lib.subulp_has_isa(code)]
    used = next(name for name, code in native.ISAS.items() if code == native.isa())
    yield "instruction sets", ", ".join(have)
    yield "in use", used + (" (SUBULP_ISA is set)" if os.environ.get("SUBULP_ISA") else "")


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


def self_check(op: str, device: str) -> Check:
    """Compare an op with its reference, bit for bit, on every strategy and dtype.

    Args:
        op: ``"adam"``, ``"sgd"``, ``"all_finite"`` or ``"mixture"``.
        device: Where the tensors lie.

    Returns:
        What was compared; ``error`` names the first case that differs or cannot run.
    """
    cases = 0
    try:
        if op == "all_finite":
            for bad in (None, float("nan"), float("inf")):
                x = torch.randn(_NUMEL, device=device)
                if bad is not None:
                    x[_NUMEL // 2] = bad
                if bool(all_finite([x])) != bool(x.isfinite().all()):
                    return Check(op, cases, f"all_finite is wrong with {bad}")
                cases += 1
            return Check(op, cases, None)
        if op == "mixture":
            return _check_mixtures(device)
        for name in STRATEGIES:
            strategy = parse_strategy(name)
            for dtype in strategy.dtypes:
                if not _agrees(op, strategy, dtype, device):
                    return Check(op, cases, f"{name} with {dtype} differs from its reference")
                cases += 1
    except (RuntimeError, ValueError) as error:
        return Check(op, cases, str(error))
    return Check(op, cases, None)


def _check_mixtures(device: str) -> Check:
    cases = 0
    for recipe in RECIPES:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            if not _mixes_agree(recipe, dtype, device):
                error = f"{recipe} of {dtype} differs from its reference"
                return Check("mixture", cases, error)
            cases += 1
    return Check("mixture", cases, None)


def _mixes_agree(recipe: str, dtype: torch.dtype, device: str) -> bool:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(40, 70, generator=generator)
    x[:, ::2] *= torch.empty(40, 35).uniform_(-14, 0, generator=generator).exp2()
    arguments = (x.to(dtype).to(device), recipe, (1, 32), (40, 3), "gam", 0.045)
    found = mixture_encode(*arguments)
    with _forced("reference"):
        expected = mixture_encode(*arguments)
    return all(
        torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        for a, b in zip(found[:5], expected[:5], strict=True)
    )


def _agrees(op: str, strategy: Strategy, dtype: torch.dtype, device: str) -> bool:
    tensors, reference = (_fresh(op, strategy, dtype, device) for _ in range(2))
    for t in range(1, 3):
        _step(op, strategy, tensors, t)
        with _forced("reference"):
            _step(op, strategy, reference, t)
    return all(
        torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        for role, of_role in tensors.items()
        for a, b in zip(of_role, reference[role], strict=True)
        if a.dim() > 0
    )


def _fresh(op: str, strategy: Strategy, dtype: torch.dtype, device: str) -> dict[str, list[Tensor]]:
    generator = torch.Generator().manual_seed(1)
    p = (torch.randn(_NUMEL, generator=generator) * 0.1).to(dtype).to(device)
    extra = storage.new_extra(strategy, p)
    slow = torch.zeros(_NUMEL, dtype=strategy.slow_format(dtype).dtype, device=device)
    fast = torch.zeros(_NUMEL, dtype=strategy.fast_format(dtype).dtype, device=device)
    scaled = not strategy.wide_states and dtype.itemsize == 1
    return {
        "p": [p],
        "g": [(torch.randn(_NUMEL, generator=generator) * 1e-2).to(dtype).to(device)],
        "fast": [fast] if op == "adam" else [],
        "slow": [slow],
        "extra": [] if extra is None else [extra],
        "low": [torch.zeros_like(slow)] if strategy.slow_state == "expansion" else [],
        "amax": [torch.zeros((), device=device)] if scaled else [],
    }


def _step(op: str, strategy: Strategy, x: dict[str, list[Tensor]], t: int) -> None:
    steps, lr = [torch.tensor(float(t))], torch.tensor(1e-2, dtype=torch.float64)
    common = (strategy.name, "wide", 7, [0], [0])
    if op == "adam":
        adam_step(
            x["p"], x["g"], x["fast"], x["slow"], x["extra"], x["low"], x["amax"],
            steps, lr, 0.9, 0.999, 1e-8, 0.1, True, False, *common,
        )  # fmt: skip
    else:
        sgd_step(
            x["p"], x["g"], x["slow"], x["extra"], x["low"], x["amax"],
            steps, lr, 0.9, 0.0, 0.01, True, False, *common,
        )  # fmt: skip


class _forced:  # noqa: N801 - reads as a keyword
    """Run with ``SUBULP_BACKEND`` set."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        self._saved = os.environ.get("SUBULP_BACKEND")
        os.environ["SUBULP_BACKEND"] = self._name

    def __exit__(self, *_: object) -> None:
        if self._saved is None:
            del os.environ["SUBULP_BACKEND"]
        else:
            os.environ["SUBULP_BACKEND"] = self._saved


if __name__ == "__main__":
    sys.exit(run(as_json="--json" in sys.argv[1:]))

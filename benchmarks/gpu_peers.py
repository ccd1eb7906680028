"""What other packages offer for the same work, where they are installed: gpu_rates.py's peers.

None is needed. A peer that is absent or that fails is named in the record and in what is printed.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from gpu_turns import Prepared, Step, prepare
from torch import Tensor

Parameters = Callable[[], Sequence[Tensor]]


class Peers:
    """Which of a section's peers ran, are not installed, or failed."""

    def __init__(self) -> None:
        self.absent: list[str] = []
        self.failed: dict[str, str] = {}

    def add(
        self, methods: dict[str, Step], package: str, name: str, make: Callable[[], Step]
    ) -> None:
        """Put a method beside the others, if its package is installed and its first call succeeds.

        Args:
            methods: Where to.
            package: What is imported.
            name: The method's.
            make: Makes it; imports the package.
        """
        if not installed(package):
            if package not in self.absent:
                self.absent.append(package)
            return
        try:
            step = make()
            prepare(step)
            step()
        except Exception as error:
            # Whatever ails a peer: ours are measured, and it is named.
            self.failed[name] = f"{type(error).__name__}: {error}"[:300]
        else:
            methods[name] = step

    def record(self) -> dict[str, Any]:
        return {"absent": self.absent, "failed": self.failed}


def installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


# ------------------------------------------------------------------------------------- optimizers


def optimizers(
    peers: Peers,
    methods: dict[str, Step],
    kind: str,
    dtype: torch.dtype,
    device: torch.device,
    parameters: Parameters,
) -> None:
    """torch-optimi's and FlashOptim's steps of parameters of ``dtype``: BF16 or FP32.

    Args:
        peers: Of this section.
        methods: Where the steps go.
        kind: ``"AdamW"`` or ``"SGD"``.
        dtype: Of the parameters.
        device: Theirs.
        parameters: Makes new ones, with gradients.
    """
    momentum = {"momentum": 0.9} if kind == "SGD" else {}
    narrow = dtype != torch.float32

    def optimi() -> Step:
        import optimi  # noqa: PLC0415 - a peer that may be missing

        options = {"kahan_sum": narrow, "triton": device.type == "cuda", **momentum}
        step: Step = getattr(optimi, kind)(parameters(), lr=1e-4, **options).step
        return step

    def flash() -> Step:
        import flashoptim  # noqa: PLC0415 - a peer that may be missing

        step: Step = getattr(flashoptim, f"Flash{kind}")(parameters(), lr=1e-4, **momentum).step
        return step

    peers.add(methods, "optimi", "torch-optimi Kahan" if narrow else "torch-optimi", optimi)
    peers.add(methods, "flashoptim", "FlashOptim", flash)


# ----------------------------------------------------------------------------------------- tables


def fbgemm(
    peers: Peers,
    methods: dict[str, Step],
    shape: tuple[int, int, int],
    batch: tuple[Tensor, Tensor, Tensor],
) -> None:
    """FBGEMM's tables with rows in FP32, FP16 and INT8, Adagrad by row.

    Args:
        peers: Of this section.
        methods: Where the steps go.
        shape: Rows of a table, numbers of a row, and tables.
        batch: Row numbers, offsets and the gradient of the result.
    """
    rows, dim, count = shape
    values, offsets, grad = batch

    def made(rows_in: str) -> Step:
        from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType  # noqa: PLC0415
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import (  # noqa: PLC0415
            EmbeddingLocation,
        )
        from fbgemm_gpu.split_table_batched_embeddings_ops_training import (  # noqa: PLC0415
            ComputeDevice,
            SplitTableBatchedEmbeddingBagsCodegen,
        )

        if values.is_cuda:
            place = EmbeddingLocation.DEVICE, ComputeDevice.CUDA
        else:
            place = EmbeddingLocation.HOST, ComputeDevice.CPU
        bags = SplitTableBatchedEmbeddingBagsCodegen(
            [(rows, dim, *place)] * count,
            optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
            learning_rate=0.01,
            weights_precision=SparseType[rows_in],
        )
        bags.init_embedding_weights_uniform(-0.01, 0.01)
        return lambda: bags(values, offsets).backward(grad)

    for rows_in in ("FP32", "FP16", "INT8"):
        name = f"fbgemm {rows_in.lower()}"
        peers.add(methods, "fbgemm_gpu", name, lambda rows_in=rows_in: made(rows_in))  # type: ignore[misc]


# ---------------------------------------------------------------------------------- linear layers


def both_passes(
    layer: torch.nn.Module,
    x: Tensor,
    grad: Tensor,
    context: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
) -> Prepared:
    """A forward pass, in a context of its own, and a backward pass, as in a step of a training.

    Each meets other weights, as after an update: some layers keep what they made of the same ones.
    It adds to no gradient.
    """

    def before() -> None:
        x.grad = None
        layer.zero_grad(set_to_none=True)
        with torch.no_grad():
            for p in layer.parameters():
                # FP8 has no arithmetic of its own: the sign is a bit.
                _ = p.view(torch.uint8).bitwise_xor_(0x80) if p.itemsize == 1 else p.neg_()

    def step() -> None:
        with context():
            y = layer(x)
        y.backward(grad)

    return Prepared(step, before)


def linear_layers(
    peers: Peers, methods: dict[str, Step], suffix: str, x: Tensor, grad: Tensor
) -> None:
    """Layers whose products are in FP8: torchao's and TransformerEngine's.

    Args:
        peers: Of this section.
        methods: Where the steps go, forward and backward pass.
        suffix: Of their names.
        x: BF16 ``(size, size)``, the inputs, which take a gradient.
        grad: That of the result, of the same shape.
    """
    size = x.shape[1]

    def torchao() -> Step:
        from torchao.float8 import convert_to_float8_training  # noqa: PLC0415

        linear = torch.nn.Linear(size, size, bias=False, device=x.device, dtype=x.dtype)
        layer = convert_to_float8_training(torch.nn.Sequential(linear))
        # As its authors advise: its casts are passes of their own otherwise.
        layer = torch.compile(layer) if x.is_cuda else layer
        return both_passes(layer, x, grad)

    def transformer_engine() -> Step:
        import transformer_engine.pytorch as te  # noqa: PLC0415

        layer = te.Linear(size, size, bias=False, params_dtype=x.dtype, device=x.device)
        # The older name warns where there is a newer one.
        autocast = getattr(te, "autocast", None) or te.fp8_autocast
        return both_passes(layer, x, grad, lambda: autocast(enabled=True))

    peers.add(methods, "torchao", f"torchao float8{suffix}", torchao)
    peers.add(methods, "transformer_engine", f"TransformerEngine FP8{suffix}", transformer_engine)

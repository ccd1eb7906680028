"""Tables that stay on a GPU between calls: uploaded when their numbers have changed."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import torch
from torch import Tensor

from . import launch

_MOST = 256
"""Tables that are kept, of all modules and devices."""

_kept: OrderedDict[tuple[object, ...], list[Tensor]] = OrderedDict()


def keep(device: torch.device, *tables: np.ndarray) -> list[Tensor]:
    """Tables on ``device``, flattened, uploaded unless these very numbers already lie there.

    Nothing may write to them. A table that is dropped for others is freed as tensors are: not
    before the kernels that were launched with it on the current stream have run.

    Raises:
        RuntimeError: A CUDA graph is being captured, and they must be uploaded.
    """
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else None
    key = (device, stream, *((t.dtype.str, t.tobytes()) for t in tables))
    found = _kept.get(key)
    if found is None:
        found = _kept[key] = launch.upload(device, *tables)
        if len(_kept) > _MOST:
            _kept.popitem(last=False)
    else:
        _kept.move_to_end(key)
    return found

"""Where nothing is compiled, training does not import PyTorch's compiler, which takes seconds."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys
import torch
from subulp import diagnostics, nn, optim

torch.manual_seed(0)
layers = nn.Linear(8, 8), nn.MoRLinear(8, 8), torch.nn.ReLU(), nn.Linear(8, 4)
model = torch.nn.Sequential(*layers).to(torch.bfloat16)
table = nn.CachedEmbeddingBag(50, 8, "int8", cache_fraction=0.1)
head = nn.ExtremeClassifier(4, 30)
rows = [optim.RowAdagrad(table, lr=0.1), optim.RowSGD(head, lr=0.1)]
optimizer = optim.AdamW(model[:2].parameters(), nonfinite="skip")
optimizer.add_param_group({"params": list(model[3].parameters()), "precision": "extra-bits-8"})
schedule = torch.optim.lr_scheduler.LinearLR(optimizer)
ids, at = torch.arange(6) * 7, torch.tensor([0, 2, 4])

def loss():
    return head(model(table(ids, at)).float(), torch.arange(3), torch.arange(3) * 9)

with diagnostics.watch(optimizer), diagnostics.track_memory(model, optimizer):
    for _ in range(2):
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
with optim.fuse_backward(model, optimizer, max_norm=1.0) as handle:
    handle.backward(loss())
for each in (optimizer, *rows):
    each.load_state_dict(each.state_dict())
head.eval().topk(model.eval()(table(ids, at)).float(), 2)
assert not [name for name in sys.modules if name.startswith("torch._dynamo")]

# Compiled later on, a step stays between the graphs as ever.
x, steps = torch.randn(3, 8), []

def train(x):
    model.train()(x).float().square().mean().backward()
    optimizer.step()

compiled = torch.compile(train, backend=lambda graph, inputs: steps.append(graph) or graph.forward)
before = model[0].weight.detach().clone()
compiled(x)
assert steps
assert not torch.equal(model[0].weight, before)
assert not any("adam" in str(node.target) for graph in steps for node in graph.graph.nodes)
"""


def test_training_does_not_import_dynamo() -> None:
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr

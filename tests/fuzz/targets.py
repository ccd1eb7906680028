"""Every parser of files that somebody else may have written, as a function of bytes.

A target takes a file's bytes and an empty folder. It returns if the parser reads the file or
refuses it as documented, and lets everything else through: that is a finding.
:mod:`tests.fuzz.test_targets` gives them mutations of good files in every test run, and ``make
fuzz`` lets atheris look for paths.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from safetensors.torch import save_file

from subulp.lab.data.lines import TextLines
from subulp.lab.engine import checkpoint
from subulp.lab.engine.config_file import Option, read_config
from subulp.lab.engine.run_checkpoints import FINISHED, RunCheckpoints
from subulp.lab.engine.saved_model import ModelName
from subulp.lab.engine.saved_state import rebuild
from subulp.lab.engine.sealed import fingerprint, sealed, sum_of
from subulp.lab.engine.trained import load_named
from subulp.lab.report import render
from subulp.lab.report.figure import svg
from subulp.lab.report.line_chart import LineChart
from subulp.lab.tasks.ctr.readers.dataset import ReadOptions
from subulp.lab.tasks.ctr.readers.description import make_layout, read_description
from subulp.lab.tasks.ctr.readers.load import load_data
from subulp.lab.tasks.lm.config import LMConfig
from subulp.lab.tasks.lm.models import GPT, Shape
from subulp.lab.tasks.xmc.preprocessing import SETTINGS, load_preprocessor
from subulp.lab.tasks.xmc.readers.bags import read_bag_file, read_feature_file
from subulp.lab.tasks.xmc.readers.json_lines import read_json_part, read_json_texts
from subulp.lab.tasks.xmc.readers.label_files import read_filter_file, read_label_file
from subulp.lab.tasks.xmc.vocabulary import KnownFeatures, Vocabulary
from subulp.lab.tools.dblp import build_dblp
from tests.lab.report.support import LM, lm_records, lm_summary, write_run
from tests.lab.tasks.ctr.readers.support import criteo_lines

_NO_EXAMPLES = re.compile(
    "too few|no example|no training|nothing to learn|nothing can be learned|none is left|0 examples"
)


@dataclass(frozen=True)
class Target:
    """A parser.

    Attributes:
        run: Takes the file's bytes and an empty folder.
        seeds: Good files, to begin from.
    """

    run: Callable[[bytes, Path], None]
    seeds: tuple[bytes, ...]


@contextmanager
def refused(path: Path, *, line: bool = True) -> Iterator[None]:
    """Let an error pass that a parser may raise: one line that begins with ``file:line``.

    Args:
        path: The file.
        line: The message names a line; otherwise the file is enough.
    """
    try:
        yield
    except (ValueError, FileNotFoundError) as error:
        message = str(error)
        # A part that lacks examples has no line to blame.
        place = re.escape(str(path)) + (r":\d+: " if line else "")
        if not re.search(place, message) and not _NO_EXAMPLES.search(message):
            raise AssertionError(f"no place in {message!r}") from error


def _written(data: bytes, path: Path) -> Path:
    path.write_bytes(data)
    return path


def _labels(data: bytes, folder: Path) -> None:
    path = _written(data, folder / "trn_X_Y.txt")
    with refused(path):
        matrix = read_label_file(path)
        assert len(matrix.indices) <= len(data)
        assert not len(matrix.indices) or matrix.indices.min() >= 0
        assert not len(matrix.indices) or matrix.indices.max() < matrix.num_labels


def _filter(data: bytes, folder: Path) -> None:
    path = _written(data, folder / "trn_filter_labels.txt")
    with refused(path):
        assert read_filter_file(path, (5, 7)).shape == (5, 7)


def _bag(data: bytes, folder: Path) -> None:
    path = _written(data, folder / "train.txt")
    with refused(path):
        bags, labels = read_bag_file(path)
        assert len(bags) == len(labels)
        features = bags.read(range(len(bags)))
        assert np.isfinite(features.values).all()
        assert (features.ids < bags.num_features).all()


def _features(data: bytes, folder: Path) -> None:
    path = _written(data, folder / "features.txt")
    with refused(path):
        lines = read_feature_file(path, 10)
        lines.read(range(len(lines)))


def _texts(data: bytes, folder: Path) -> None:
    path = _written(data, folder / "Y.txt")
    with refused(path):
        assert len(list(TextLines(path))) <= len(data)


def _compressed_texts(data: bytes, folder: Path) -> None:
    path = _written(data, folder / "Y.txt.gz")
    with refused(path):
        list(TextLines(path))


def _json_lines(data: bytes, folder: Path) -> None:
    path = _written(data, folder / "trn.json")
    with refused(path):
        texts, labels = read_json_part(path, 5)
        assert len(texts) == len(labels)
        [text.encode() for text in texts]
    with refused(path):
        list(read_json_texts(path))


def _dblp(data: bytes, folder: Path) -> None:
    path = _written(data, folder / "dblp.json")
    with refused(path):
        build_dblp(path, folder / "out")


def _criteo(data: bytes, folder: Path) -> None:
    path = _written(data, folder / "day_0")
    with refused(path):
        found = load_data(f"criteo:{path}", ReadOptions(), rows=(50,))
        for chunk in found.train.chunks():
            assert np.isfinite(found.encode(chunk).numbers).all()


_COLUMNS = b"""
header = false
columns = ["clicked", "price", "shop", "age"]
[label]
column = "clicked"
[[numeric]]
columns = ["price"]
[[categorical]]
columns = ["shop"]
rows = 10
[[cross]]
columns = ["shop", "age"]
rows = 20
[buckets]
age = [18, 65]
"""


def _csv(data: bytes, folder: Path) -> None:
    path = _written(data, folder / "a.csv")
    columns = _written(_COLUMNS, folder / "columns.toml")
    with refused(path):
        found = load_data(f"csv:{path}", ReadOptions(), columns=columns)
        for chunk in found.train.chunks():
            found.encode(chunk)


def _description(data: bytes, folder: Path) -> None:
    path = _written(data, folder / "columns.toml")
    with refused(path):
        make_layout(read_description(path), ["clicked", "price", "shop", "age"])


OPTIONS = (
    Option(("seed", "seeds"), tuple[int, ...]),
    Option(("precision",), tuple[str, ...]),
    Option(("steps",), int),
    Option(("lr",), float),
    Option(("tie-head",), bool),
    Option(("data",), Path | None),
)


def _config(data: bytes, folder: Path) -> None:
    path = _written(data, folder / "run.toml")
    with refused(path):
        assert set(read_config(path, "lm", OPTIONS)) <= {option.names[0] for option in OPTIONS}


def _config_of_run(data: bytes, folder: Path) -> None:
    path = _written(data, folder / "config.json")
    with refused(path):
        read_config(path, "lm", OPTIONS)


_DRAWN: set[str] = set()


def _draw_once(chart: Any, prefix: str) -> str:
    """Draw a chart that differs from all before: most files change none or one of a page's."""
    numbers = chart.numbers() if isinstance(chart, LineChart) else ()
    key = repr((type(chart), chart.title, chart.unit, chart.description, chart.size, numbers))
    if key in _DRAWN:
        return ""
    figure = svg(chart, prefix)
    _DRAWN.add(key)
    return figure


def _report(name: str) -> Callable[[bytes, Path], None]:
    def run(data: bytes, folder: Path) -> None:
        path = write_run(folder / "run", summary=lm_summary()) / name
        path.write_bytes(data)
        with refused(path, line=False), mock.patch("subulp.lab.report.svg", _draw_once):
            render([folder / "run"]).encode()

    return run


def _known_features(data: bytes, folder: Path) -> None:
    path = _written(data, folder / "features.json")
    with refused(path, line=False):
        KnownFeatures.load(path)


def _vocabulary(data: bytes, folder: Path) -> None:
    path = _written(data, folder / "vocabulary.json")
    with refused(path, line=False):
        Vocabulary.load(path)


def _reader(data: bytes, folder: Path) -> None:
    path = _written(data, folder / SETTINGS)
    (folder / "vocabulary.json").write_text(_VOCABULARY)
    with refused(path, line=False):
        load_preprocessor(folder)


def _model(data: bytes, folder: Path) -> None:
    """A forged description of a trained model, in a run directory: its sum is right."""
    path = folder / "run" / "models" / "nearest-seed-0.json"
    _write_model(path.parent)
    try:
        fields = json.loads(data)
        fields.pop("sha256", None)
        for name in fields["files"]:
            fields["files"][name] = fingerprint(path.parent / name)
        text = sealed(fields)
    except (ValueError, TypeError, AttributeError, KeyError, OSError, RecursionError):
        text = data.decode("utf-8", "replace")
    path.write_text(text, errors="replace")
    with refused(path.parent, line=False):
        load_named(folder / "run", ModelName("nearest", 0), "stored", "cpu")


def _write_model(folder: Path) -> None:
    """The files that the description :data:`_MODEL` names."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder.parent / "config.json").write_text('{"task": "lm"}')
    torch.manual_seed(0)
    tensors = {n: t.contiguous() for n, t in GPT(Shape(**_SHAPE)).state_dict().items()}
    save_file(tensors, folder / "nearest-seed-0.safetensors")


def _finished(data: bytes, folder: Path) -> None:
    """Results of a run, with the right sum if they have any."""
    config = LMConfig(precision=("master",), device="cpu")
    checkpoints = RunCheckpoints(folder, config, "master", 0)
    checkpoints.folder.mkdir()
    try:
        fields = json.loads(data)
        text = sealed(fields) if fields.pop("sha256", None) else json.dumps(fields)
    except (ValueError, TypeError, AttributeError, RecursionError):
        text = data.decode("utf-8", "replace")
    path = checkpoints.folder / FINISHED
    path.write_text(text, errors="replace")
    with refused(path, line=False):
        checkpoints.finished()


def _manifest(data: bytes, folder: Path) -> None:
    path = _written(data, folder / checkpoint.MANIFEST)
    with refused(path, line=False):
        checkpoint.check(folder)


def _summed_manifest(data: bytes, folder: Path) -> None:
    """A forged manifest: its sum is right."""
    try:
        manifest = json.loads(data)
        manifest.pop("sha256", None)
        manifest["sha256"] = sum_of(manifest)
        text = json.dumps(manifest)
    except (ValueError, TypeError, AttributeError, RecursionError):
        return
    path = _written(text.encode(errors="replace"), folder / checkpoint.MANIFEST)
    for name in (checkpoint.TENSORS, checkpoint.STATE):
        (folder / name).write_bytes(b"")
    with refused(folder, line=False):
        checkpoint.check(folder)
    with refused(path, line=False):
        checkpoint.read_header(folder)


def _state(data: bytes, folder: Path) -> None:
    try:
        plain = json.loads(data)
    except (ValueError, RecursionError):
        return
    try:
        rebuild(plain, {})
    except (ValueError, RecursionError):
        return


_VOCABULARY = json.dumps(
    {
        "format": "subulp vocabulary 1",
        "texts": 2,
        "bigrams": True,
        "counts": [1, 2],
        "terms": ["a", "b"],
    }
)
_CONFIG_TOML = b'seeds = [0, 1]\nsteps = 5\n"lr" = 1e-3\ntie_head = true\ndata = "a.txt"\n'
_DBLP = [
    {"id": str(n), "title": f"T{n}", "abstract": "A.", "keywords": ["k", f"K{n % 2}"]}
    for n in range(6)
]
_JSON_LINES = b"""{"title": "a", "content": "b", "target_ind": [0, 4], "target_rel": [1, 0.5]}
{"title": "\\ud800", "target_ind": []}
"""
_SHAPE = {"vocabulary": 5, "context": 4, "width": 4, "layers": 1, "heads": 2}
_SHAPE |= {"dropout": 0.0, "tie_head": False}
_MODEL = {
    "format": "subulp model 1",
    **{"task": "lm", "variant": "nearest", "seed": 0, "metrics": {"val_loss": 1.5}, "rank": 1.5},
    "build": {
        "shape": _SHAPE,
        "characters": "abcde",
        "variant": {"precision": "nearest", "linear": "bf16"},
    },
    "files": {"nearest-seed-0.safetensors": {"size": 0, "sha256": ""}},
}
_FINISHED = {
    "summary": {
        **{"precision": "master", "seed": 0, "metrics": {}, "train_loss": 1.0},
        **{"bytes_per_parameter": {}, "peak_bytes": {}, "category_peak_bytes": {}},
        **{"seconds_per_step": 0.1, "effective_descent_quality": 1.0, "descent_share": 1.0},
        **{"lost_arithmetic": 0.0, "steps": 2, "skipped_steps": 0, "parameters": 9},
    },
    "records": [
        {"precision": "master", "seed": 0, "step": 1, "loss": 1.0, "lr": 0.1, "seconds": 0.1}
    ],
    "sha256": "",
}
_READER = {"encoder": "bag", "width": 4, "layers": 1, "dropout": 0.5}
_MANIFEST = {
    **{"format": checkpoint.FORMAT, "version": 1, "task": "lm", "variant": "a", "seed": 0},
    **{"step": 1, "config": {}, "value": None, "asked": False},
    "files": {name: {"size": 0, "sha256": ""} for name in (checkpoint.TENSORS, checkpoint.STATE)},
}
_STATE = {"a": {"$": ["tuple", [1, {"$": ["float", "nan"]}]]}, "b": {"$": ["dict", [[1, 2]]]}}


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()


TARGETS = {
    "labels": Target(_labels, (b"2 3\n0:1 2:1\n1:0.5\n", b"1 9\n\n")),
    "filter": Target(_filter, (b"0 1\n4 6\n",)),
    "bag": Target(_bag, (b"2 9 3\n0,2 1:0.5 8:1\n 3:1e2\n", b"1 1 1\n0 0:1\n")),
    "features": Target(_features, (b"1:0.5 9:1.0\n\n2:1 3:-1e-3\n",)),
    "texts": Target(_texts, (b"one\r\ntwo\n\nthr\xc3\xa4\n",)),
    "compressed-texts": Target(
        _compressed_texts, (gzip.compress(b"one\ntwo\n" * 9, mtime=0), gzip.compress(b"", mtime=0))
    ),
    "json-lines": Target(_json_lines, (_JSON_LINES,)),
    "dblp": Target(_dblp, (_json(_DBLP), b"\n".join(map(_json, _DBLP)))),
    "criteo": Target(_criteo, ("\n".join(criteo_lines(9)).encode(),)),
    "csv": Target(_csv, (b'1,0.5,"a",20\n0,,b,\n1,1e3,c,70\n0,2,"a, b",18\n',)),
    "description": Target(_description, (_COLUMNS, _COLUMNS.replace(b"false", b"true"))),
    "config": Target(_config, (_CONFIG_TOML,)),
    "config-of-run": Target(_config_of_run, (_json({**LM, "versions": {}, "lr": 0.1}),)),
    "report-config": Target(_report("config.json"), (_json(LM),)),
    "report-metrics": Target(
        _report("metrics.jsonl"), (b"\n".join(map(_json, lm_records()[:6])) + b"\n",)
    ),
    "report-summary": Target(_report("summary.json"), (_json(lm_summary({"master": 0.0}, (0,))),)),
    "known-features": Target(
        _known_features,
        (_json({"format": "subulp features 1", "num_features": 9, "numbers": [1, 4]}),),
    ),
    "vocabulary": Target(_vocabulary, (_VOCABULARY.encode(),)),
    "reader": Target(
        _reader, (_json({"encoder": "bag", "width": 4, "layers": 1, "dropout": 0.5}),)
    ),
    "model": Target(_model, (_json(_MODEL),)),
    "finished": Target(_finished, (_json(_FINISHED),)),
    "manifest": Target(_manifest, (_json(_MANIFEST),)),
    "forged-manifest": Target(_summed_manifest, (_json(_MANIFEST),)),
    "state": Target(_state, (_json(_STATE),)),
}

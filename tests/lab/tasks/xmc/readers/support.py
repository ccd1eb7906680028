"""Small data sets in the three forms, written to a folder."""

import gzip
import json

TRAIN_TEXTS = ["a red fox", "", "the lazy dög", "a fox and a dog"]
TEST_TEXTS = ["fox", "dog"]
LABEL_TEXTS = ["animal", "red", "never seen"]
TRAIN_LABELS = [[0, 1], [], [0], [0]]
TEST_LABELS = [[1], [0, 2]]
FEATURES = [[(3, 0.5), (1, 2.0)], [], [(0, 1.0)], [(3, 1.0), (3, 2.5)]]


def put(folder, name, content, *, compressed=False):
    raw = content if isinstance(content, bytes) else content.encode()
    path = folder / (name + ".gz" * compressed)
    path.write_bytes(gzip.compress(raw) if compressed else raw)
    return path


def lines(texts):
    return "".join(f"{text}\n" for text in texts)


def label_file(rows):
    body = lines(" ".join(f"{label}:1" for label in row) for row in rows)
    return f"{len(rows)} {len(LABEL_TEXTS)}\n{body}"


def write_raw(folder, *, compressed=False):
    for name, content in (
        ("trn_X.txt", lines(TRAIN_TEXTS)),
        ("tst_X.txt", lines(TEST_TEXTS)),
        ("Y.txt", lines(LABEL_TEXTS)),
        ("trn_X_Y.txt", label_file(TRAIN_LABELS)),
        ("tst_X_Y.txt", label_file(TEST_LABELS)),
    ):
        put(folder, name, content, compressed=compressed)


def write_json(folder, *, compressed=False):
    def records(texts, rows):
        return lines(
            json.dumps({"uid": "x", "title": text, "content": "", "target_ind": row})
            for text, row in zip(texts, rows, strict=True)
        )

    for name, content in (
        ("trn.json", records(TRAIN_TEXTS, TRAIN_LABELS)),
        ("tst.json", records(TEST_TEXTS, TEST_LABELS)),
        ("lbl.json", lines(json.dumps({"title": text}) for text in LABEL_TEXTS)),
    ):
        put(folder, name, content, compressed=compressed)


def bag_file(rows, features):
    body = lines(
        ",".join(map(str, row)) + " " + " ".join(f"{f}:{v}" for f, v in bag)
        for row, bag in zip(rows, features, strict=True)
    )
    return f"{len(rows)} 4 {len(LABEL_TEXTS)}\n{body}"


def write_bags(folder, *, compressed=False):
    put(folder, "train.txt", bag_file(TRAIN_LABELS, FEATURES), compressed=compressed)
    put(folder, "test.txt", bag_file(TEST_LABELS, FEATURES[:2]), compressed=compressed)

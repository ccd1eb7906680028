"""Run directories without training."""

import json
import math

VARIANTS = {"master": 0.0, "nearest": 0.05, "collage-plus": -0.01}

LM = {"task": "lm", "precision": list(VARIANTS), "seeds": [0, 1], "steps": 300, "data": None}


def lm_records(variants=VARIANTS, seeds=(0, 1), steps=(1, 100, 200, 300)):
    records = []
    for name, shift in variants.items():
        for seed in seeds:
            for step in steps:
                loss = 2 + math.exp(-step / 100) + shift * step / 300 + seed / 100
                record = {"precision": name, "seed": seed, "step": step, "loss": loss + 0.1}
                record |= {"lr": 1e-3, "seconds": 0.01}
                record |= {"descent_share": 1 - abs(shift), "lost_arithmetic": abs(shift)}
                if step > 1:
                    record |= {"val_loss": loss, "perplexity": math.exp(loss)}
                records.append(record)
    return records


def lm_summary(variants=VARIANTS, seeds=(0, 1)):
    runs = []
    for record in lm_records(variants, seeds, (300,)):
        peaks = {"weights": 2000, "gradients": 500, "states": 12000, "activations": 8000}
        peaks["total"] = sum(peaks.values())
        counted = {"parameter": 2.0, "gradient": 2.0, "exp_avg": 4.0, "exp_avg_sq": 4.0}
        counted |= {"master": 4.0, "total": 16.0}
        run = {name: record[name] for name in ("precision", "seed", "val_loss", "perplexity")}
        run |= {"train_loss": record["loss"], "bytes_per_parameter": counted}
        run |= {"peak_bytes": peaks, "category_peak_bytes": peaks, "seconds_per_step": 0.0123}
        run |= {"effective_descent_quality": 0.3, "descent_share": record["descent_share"]}
        run |= {"lost_arithmetic": record["lost_arithmetic"], "steps": 300, "skipped_steps": 0}
        runs.append({**run, "parameters": 1000, "simulated": False})
    return {"task": "lm", "data": {"name": "a text", "train": 9000}, "runs": runs}


def write_run(folder, config=LM, records=None, summary=None):
    """A run directory; without a summary one that still trains."""
    folder.mkdir(parents=True)
    versions = {"subulp": "0.1.0", "torch": "2.13.0"}
    machine = {"processor": "A Processor", "cores": 2, "memory_bytes": 2**34, "gpu": None}
    whole = {**config, "versions": versions, "machine": machine}
    (folder / "config.json").write_text(json.dumps(whole))
    lines = [json.dumps(record) + "\n" for record in (lm_records() if records is None else records)]
    (folder / "metrics.jsonl").write_text("".join(lines))
    if summary is not None:
        (folder / "summary.json").write_text(json.dumps(summary))
    return folder

"""A data set of texts that takes no time to learn, and a transformer for them."""

import numpy as np
import torch

from subulp.lab.tasks.xmc.config import XMCConfig

WORDS = ("red", "green", "blue", "old", "new", "big", "small", "round")


def write_data(path, names=(*WORDS, "never seen")):
    """Texts of two words, labelled by them: eight labels, and one that no text has."""
    generator = np.random.default_rng(0)
    for part, count in (("trn", 48), ("tst", 12)):
        pairs = np.array([generator.choice(8, 2, replace=False) for _ in range(count)])
        texts = [f"{WORDS[a]} {WORDS[b]} thing" for a, b in pairs]
        (path / f"{part}_X.txt").write_text("\n".join(texts) + "\n")
        rows = [f"{min(p)}:1 {max(p)}:1" for p in pairs]
        (path / f"{part}_X_Y.txt").write_text("\n".join([f"{count} 9", *rows]) + "\n")
    if names:
        (path / "Y.txt").write_text("\n".join(names) + "\n", encoding="utf-8")


LEARNING = {"epochs": 20, "encoder_lr": 1e-2}
"""What lets a small transformer learn the words."""


def write_bert(path, hidden=16):
    """A BERT with random weights that knows eight words."""
    import transformers  # noqa: PLC0415 - an extra

    special = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
    vocabulary = [*special, *WORDS, "thing", "##s"]
    (path / "vocab.txt").write_text("\n".join(vocabulary) + "\n")
    config = transformers.BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=hidden,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=2 * hidden,
        max_position_embeddings=24,
    )
    torch.manual_seed(0)
    transformers.BertModel(config).save_pretrained(path)


def transformer_config(bert, folder, **changes):
    """Two epochs of a transformer on the texts, which are written to a new folder."""
    folder.mkdir()
    write_data(folder)
    options = {
        "max_length": 12,
        "precision": ("fp8",),
        "epochs": 2,
        "batch_size": 8,
        "chunks": 3,
        "dropout": 0.0,
        "encoder_lr": 3e-3,
        "device": "cpu",
        "watch_every": 4,
    }
    return XMCConfig(data=folder, encoder=str(bert), **options | changes)

"""Byte-pair tokens: as many as asked for, learned from the training part of a text."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor


def learn(text: str, vocabulary: int) -> str:
    """Learn byte-level pairs from a text, as GPT-2's tokenizer was.

    The same text gives the same tokens on any number of threads: of pairs that are as frequent, the
    earlier ones are merged.

    Args:
        text: What is learned from.
        vocabulary: Number of tokens, the 256 bytes among them; fewer if the text has no more pairs.

    Returns:
        The tokenizer as JSON.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_lines(text), trainer)
    found: str = tokenizer.to_str()
    return found


def tokens_of(text: str, learned: str) -> Tensor:
    """The tokens of a text, int32.

    Args:
        text: The text.
        learned: What :func:`learn` returned.
    """
    tokenizer = read(learned)
    parts = [encoding.ids for encoding in tokenizer.encode_batch(_lines(text))]
    return torch.from_numpy(np.fromiter((t for part in parts for t in part), np.int32))


def text_of(tokens: list[int], learned: str) -> str:
    """The text that tokens stand for; bytes that are no UTF-8 become replacement characters."""
    found: str = read(learned).decode(tokens)
    return found


def size_of(learned: str) -> int:
    """Number of tokens."""
    found: int = read(learned).get_vocab_size()
    return found


def read(learned: str) -> Any:
    """The tokenizer.

    Raises:
        ValueError: The JSON is none of a tokenizer.
    """
    try:
        return Tokenizer.from_str(learned)
    except Exception as error:  # tokenizers raises Exception itself
        raise ValueError(f"no tokenizer: {error}") from None


def _lines(text: str) -> list[str]:
    # Pairs do not reach over the end of a line, so that lines can be read one by one.
    return text.splitlines(keepends=True)

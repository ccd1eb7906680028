"""CIFAR-10 in its binary version: five files to train, one to validate, 10,000 pictures each.

A picture is a byte for its class and 3 x 32 x 32 bytes for its pixels.
"""

from __future__ import annotations

import hashlib
import tarfile
from pathlib import Path

import torch
from torch import Tensor

from ...data.regular import check_regular, open_regular

ARCHIVE = "cifar-10-binary.tar.gz"
FOLDER = "cifar-10-batches-bin"
TRAIN = tuple(f"data_batch_{i}.bin" for i in range(1, 6))
TEST = "test_batch.bin"
SHA256 = {
    "data_batch_1.bin": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
    "data_batch_2.bin": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
    "data_batch_3.bin": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
    "data_batch_4.bin": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
    "data_batch_5.bin": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
    "test_batch.bin": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
}

_CLASSES = 10
_SHAPE = (3, 32, 32)
_RECORD = 1 + 3 * 32 * 32
_PICTURES = 10_000


def read_cifar10(folder: Path) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Read and check the six files.

    Args:
        folder: Holds the files, the folder ``cifar-10-batches-bin`` with them, or the archive
            ``cifar-10-binary.tar.gz``, which is read as it is.

    Returns:
        Pictures, uint8 ``(count, 3, 32, 32)``, and labels from 0 to 9, uint8 ``(count,)``: 50,000
        to train, 10,000 to validate.

    Raises:
        FileNotFoundError: The folder or a file is missing.
        ValueError: A file has another size or SHA-256 than it should, or a class is out of range.
    """
    if not folder.is_dir():
        raise FileNotFoundError(
            f"data=cifar10:{folder} is not a folder: give the one that holds {TRAIN[0]} or "
            f"{ARCHIVE}"
        )
    files = _read_files(folder)
    parts = [_decode(name, files[name]) for name in TRAIN]
    train = torch.cat([p for p, _ in parts]), torch.cat([labels for _, labels in parts])
    return train, _decode(TEST, files[TEST])


def _read_files(folder: Path) -> dict[str, bytes]:
    for place in (folder, folder / FOLDER):
        if (place / TRAIN[0]).exists():
            return {name: _read_file(place / name) for name in SHA256}
    if not (folder / ARCHIVE).exists():
        raise FileNotFoundError(
            f"data=cifar10:{folder} holds neither {TRAIN[0]} nor {ARCHIVE}: give the folder of "
            "CIFAR-10's binary version"
        )
    return _read_archive(folder / ARCHIVE)


def _read_file(path: Path) -> bytes:
    try:
        with open_regular(path) as file:
            # Nothing is read of a file that is larger.
            return file.read(_RECORD * _PICTURES + 1)
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} is missing: unpack all of {ARCHIVE}") from None


def _read_archive(path: Path) -> dict[str, bytes]:
    files = {}
    check_regular(path)
    try:
        with tarfile.open(path) as archive:
            for member in archive:
                name = Path(member.name).name
                # Sizes are known: nothing else is read, however large it says that it is.
                if name in SHA256 and member.isfile() and member.size == _RECORD * _PICTURES:
                    file = archive.extractfile(member)
                    assert file is not None
                    files[name] = file.read()
    except (tarfile.TarError, EOFError, OSError) as error:
        raise ValueError(f"{path} is not a complete archive ({error}): download it again") from None
    missing = sorted(set(SHA256) - set(files))
    if missing:
        raise ValueError(f"{path} lacks {', '.join(missing)} of {_RECORD * _PICTURES:,} bytes")
    return files


def _size_of(raw: bytes) -> str:
    size = _RECORD * _PICTURES
    return f"more than {size:,}" if len(raw) > size else f"{len(raw):,}"


def _decode(name: str, raw: bytes) -> tuple[Tensor, Tensor]:
    if len(raw) != _RECORD * _PICTURES:
        raise ValueError(
            f"{name} has {_size_of(raw)} bytes, not the {_RECORD * _PICTURES:,} of {_PICTURES:,} "
            f"pictures of {_RECORD}: it is cut short, or not CIFAR-10's binary version"
        )
    found = hashlib.sha256(raw).hexdigest()
    if found != SHA256[name]:
        raise ValueError(
            f"{name} has SHA-256 {found}, not {SHA256[name]}: it was changed or damaged; download "
            "it again"
        )
    records = torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(_PICTURES, _RECORD)
    labels = records[:, 0]
    if int(labels.max()) >= _CLASSES:
        raise ValueError(f"{name} has the class {int(labels.max())}: CIFAR-10's are 0 to 9")
    return records[:, 1:].reshape(-1, *_SHAPE), labels

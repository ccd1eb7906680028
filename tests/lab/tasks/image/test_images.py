"""Pictures: the bundled digits, CIFAR-10's binary files, batches."""

import hashlib
import io
import tarfile

import numpy as np
import pytest
import torch

from subulp.lab.tasks.image import cifar10
from subulp.lab.tasks.image.images import Batches, Images, load_images

COUNT = 20
RECORD = 3073


@pytest.fixture
def files(monkeypatch):
    """Six files of twenty pictures each, with their sums."""
    generator = np.random.default_rng(0)
    contents = {}
    for name in cifar10.SHA256:
        records = generator.integers(256, size=(COUNT, RECORD), dtype=np.uint8)
        records[:, 0] %= 10
        contents[name] = records.tobytes()
    sums = {name: hashlib.sha256(raw).hexdigest() for name, raw in contents.items()}
    monkeypatch.setattr(cifar10, "SHA256", sums)
    monkeypatch.setattr(cifar10, "_PICTURES", COUNT)
    return contents


def write(folder, contents):
    folder.mkdir(exist_ok=True)
    for name, raw in contents.items():
        (folder / name).write_bytes(raw)


def archive(path, contents, inside="cifar-10-batches-bin/"):
    with tarfile.open(path, "w:gz") as tar:
        for name, raw in contents.items():
            member = tarfile.TarInfo(inside + name)
            member.size = len(raw)
            tar.addfile(member, io.BytesIO(raw))


def test_the_digits_are_whole():
    images = load_images("digits")
    assert images.train.shape == (1438, 1, 8, 8)
    assert images.validation.shape == (359, 1, 8, 8)
    assert images.train_labels[:10].tolist() == list(range(10))
    assert set(images.validation_labels.tolist()) == set(range(10))
    assert images.train.mean().item() == pytest.approx(0, abs=1e-6)
    assert images.train.std().item() == pytest.approx(1, abs=1e-6)
    # The first picture is a zero: dark inside, light around.
    zero = images.train[0, 0]
    assert zero[2:6, 3].max() < zero[2:6, 5].min()


@pytest.mark.parametrize("form", ["files", "folder", "archive"])
def test_cifar10_is_read_in_every_form(files, tmp_path, form):
    if form == "files":
        write(tmp_path, files)
    elif form == "folder":
        write(tmp_path / "cifar-10-batches-bin", files)
    else:
        archive(tmp_path / "cifar-10-binary.tar.gz", files)
    (train, labels), (test, test_labels) = cifar10.read_cifar10(tmp_path)
    assert train.shape == (5 * COUNT, 3, 32, 32)
    assert test.shape == (COUNT, 3, 32, 32)
    for index, name in ((0, "data_batch_1.bin"), (4, "data_batch_5.bin")):
        records = np.frombuffer(files[name], np.uint8).reshape(COUNT, RECORD)
        assert labels[COUNT * index :][:COUNT].tolist() == records[:, 0].tolist()
        picture = train[COUNT * index + 7]
        # Red, green and blue planes, row by row.
        assert picture[1, 2, 3] == records[7, 1 + 1024 + 2 * 32 + 3]
    assert test_labels.tolist() == [files["test_batch.bin"][i * RECORD] for i in range(COUNT)]
    images = load_images(f"cifar10:{tmp_path}")
    assert images.channels == 3
    torch.testing.assert_close(images.train.mean((0, 2, 3)), torch.zeros(3), atol=1e-5, rtol=0)


def test_a_missing_folder_file_or_archive(files, tmp_path):
    with pytest.raises(FileNotFoundError, match="is not a folder: give the one that holds"):
        load_images(f"cifar10:{tmp_path / 'nowhere'}")
    with pytest.raises(FileNotFoundError, match=r"holds neither data_batch_1\.bin nor"):
        load_images(f"cifar10:{tmp_path}")
    write(tmp_path, {k: v for k, v in files.items() if k != "data_batch_3.bin"})
    with pytest.raises(FileNotFoundError, match=r"data_batch_3.bin is missing: unpack all"):
        load_images(f"cifar10:{tmp_path}")


def test_a_damaged_file(files, tmp_path):
    name = "data_batch_2.bin"
    write(tmp_path, {**files, name: files[name][:-1]})
    with pytest.raises(ValueError, match=r"data_batch_2.bin has 61,459 bytes, not the 61,460"):
        load_images(f"cifar10:{tmp_path}")
    flipped = bytearray(files[name])
    flipped[100] ^= 1
    write(tmp_path, {name: bytes(flipped)})
    with pytest.raises(ValueError, match=r"data_batch_2.bin has SHA-256 .*changed or damaged"):
        load_images(f"cifar10:{tmp_path}")


def test_a_class_out_of_range(files, tmp_path, monkeypatch):
    name = "test_batch.bin"
    wrong = bytearray(files[name])
    wrong[0] = 10
    digest = hashlib.sha256(wrong).hexdigest()
    monkeypatch.setitem(cifar10.SHA256, name, digest)
    write(tmp_path, {**files, name: bytes(wrong)})
    with pytest.raises(ValueError, match=r"test_batch\.bin has the class 10"):
        load_images(f"cifar10:{tmp_path}")


def test_a_damaged_archive(files, tmp_path):
    path = tmp_path / "cifar-10-binary.tar.gz"
    archive(path, files)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"cifar-10-binary.tar.gz is not a complete archive"):
        load_images(f"cifar10:{tmp_path}")
    path.write_bytes(b"no archive")
    with pytest.raises(ValueError, match=r"cifar-10-binary.tar.gz is not a complete archive"):
        load_images(f"cifar10:{tmp_path}")
    archive(path, {k: v for k, v in files.items() if k != "test_batch.bin"})
    with pytest.raises(ValueError, match=r"lacks test_batch\.bin of 61,460 bytes"):
        load_images(f"cifar10:{tmp_path}")


def test_the_sizes_and_sums_are_those_of_cifar10():
    assert cifar10._RECORD * cifar10._PICTURES == 30_730_000
    assert all(len(s) == 64 for s in cifar10.SHA256.values())
    assert sorted(cifar10.SHA256) == sorted((*cifar10.TRAIN, cifar10.TEST))


@pytest.mark.parametrize("source", ["mnist", "cifar10:", "cifar10", ""])
def test_an_unknown_source(source):
    with pytest.raises(ValueError, match="data="):
        load_images(source)


def numbered(count, *, mirror=False):
    """Pictures whose every pixel tells its row and column, and that tell their label."""
    rows = torch.arange(8).view(8, 1) * 100.0
    picture = (rows + torch.arange(8)).expand(count, 1, 8, 8) + 10_000 * torch.arange(count).view(
        -1, 1, 1, 1
    )
    labels, zero = torch.arange(count), torch.zeros(1, 1, 1, 1)
    return Images("test", picture, labels, picture, labels, 10, 1, mirror, 4, zero, zero + 1)


def test_an_epoch_sees_every_picture_once_and_the_seed_decides_the_order():
    images = numbered(12)
    orders = []
    for seed in (0, 0, 1):
        batches = Batches(images, 4, seed, augment=False)
        drawn = [batches.draw() for _ in range(6)]
        labels = torch.stack([label for _, label in drawn])
        assert sorted(labels[:3].flatten().tolist()) == list(range(12))
        assert sorted(labels[3:].flatten().tolist()) == list(range(12))
        assert not torch.equal(labels[:3], labels[3:])
        for pictures, label in drawn:
            assert torch.equal(pictures, images.train[label])
        orders.append(labels)
    assert torch.equal(orders[0], orders[1])
    assert not torch.equal(orders[0], orders[2])


def test_augmentation_shifts_and_mirrors_whole_pictures():
    images = numbered(64, mirror=True)
    pictures, labels = Batches(images, 64, 0, augment=True).draw()
    seen = set()
    for picture, label in zip(pictures[:, 0] - 10_000 * labels.view(-1, 1, 1), labels, strict=True):
        rows, columns = picture[:, 3] // 100, picture[3] % 100
        mirrored = bool(columns[0] > columns[-1])
        unmirrored = columns.flip(0) if mirrored else columns
        shift = (int(rows[3]) - 3, int(unmirrored[3]) - 3)
        seen.add((*shift, mirrored))
        expected = (torch.arange(8) + shift[0]).clamp(0, 7)
        assert rows.tolist() == expected.tolist(), label
    assert {s[:2] for s in seen} == {(i, j) for i in (-1, 0, 1) for j in (-1, 0, 1)}
    assert {s[2] for s in seen} == {False, True}

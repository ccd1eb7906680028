import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from subulp.numerics import random_bits
from tests.numerics.support import default_dtype
from tests.oracles import philox

WORDS = st.integers(0, 2**32 - 1) | st.sampled_from((0, 1, 2**16, 2**31, 2**32 - 1))

# Random123, kat_vectors: "philox 4x32 10".
KNOWN_ANSWERS = [
    ("00000000 " * 4, "00000000 " * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff " * 4, "ffffffff " * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    (
        "243f6a88 85a308d3 13198a2e 03707344",
        "a4093822 299f31d0",
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]


def words(text: str) -> tuple[int, ...]:
    return tuple(int(word, 16) for word in text.split())


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_known_answers(counter: str, key: str, expected: str) -> None:
    ours = random_bits.philox4x32(torch.tensor(words(counter)), words(key))
    assert tuple(ours.tolist()) == words(expected)
    assert philox.philox4x32(words(counter), words(key)) == words(expected)


@settings(max_examples=200)
@given(
    counters=st.lists(st.tuples(WORDS, WORDS, WORDS, WORDS), min_size=1, max_size=8),
    key=st.tuples(WORDS, WORDS),
)
def test_philox_as_defined(counters: list[philox.Words], key: tuple[int, int]) -> None:
    ours = random_bits.philox4x32(torch.tensor(counters), key)
    assert ours.dtype == torch.int64
    assert [tuple(row) for row in ours.tolist()] == [philox.philox4x32(c, key) for c in counters]


OFFSETS = st.integers(0, 100) | st.builds(
    lambda power, shift: max(2**power + shift, 0),
    st.sampled_from((31, 32, 33, 34, 35, 36, 60)),
    st.integers(-20, 20),
)


@settings(max_examples=200)
@given(
    count=st.integers(0, 40),
    offset=OFFSETS,
    width=st.sampled_from((16, 32)),
    seed=WORDS,
    stream=WORDS,
    step=WORDS,
    slot=WORDS,
)
def test_draw_as_documented(count: int, offset: int, width: int, **address: int) -> None:
    """Every element has the bits of its own address, on both sides of 2**34 and 2**35 too."""
    ours = random_bits.draw((count,), offset=offset, width=width, **address)
    assert ours.dtype == torch.int64
    assert ours.tolist() == [philox.draw(offset + i, width=width, **address) for i in range(count)]


def test_defaults_are_address_zero() -> None:
    assert random_bits.draw((4,), seed=0).tolist() == list(words(KNOWN_ANSWERS[0][2]))


def test_layout_of_16_bit_draws() -> None:
    """Half-words, low half first, in the upper half of each result."""
    block = words(KNOWN_ANSWERS[0][2])
    halves = [half << 16 for word in block for half in (word & 0xFFFF, word >> 16)]
    assert random_bits.draw((8,), seed=0, width=16).tolist() == halves


def test_the_block_counter_carries_into_its_high_word() -> None:
    """Element 2**34 (32-bit draws) and element 2**35 (16-bit) open block 2**32."""
    expected = philox.philox4x32((0, 1, 5, 6), (3, 4))
    address = {"seed": 3, "stream": 4, "step": 5, "slot": 6}
    assert random_bits.draw((4,), offset=2**34, **address).tolist() == list(expected)
    narrow = random_bits.draw((8,), offset=2**35, width=16, **address)
    assert narrow.tolist() == [h << 16 for w in expected for h in (w & 0xFFFF, w >> 16)]


@pytest.mark.parametrize("width", [16, 32])
def test_scattered_elements_draw_what_the_whole_draws(width: int) -> None:
    address = {"seed": 3, "stream": 4, "step": 5, "slot": 6, "width": width}
    for offset in (0, 2**34 - 8, 2**35 - 8):
        whole = random_bits.draw((16,), offset=offset, **address)
        index = torch.arange(offset, offset + 16).flip(0).view(2, 8)
        assert torch.equal(random_bits.draw_at(index, **address), whole.flip(0).view(2, 8))


@settings(max_examples=100)
@given(
    sizes=st.lists(st.integers(0, 37), min_size=1, max_size=6),
    offset=OFFSETS,
    width=st.sampled_from((16, 32)),
)
def test_chunks_draw_what_the_whole_draws(sizes: list[int], offset: int, width: int) -> None:
    address = {"seed": 7, "stream": 1, "step": 2, "slot": 1, "width": width}
    whole = random_bits.draw((sum(sizes),), offset=offset, **address)
    starts = [offset + sum(sizes[:i]) for i in range(len(sizes))]
    chunks = [
        random_bits.draw((size,), offset=start, **address)
        for size, start in zip(sizes, starts, strict=True)
    ]
    assert torch.equal(torch.cat(chunks), whole)


@pytest.mark.parametrize("width", [16, 32])
def test_the_shape_is_filled_in_row_major_order(width: int) -> None:
    flat = random_bits.draw((30,), seed=1, offset=5, width=width)
    for shape in ((5, 6), (2, 3, 5), torch.Size((30, 1))):
        shaped = random_bits.draw(shape, seed=1, offset=5, width=width)
        assert torch.equal(shaped, flat.view(shape))
    assert random_bits.draw((), seed=1, offset=5, width=width) == flat[0]
    assert random_bits.draw((0, 3), seed=1, width=width).shape == (0, 3)


def test_every_part_of_the_address_matters() -> None:
    address = {"seed": 1, "stream": 2, "step": 3, "slot": 4}
    draws = [random_bits.draw((64,), **address)]
    draws += [random_bits.draw((64,), **(address | {name: 9})) for name in address]
    for i, one in enumerate(draws):
        assert not any(torch.equal(one, other) for other in draws[:i])


def test_the_global_generator_is_not_touched() -> None:
    before = torch.get_rng_state()
    first = random_bits.draw((16,), seed=1)
    torch.manual_seed(5)
    assert torch.equal(random_bits.draw((16,), seed=1), first)
    torch.set_rng_state(before)
    random_bits.draw((16,), seed=1)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_default_dtype_does_not_matter(dtype: torch.dtype) -> None:
    expected = random_bits.draw((33,), seed=1, offset=2**35 - 1)
    with default_dtype(dtype):
        assert torch.equal(random_bits.draw((33,), seed=1, offset=2**35 - 1), expected)


@pytest.mark.parametrize("value", [-1, 2**32])
@pytest.mark.parametrize("name", ["seed", "stream", "step", "slot"])
def test_a_word_out_of_range(name: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"{name}={value}"):
        random_bits.draw((1,), **({"seed": 0} | {name: value}))


@pytest.mark.parametrize("width", [0, 8, 24, 64])
def test_a_width_that_is_not_available(width: int) -> None:
    with pytest.raises(ValueError, match=f"width={width}"):
        random_bits.draw((1,), seed=0, width=width)


def test_a_negative_offset() -> None:
    with pytest.raises(ValueError, match="offset=-3"):
        random_bits.draw((1,), seed=0, offset=-3)


@st.composite
def parts(draw) -> tuple[list[int], list[slice], list[int]]:
    """A whole shape, a part of it, and an order of its dimensions in memory."""
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    bounds = [sorted(draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape]
    return shape, [slice(*b) for b in bounds], draw(st.permutations(range(len(shape))))


@settings(max_examples=300)
@given(part=parts(), width=st.sampled_from((16, 32)))
def test_a_part_draws_what_the_whole_draws(part, width) -> None:
    """Any rectangular part of four dimensions, in any layout."""
    shape, place, order = part
    count = torch.Size(shape).numel()
    address = {"seed": 3, "stream": 4, "step": 5, "width": width}
    strides = torch.empty([shape[d] for d in order]).stride()
    number = torch.arange(count).as_strided(
        shape, [strides[order.index(d)] for d in range(len(shape))]
    )
    # As a shard of it lies in memory: its own dimensions in the same order.
    held = number[tuple(place)].permute(order)
    offset = sum(s.start * number.stride(d) for d, s in enumerate(place))
    region = random_bits.Region.of(held.shape, held.stride(), offset)
    assert region.indices(held.numel()).tolist() == held.flatten().tolist()
    whole = random_bits.draw((count,), **address)
    assert torch.equal(random_bits.draw_part(held.shape, region, **address), whole[held])


def test_a_part_scattered_over_five_dimensions_is_refused() -> None:
    shape, strides = (2, 2, 2, 2, 2), (81 * 3, 27 * 3, 9 * 3, 3 * 3, 3)
    with pytest.raises(ValueError, match="more than four dimensions"):
        random_bits.Region.of(shape, strides, 0)

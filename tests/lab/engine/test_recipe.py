import pytest

from subulp.lab.engine.recipe import one_cycle


def test_the_learning_rate_rises_in_a_line_and_falls_in_a_cosine():
    factors = [one_cycle(step, 101, warmup=0.1, final=0.2) for step in range(101)]
    assert factors[:10] == pytest.approx([0.1 * (i + 1) for i in range(10)])
    assert factors[10] == 1
    assert factors[55] == pytest.approx(0.6)
    assert factors[-1] == pytest.approx(0.2)
    assert [one_cycle(step, 2, warmup=1.0, final=0.1) for step in (0, 1, 2)] == [0.5, 1, 1]

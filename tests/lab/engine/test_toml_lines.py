"""Lines of TOML's tables and keys, told from what only looks like them."""

import tomllib

import pytest

from subulp.lab.engine.toml_lines import lines_of

DOCUMENT = """\
# a = 0
a = 1

"b c" = [
  "x",
  "[e]",
]
[e]  # [f]
g = '''
[f]
a = 3
'''
[[h]]
[[h]]
i.j = [  # ]
  [1],
  [2]
]
[h.k]
l = 1
[m.n]
o = {p = 1, q = [1, {r = 2}]}
"""

LINES = {
    ("a",): 2,
    ("b c",): 4,
    ("e",): 8,
    ("e", "g"): 9,
    ("h",): 13,
    ("h", 0): 13,
    ("h", 1): 14,
    ("h", 1, "i"): 15,
    ("h", 1, "i", "j"): 15,
    ("h", 1, "k"): 19,
    ("h", 1, "k", "l"): 20,
    ("m",): 21,
    ("m", "n"): 21,
    ("m", "n", "o"): 22,
    ("m", "n", "o", "p"): 22,
    ("m", "n", "o", "q"): 22,
    ("m", "n", "o", "q", 1): 22,
    ("m", "n", "o", "q", 1, "r"): 22,
}


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_lines(newline):
    text = DOCUMENT.replace("\n", newline)
    assert tomllib.loads(text)
    assert lines_of(text) == LINES
    assert lines_of("") == {}


def test_a_long_value_is_not_parsed_after_each_of_its_lines(monkeypatch):
    calls = []
    loads = tomllib.loads
    monkeypatch.setattr(tomllib, "loads", lambda text: calls.append(text) or loads(text))
    lines_of("a = [\n" + "'x',\n" * 10_000 + "]\nb = 1\n")
    assert len(calls) < 10

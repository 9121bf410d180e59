import pytest
from IPython.core.inputtransformer2 import TransformerManager

from notebook_accel.launch.text.used_names import names_of


def used(text):
    """What a cell uses, print aside."""
    return set(names_of(TransformerManager().transform_cell(text)).used) - {"print", "get_ipython"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("def train(model): return model\nmodel = 5\ntrain(model)", ""),
        ("def train(*, x=x): return [x, y]", "x y"),
        ("scale = lambda x=x: x\nx = 1", "x"),
        ("[x for x in x]", "x"),
        ("[y for x in rows for y in x]\ny = x = 1", "rows"),
        ("[scaled(x) for x in rows if keep(x)]\nx = 1", "scaled rows keep"),
        ("[lambda y: x + y + z for x in rows]\nx = y = 1", "rows z"),
        ("class A:\n    rows = [scaled(k) for _ in range(k)]", "scaled range k"),
        ("{row: value for row, value in pairs}\nrow = value = 1", "pairs"),
        ("found = any((hit := row) for row in rows)\nprint(hit)", "any rows"),
        ("def count():\n    n = 0\n    def add():\n        nonlocal n\n        n += 1\nn = 1", ""),
        ("def count():\n    global n\n    n += 1", "n"),
        ("class Net:\n    size = 3\n    def __init__(self): self.size = size", "size"),
        ("class Config:\n    lr = lr", "lr"),
        ("@cached\ndef f(x: Kind = default) -> Given: return x", "cached Kind default Given"),
        ("class A(Base, metaclass=Meta):\n    b: Part", "Base Meta Part"),
        ("g = 1\ndef f(): return g", ""),
        ("def f():\n    import numpy\n    for i in numpy.arange(k): pass\ni = numpy = 1", "k"),
        ("def f():\n    try: pass\n    except Error as error: error\nerror = 1", "Error"),
        ("total += 1", "total"),
        ("if ready:\n    def f(x): return x + y\nx = 1", "ready y"),
        ("for f in [lambda x: x + y]: f(x)\nx = 1", "x y"),
        ("await f(x async for x in y)", "f y"),
        # ---- what IPython reads ----
        ("%time print(f'{x:.2f}')", "x"),
        # A micro sign, which Python keeps as the Greek letter.
        ("%timeit -n 3 f(\u00b5)", "f n \u03bc"),
        ("%timeit -n 3 print(f'{x:.2f}')", "x n"),
        ("%%time\nprint(f'{rows}', rb'model')", "rows model"),
        ("!ls {folder} $name", "ls folder name"),
        ('%cd "{folder}/a"', "folder a"),
        ("def f():\n    !ls {folder}", "ls folder"),
    ],
)
def test_names_that_a_cell_looks_up_are_used_and_no_others(text, expected):
    assert used(text) == set(expected.split())


def test_a_long_chain_of_calls_loses_no_name():
    names = names_of("import os.path\nx = os.path.join(y)" + ".replace(a, b)" * 200)
    assert names.used == {"y", "a", "b"}
    assert names.dotted == {"os.path", "os.path.join"}

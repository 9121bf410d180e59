"""The docstrings of all public names: each argument named, examples that run.

The examples of a class's methods go on from the example of the class, as a notebook's cells would.
"""

import doctest
import enum
import importlib
import inspect
import re
from types import FunctionType

import pytest
from IPython import get_ipython
from IPython.core.inputtransformer2 import TransformerManager

import notebook_accel
from tests.kernel.notebooks import open_notebook
from tests.launches import without_gloo
from tests.public import DOORS, public_names

# Names of Accelerate itself (``.compat.``) have its own docstrings.
OURS = sorted(name for name, module in public_names().items() if ".compat." not in module)
# Whose methods name their arguments, and whose have an example each.
WITH_ARGUMENTS = ("Accelerator", "AcceleratorState", "ConfigPicker", "LaunchConfig", "Run")
WITH_EXAMPLES = ("Accelerator", "Run")


def _members(kind):
    """The public methods and properties of a class that this package defines."""
    for owner in reversed(kind.__mro__):
        if owner.__module__.startswith("notebook_accel"):
            for name, member in vars(owner).items():
                plain = getattr(member, "__func__", member)
                if not name.startswith("_") and isinstance(plain, (FunctionType, property)):
                    yield name, plain


def _behind_doors():
    """What ``notebook_accel.utils`` and the other doors of ``compat/`` offer of ours."""
    for door in DOORS:
        module = importlib.import_module(door)
        for name, found in [(name, getattr(module, name)) for name in dir(module)]:
            is_ours = getattr(found, "__module__", "").startswith("notebook_accel")
            if is_ours and isinstance(found, (type, FunctionType)) and not name.startswith("_"):
                yield found.__name__, found


DOCUMENTED = {**dict(_behind_doors()), **{name: getattr(notebook_accel, name) for name in OURS}}
for each in OURS:
    if inspect.isclass(DOCUMENTED[each]):
        DOCUMENTED |= {f"{each}.{name}": found for name, found in _members(DOCUMENTED[each])}


def _examples(documented):
    # Its own, and not those of torch's class, whose docstring a method without one has.
    text = inspect.cleandoc(documented.__doc__ or "")
    return doctest.DocTestParser().get_examples(text)


def _arguments(documented):
    """Those of a function; those of a class that are no fields, which have a text below each."""
    if isinstance(documented, (property, enum.EnumMeta)):
        return set()
    fields = {*getattr(documented, "__dataclass_fields__", ())}
    call = documented
    if inspect.isclass(documented):
        # These a launch or sweep makes; others have the arguments of a class above them.
        made_elsewhere = (notebook_accel.Run, notebook_accel.Sweep)
        if documented in made_elsewhere or "__init__" not in vars(documented):
            return set()
        call = documented.__init__
    return {*inspect.signature(call).parameters} - {"self", "cls", "args", "kwargs"} - fields


def test_a_docstring_names_each_argument():
    missing = []
    for name, documented in DOCUMENTED.items():
        text = inspect.getdoc(documented) or ""
        if inspect.isclass(documented):
            text += inspect.getdoc(documented.__init__) or ""
        if "." not in name or name.split(".")[0] in WITH_ARGUMENTS:
            missing += [
                f"{name}({argument})"
                for argument in sorted(_arguments(documented))
                if not re.search(rf"^ +\*{{0,2}}{argument}: ", text, re.MULTILINE)
            ]
    assert missing == []


def test_a_docstring_has_an_example():
    missing = [
        name
        for name, documented in DOCUMENTED.items()
        if name in OURS
        or (name.split(".")[0] in WITH_EXAMPLES and isinstance(documented, FunctionType))
        if not _examples(documented)
    ]
    assert missing == []


class _Checker(doctest.OutputChecker):
    """Compares with what stands below an example, where something does: views print as they run."""

    def check_output(self, want, got, optionflags):
        return not want or super().check_output(want, without_gloo(got), optionflags)


def run_examples(name):
    """Run the examples of a name, after those of its class; called in a kernel."""
    kind, *_ = name.split(".")
    examples = [
        *(_examples(DOCUMENTED[kind]) if kind != name else ()),
        *_examples(DOCUMENTED[name]),
    ]
    for number, example in enumerate(examples):
        example.source = TransformerManager().transform_cell(example.source)  # magics
        example.lineno = number
    names = {"__name__": "__main__", "get_ipython": get_ipython}
    wrong = []
    options = doctest.IGNORE_EXCEPTION_DETAIL | doctest.NORMALIZE_WHITESPACE
    runner = doctest.DocTestRunner(_Checker(), optionflags=options)
    runner.run(doctest.DocTest(examples, names, name, None, 0, None), out=wrong.append)
    assert not wrong, "".join(wrong)


@pytest.fixture(scope="module")
def notebook():
    with open_notebook() as notebook:
        notebook.run("from tests.test_docstrings import run_examples")
        yield notebook


@pytest.mark.parametrize(
    "name", [name for name, documented in DOCUMENTED.items() if _examples(documented)]
)
def test_an_example_runs(name, notebook):
    notebook.run(f"run_examples({name!r})")

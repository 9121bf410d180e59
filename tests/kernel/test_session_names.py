"""Which names of the notebook reach the ranks of ``%%accelerate``, in a real kernel."""

import pytest

from tests.kernel.notebooks import open_notebook


@pytest.fixture(scope="module")
def book(tmp_path_factory):
    """One notebook with one session of two ranks for the tests of this file."""
    profile = tmp_path_factory.mktemp("ipython")
    startup = profile / "profile_default" / "startup"
    startup.mkdir(parents=True)
    (startup / "00.py").write_text("import collections as cs\ndef of_startup(): return cs.__name__")
    with open_notebook({"IPYTHONDIR": str(profile)}) as notebook:
        notebook.run("%load_ext notebook_accel\nimport torch, functools")
        notebook.run("%%accelerate -n 2\npass")
        yield notebook


def test_what_lives_in_the_session_uses_the_newest_names_of_the_notebook(book):
    book.run("""
        lr = 1
        def helper(): return "old"
        def through(): return of_ranks()
        def of_notebook(): return lr, helper()
        class OfNotebook(torch.nn.Module):
            def forward(self): return lr, helper()
    """)
    book.run("""
        %%accelerate
        def of_ranks(): return lr, helper()
        class Trainer:
            def go(self): return of_ranks()
            @classmethod
            def go_alike(cls): return lr, helper()
            @property
            def gone(self): return (lambda: (lr, helper()))()
        class Net(torch.nn.Module):
            def forward(self): return lr, helper()
        trainer, mine = Trainer(), "of the session"
        step = functools.partial(trainer.go)
        no_grad = torch.no_grad()(lambda: (lr, helper(), mine))
        net = torch.nn.Sequential(Net()).eval()
        theirs, partial = OfNotebook(), functools.partial(of_notebook)
        del of_notebook
        def logged(function): return lambda: function()
        def wrapped(): return lr, helper()
        wrapped = logged(wrapped)
        %time timed = OfNotebook()
    """)
    # What a cell that fails would have defined changes nothing.
    failed = "%%accelerate\nraise ValueError\ndef wrapped(): pass\nclass Net: pass"
    assert "ValueError" in book.fails(failed)
    book.run("lr, mine_too = 2, 0\ndef helper(): return 'new'")
    for call in (
        "of_ranks()",
        "trainer.go()",
        "Trainer.go_alike()",
        "trainer.gone",
        "step()",
        "no_grad()[:2]",
        "net[0]()",
        "through()",
        "theirs()",
        "partial()",
        "wrapped()",
        "timed()",
    ):
        book.run("lr = lr + 1")
        newest = book.run("lr; print(lr)").strip()
        assert book.run(f"%%accelerate\n{call}") == f"ranks 0-1: ({newest}, 'new')\n", call
    # What the session has assigned itself stays, also below a function that it has.
    book.run("%%accelerate\nlr = 'of the session'")
    assert book.run("%%accelerate\nof_ranks()[0]") == "ranks 0-1: 'of the session'\n"
    # A method that was put in later counts, too.
    book.run("%%accelerate\nTrainer.go = lambda self: put_in")
    book.run("put_in = 'put in'")
    assert book.run("%%accelerate\nTrainer().go()") == "ranks 0-1: 'put in'\n"
    # Not what only has the name of an attribute.
    book.run("%%accelerate\ndef reads(one): return one.generator")
    book.run("generator = (i for i in [1])")
    assert book.run("%%accelerate\nreads(type('One', (), {'generator': 5}))") == "ranks 0-1: 5\n"


def test_names_that_only_functions_and_texts_have_are_not_pushed(book):
    book.run("model = f = (i for i in [1])\nrows = 3")
    text = book.run("%%accelerate\ndef train(model): return model\nmodel = 5\ntrain(model)")
    assert text == "ranks 0-1: 5\n"
    book.run("%%accelerate\n%time print(f'{rows:.2f}')")
    text = book.fails("%%accelerate\ndef g(): return f")
    assert "`f` (generator) cannot travel to the session" in text


def test_modules_of_a_package_that_the_notebook_has_are_there(book):
    book.run("""
        import wsgiref.util, xml.dom as trees, xml.dom.minidom, xmlrpc.client, sys, types
        def of_notebook(): return xmlrpc.client.__name__
        import curses
        sys.modules["curses.made"] = curses.made = types.ModuleType("curses.made")
    """)
    assert book.run("%%accelerate\nwsgiref.util.__name__, of_notebook()") == (
        "ranks 0-1: ('wsgiref.util', 'xmlrpc.client')\n"
    )
    assert book.run("%%accelerate\ndef parse(): return trees.minidom.__name__\nparse()") == (
        "ranks 0-1: 'xml.dom.minidom'\n"
    )
    assert "wsgiref.simple_server" in book.run(
        "import wsgiref.simple_server\n"
        "get_ipython().run_cell_magic('accelerate', '', '%time x = wsgiref.simple_server\\nx')"
    )
    text = book.fails("%%accelerate\ncurses.made")
    assert "module 'curses' has no attribute 'made'" in text


def test_names_of_startup_files_are_the_persons_and_those_of_ipython_are_not(book):
    assert book.run("%%accelerate\ncs.__name__, of_startup()") == (
        "ranks 0-1: ('collections', 'collections')\n"
    )
    # As %pylab does it.
    book.run("get_ipython().push({'of_magic': 5}, interactive=False)\n%accelerate push of_magic,cs")
    assert book.run("%%accelerate --no-push\nof_magic") == "ranks 0-1: 5\n"
    book.run("%%accelerate\nopen, exit, quit, get_ipython(), In, Out, __name__, __doc__;")
    for name in ("open", "get_ipython", "In", "__name__"):
        assert f"the notebook has no `{name}`" in book.fails(f"%accelerate push {name}")
    book.run("open = 3")
    assert book.run("%%accelerate\nopen") == "ranks 0-1: 3\n"
    book.run("%%accelerate\nopen = 4")
    assert book.run("%%accelerate\nopen") == "ranks 0-1: 4\n"
    book.run("del open")

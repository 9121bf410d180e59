"""``%%accelerate`` on persistent workers, in a real kernel: what one cell leaves the next finds."""

import os
import re
import signal
import sys
import textwrap

import psutil
import pytest

from tests.interpreters import run
from tests.kernel.notebooks import open_notebook
from tests.waiting import eventually

SOON = 60.0


@pytest.fixture(scope="module")
def book():
    """One notebook with one session of two ranks for nearly all tests of this file."""
    with open_notebook() as notebook:
        notebook.run("%load_ext notebook_accel\nimport torch, numpy as np")
        notebook.run("device = 'mine, from before the session'")
        notebook.run("%%accelerate -n 2\npids = __import__('os').getpid()")
        yield notebook


def values(reply):
    """The texts of what a cell showed, its header line aside."""
    assert reply.status == "ok", "\n".join(reply.traceback)
    texts = [output["data"]["text/plain"] for output in reply.outputs]
    return [text for text in texts if not re.match(r"In\[\d+\]: ", text)]


def cell(book, code):
    """Run a cell in which ``%%`` may be left out."""
    return book.finish(book.start(code))


# ---- a cell and the next -------------------------------------------------------------------


def test_names_stay_and_values_are_shown_by_rank(book):
    first = book.run("%%accelerate\nx = rank * 10\nx")
    assert first == "rank 0: 0\nrank 1: 10\n"
    assert book.run("%%accelerate\nx + 1, _, world_size, str(device)") == (
        "rank 0: (1, 0, 2, 'cpu')\nrank 1: (11, 10, 2, 'cpu')\n"
    )
    assert book.run("%%accelerate\n'same'") == "ranks 0-1: 'same'\n"
    assert book.run("%%accelerate\nx;") == ""
    assert book.run("%%accelerate --ranks 1\nx") == "rank 1: 10\n"
    assert book.run("%%accelerate -n 2\nIn[-1].splitlines()[-1]") == (
        "ranks 0-1: 'In[-1].splitlines()[-1]'\n"
    )


@pytest.fixture
def short(book):
    """Cells of less than a minute are short: on a busy machine, one of a second may take that."""
    book.run("from notebook_accel.notebook import views")
    book.run("usual_second, views._SLIM_SECONDS = views._SLIM_SECONDS, 60.0")
    yield
    book.run("views._SLIM_SECONDS = usual_second")


@pytest.mark.usefixtures("short")
def test_a_short_cell_has_one_slim_line_and_no_table(book):
    reply = cell(book, "%%accelerate\nprint('hello')\n1")
    headers = [output["data"] for output in reply.outputs]
    assert [re.sub(r"\d+", "N", one["text/plain"]) for one in headers] == [
        "In[N]: succeeded, N ranks, N.N s\noutput of ranks N-N:\nhello"
    ]
    assert "<table" not in headers[0]["text/html"]
    assert "hello" in headers[0]["text/html"]
    assert reply.text == "ranks 0-1: 1\n"


def test_magics_shell_lines_and_top_level_await(book):
    reply = cell(
        book,
        """
        %%accelerate
        import asyncio
        await asyncio.sleep(0)
        total = %sx echo {rank + 1}
        %time counted = sum(range(5))
        total[0], counted
        """,
    )
    assert reply.text == "rank 0: ('1', 10)\nrank 1: ('2', 10)\n"
    assert "Wall time" in book.run("%accelerate logs 0")
    # What a terminal would obey is left out of logs: a line that writes the clipboard, say.
    book.run('%%accelerate\nprint("\\x1b]52;c;ZXZpbA==\\x07a, \\x1b[2J\\x9b2Jc")')
    for command in ("%accelerate logs", "%accelerate logs 0"):
        assert re.search(r"(?m)^(\[rank 0\] )?a, c$", book.run(command))


def test_tables_figures_and_html_are_shown_richly(book):
    reply = cell(
        book,
        """
        %%accelerate
        import pandas, matplotlib.pyplot as plt
        from IPython.display import HTML, display
        display(HTML(f"<b>of {rank}</b>"))
        plt.plot([1, 2])
        pandas.DataFrame({"rank": [rank]})
        """,
    )
    kinds = [set(output["data"]) - {"text/plain"} for output in reply.outputs]
    assert {"image/png"} in kinds, "the figure is shown without plt.show()"
    html = [output["data"].get("text/html", "") for output in reply.outputs]
    assert "<b>of 0</b>" in html
    assert sum('class="dataframe"' in text for text in html) == 2
    assert values(reply)[-4:-3] == ["rank 0"]
    assert values(reply)[-2:-1] == ["rank 1"]
    # Equal ones once, below the ranks that have it.
    reply = cell(book, "%%accelerate\npandas.DataFrame({'rank': [7]})")
    assert values(reply)[-2] == "ranks 0-1"
    tables = [output for output in reply.outputs if "dataframe" in str(output)]
    assert len(tables) == 1


def test_an_error_has_the_lines_of_its_cell_and_the_names_before_it_stay(book):
    text = book.fails("%%accelerate\nkept = 'before'\nif rank == 1:\n    raise ValueError('bad')")
    assert re.search("rank 1 failed:\n(.*\n)+ValueError: bad\n", text)
    assert re.search(r"Cell In\[\d+\], line 4, in <module>\n    raise ValueError", text)
    assert "notebook_accel/" not in text.replace("notebook_accel.runs", "")
    assert book.run("%%accelerate\nkept") == "ranks 0-1: 'before'\n"
    text = book.fails("kept")
    assert "NameError" in text


def test_a_failed_rank_is_looked_into_by_commands(book):
    failure = book.fails("""
        %%accelerate
        def divide(total, parts):
            kind = "whole"
            return total // parts
        if rank == 1:
            divide(7, 0)
    """)
    assert failure.endswith("`%accelerate debug` looks into its frames")
    stack = typed(book, "%accelerate debug", "rank 1 (pdb) ", ["w", "q"])
    assert "<module>" in stack
    assert not re.search(r"notebook_accel|IPython", stack), "it begins at the cell"
    commands = ["p total, parts, kind", "up", "p rank", "!kind", "interact", "c", "q"]
    text = typed(book, "%accelerate debug", "rank 1 (pdb) ", commands)
    error, place, line, *answers = text.splitlines()
    assert error == "ZeroDivisionError: integer division or modulo by zero"
    assert re.fullmatch(r"Cell In\[\d+\]\(4\)divide\(\)", place.removeprefix("> "))
    assert line == "-> return total // parts"
    assert answers[0] == "(7, 0, 'whole')"
    assert "(6)<module>()" in answers[1]
    assert answers[3:5] == ["1", "*** NameError: name 'kind' is not defined"]
    # Python 3.13 says before that it starts.
    assert "nobody can answer in a rank" in answers[-2]
    assert "nothing goes on here" in answers[-1]
    assert "rank 0 has no error to look into; rank 1 has" in book.fails("%accelerate debug 0")
    assert book.run("%%accelerate\nrank") == "rank 0: 0\nrank 1: 1\n"
    assert "no rank has an error to look into" in book.fails("%accelerate debug")
    book.fails("%%accelerate\naccelerator.skip_first_batches(None, -1)")
    text = typed(book, "%accelerate debug 0", "rank 0 (pdb) ", ["q"])
    assert text.endswith("-> accelerator.skip_first_batches(None, -1)\n"), "ours is not opened"
    book.run("found = 'here'")
    book.run("%%accelerate --bg --pull found\nfound = 'there'\nif rank:\n    late = 1 // 0")
    assert "ZeroDivisionError" in typed(book, "%accelerate debug", "rank 1 (pdb) ", ["q"])
    shown = [data["data"].get("text/plain", "") for data in book.kernel.displays.values()]
    assert any(re.match(r"In\[\d+\] failed. `%accelerate debug` looks", text) for text in shown)
    assert book.run("print(found)") == "here\n", "as where the cell waits, nothing is pulled"


def test_a_breakpoint_opens_the_debugger_below_its_cell(book):
    text = """
        %%accelerate
        def stop(there):
            breakpoint()
            return "beyond"
        here = [rank]
        here = stop(here)
    """
    reply = answer(book, text, "rank . \\(pdb\\) ", ["there", "debug there", "up", "p here", "q"])
    assert re.search(r"-> breakpoint\(\)\n\[(.)\]\n(.*\n)*\[\1\]\n$", reply.text)
    # What stands after it has not run, so that the cell has failed, and no other one runs.
    assert "BreakpointError: breakpoint() ends the call" in "\n".join(reply.traceback)
    # The other ranks can be looked into as well, and all have what they had.
    assert "rank 5 has no error to look into; ranks 0-1 have" in book.fails("%accelerate debug 5")
    assert "[1]\n" in typed(book, "%accelerate debug 1", "rank 1 (pdb) ", ["there", "q"])
    assert book.run("%%accelerate\nhere") == "rank 0: [0]\nrank 1: [1]\n"
    # Where nobody can be asked, the cell just fails.
    for cell, said in (
        (text, "breakpoint() ends the call"),
        ("%accelerate debug", "nobody can be asked here"),
    ):
        reply = book.kernel.run(textwrap.dedent(cell).strip(), allow_stdin=False)
        assert said in "\n".join(reply.traceback)


def test_a_launch_with_debug_holds_its_ranks_for_the_debugger(book):
    book.run("""
        import os
        import notebook_accel
        from notebook_accel import notebook_launcher
        total = 7
        def train(parts):
            return total // parts if int(os.environ["RANK"]) else os.getpid()
    """)
    launch = "run = notebook_launcher(train, ({},), num_processes=2, devices='cpu', debug=True{})"
    failure = book.fails(launch.format(0, ""))
    assert "`%accelerate debug` looks into its frames; the ranks wait" in failure
    assert "the ranks of train, which failed, wait" in book.run("%accelerate status")
    text = typed(book, "%accelerate debug", "rank 1 (pdb) ", ["w", "p parts, total", "q"])
    assert "ZeroDivisionError" in text
    assert "notebook_accel" not in text
    assert text.endswith("(0, 7)\nthe ranks of the launch have ended\n")
    assert book.run("%%accelerate\n'still here'") == "ranks 0-1: 'still here'\n"
    # A next launch ends what was held.
    book.fails(launch.format(0, ""))
    held = book.value("[rank.pid for rank in notebook_accel.runs()[-1].state.ranks]")
    assert all(map(psutil.pid_exists, held))
    book.run(launch.format(1, ""))
    eventually(lambda: not any(map(psutil.pid_exists, held)), within=SOON, what="held ranks end")
    assert book.run("print(run[1])") == "7\n"


def typed(book, cell, prompt, answers):
    """Run a cell that asks, and answer; gives what it printed."""
    reply = answer(book, cell, re.escape(prompt), answers)
    assert reply.status == "ok", "\n".join(reply.traceback)
    return reply.text


def answer(book, cell, prompt, answers):
    """Run a cell that asks, and answer, where the pattern of the prompt fits."""
    started = book.start(cell)
    client = book.kernel.client
    for text in answers:
        asked = client.get_stdin_msg(timeout=SOON)["content"]["prompt"]
        assert re.fullmatch(prompt, asked), asked
        client.input(text)
    return book.finish(started)


def test_options_that_do_not_fit_the_session_reach_no_rank(book, tmp_path):
    assert "`%accelerate restart -n 3`" in book.fails("%%accelerate -n 3\n1")
    assert "the session has the ranks 0 to 1" in book.fails("%%accelerate --ranks 0,2\n1")
    for command in ("logs 9", "stacks 9", "pull --rank 9 pids"):
        assert "no rank 9: the session has the ranks 0 to 1" in book.fails(f"%accelerate {command}")
    for command in ("pull", "push"):
        assert "expected some such as model,loss" in book.run(f"%accelerate {command}")
    assert "expected %accelerate stop, with nothing more" in book.run("%accelerate stop -n 4")
    before = book.run("%%accelerate\npids")
    (tmp_path / "launch.yaml").write_text("devices: [99]\n")
    text = book.fails(f"%accelerate restart --config {tmp_path / 'launch.yaml'}")
    assert "devices" in text
    assert "300000 ranks need" in book.fails("%accelerate restart -n 300000")
    assert book.run("%%accelerate\npids") == before, "the session goes on"
    text = book.run("""
        from notebook_accel import notebook_launcher
        run = notebook_launcher(len, ((),), session=True, rdzv_id="mine")
    """)
    shown = [str(data["data"]) for data in book.kernel.displays.values()]
    assert any("rdzv_id is not used" in part for part in (text, *shown))


# ---- names of the notebook -----------------------------------------------------------------


def test_what_the_cell_uses_is_pushed_until_the_session_assigns_it(book):
    book.run("""
        factor, rows = 3, [1]
        def scaled(value):
            return value * factor
        class Point:
            def __init__(self, x): self.x = scaled(x)
    """)
    assert book.run("%%accelerate\nscaled(2), Point(5).x, rows") == "ranks 0-1: (6, 15, [1])\n"
    book.run("factor = 4\nrows.append(2)")
    assert book.run("%%accelerate\nscaled(2), rows") == "ranks 0-1: (8, [1, 2])\n"
    # Changed in place by the ranks, but unchanged here: it is not pushed over their work.
    book.run("%%accelerate\nrows.append(rank)")
    assert book.run("%%accelerate\nrows") == "rank 0: [1, 2, 0]\nrank 1: [1, 2, 1]\n"
    # The session assigns it: the notebook's stays at home, also where a function uses it.
    book.run("%%accelerate\nfactor = 100")
    assert book.run("%%accelerate\nscaled(2)") == "ranks 0-1: 200\n"
    # The notebook assigns it anew, if only the same.
    book.run("factor = 4")
    assert book.run("%%accelerate\nscaled(2)") == "ranks 0-1: 8\n"
    assert book.run("factor, rows") == ""


def test_what_the_ranks_made_of_a_name_is_not_pushed_over(book):
    book.run("""
        from notebook_accel import notebook_launcher
        trained = [0]
        def train():
            trained.append(7)
        run = notebook_launcher(train, session=True)
    """)
    assert book.run("%%accelerate\ntrained") == "ranks 0-1: [0, 7]\n"
    book.run("%%accelerate\ntrained.append(rank)")
    book.run("trained = None\n%accelerate pull trained")
    assert book.run("%%accelerate\ntrained") == "rank 0: [0, 7, 0]\nrank 1: [0, 7, 1]\n"
    # A line that did not run assigned nothing.
    book.run("trained = 'here'")
    book.run("%%accelerate\nif rank > 5:\n    trained = 'there'")
    assert book.run("%%accelerate\ntrained") == "ranks 0-1: 'here'\n"


def test_an_optimizer_and_its_model_stay_together(book):
    book.run("""
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    """)
    text = book.run("""
        %%accelerate
        before = model.weight.detach().clone()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        torch.allclose(model.weight, before - 0.1)
    """)
    assert text == "ranks 0-1: True\n"
    # What was trained there is not pushed over by the next cell that names it.
    again = "%%accelerate\ntorch.allclose(model.weight, before - 0.1)"
    assert book.run(again) == "ranks 0-1: True\n"
    book.run("with torch.no_grad(): model.weight.zero_()")
    assert book.run("%%accelerate\nfloat(model.weight.abs().sum())") == "ranks 0-1: 0.0\n"


def test_pull_and_push_by_name(book):
    book.run("""
        class Net(torch.nn.Linear):
            pass
        alone = 1
    """)
    book.run("%%accelerate --push alone --no-push\nassert alone == 1 and 'Net' not in globals()")
    book.run("%%accelerate --pull net,number\nnet = Net(2, 2)\nnumber = rank")
    book.run("""
        assert type(net) is Net and number == 0
        net.weight.data.zero_()
        %accelerate pull --rank 1 number
        assert number == 1
    """)
    # What was pulled belongs to the session still.
    assert book.run("%%accelerate\nnumber, bool(net.weight.any())") == (
        "rank 0: (0, True)\nrank 1: (1, True)\n"
    )
    book.run("number = 7\n%accelerate push number")
    assert book.run("%%accelerate\nnumber") == "ranks 0-1: 7\n"
    # That much is copied to each rank is worth a line.
    book.run("from notebook_accel.notebook import ownership\nlarge = ownership._LARGE_BYTES")
    book.run("big = np.zeros(1_000_000)\nownership._LARGE_BYTES = 1_000_000")
    (pushed,) = cell(book, "%%accelerate\nbig;").outputs
    assert "pushed `big` (8 MB)" in pushed["data"]["text/html"]
    book.run("large_layer, small = torch.nn.Linear(1000, 500), torch.nn.Linear(100, 500)")
    (pushed,) = cell(book, "%%accelerate\nlarge_layer, small, big;").outputs
    assert "pushed `large_layer` (2 MB)" in pushed["data"]["text/html"]
    assert pushed["data"]["text/html"].count("pushed") == 1, "neither what is small nor again"
    book.run("ownership._LARGE_BYTES = large")
    assert "the session has no `nothing`" in book.fails("%accelerate pull nothing")


@pytest.mark.usefixtures("short")
def test_a_cell_of_one_rank_says_so_and_its_names_can_be_pulled(book):
    reply = cell(book, "%%accelerate --ranks 1\nsolo = 3")
    header = reply.outputs[0]["data"]["text/plain"]
    assert re.fullmatch(r"In\[\d+\]: succeeded, rank 1 of 2, .* s", header)
    text = book.fails("%accelerate pull solo")
    assert "rank 0 has no `solo`, and rank 1 has: `%accelerate pull --rank 1 solo`" in text
    book.run("%accelerate pull --rank 1 solo\nassert solo == 3")
    assert "there is no rank 2: the session has" in book.fails("%accelerate pull --rank 2 solo")
    assert "the notebook has no `nothing`" in book.fails("%accelerate push nothing")
    # Each rank has what was assigned last for it.
    book.run("shared = 'home'")
    book.run("%%accelerate --ranks 1\nshared = 'own'")
    for _ in range(2):
        assert book.run("%%accelerate\nshared") == "rank 0: 'home'\nrank 1: 'own'\n"
    book.run("shared = 'new'")
    assert book.run("%%accelerate\nshared") == "ranks 0-1: 'new'\n"


def test_the_notebook_knows_the_names_of_the_session(book):
    book.run("%%accelerate\nfar_away_name = 1")
    reply = cell(book, "far_away_name")
    assert "`far_away_name` lives in the session: `%accelerate pull far_away_name`" in reply.text
    reply = cell(book, "accelerator.print(1)")
    assert "`accelerator` is there in the cells of `%%accelerate`" in reply.text
    content = book.kernel.client.complete("%%accelerate\nfar_away_n", reply=True)["content"]
    assert content["matches"] == ["far_away_name"]
    assert "far_away_name" in book.run("%accelerate status")


# ---- Accelerator, failures, interrupts -----------------------------------------------------


def test_accelerators_are_made_again_with_other_settings(book):
    both = "%%accelerate\nint(accelerator.reduce(torch.ones(1)))"
    assert book.run(both) == "ranks 0-1: 2\n"
    text = book.run("""
        %%accelerate
        from notebook_accel import Accelerator
        own = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=4)
        own.mixed_precision, own.gradient_accumulation_steps, own.num_processes
    """)
    assert text == "ranks 0-1: ('bf16', 4, 2)\n"
    assert book.run("%%accelerate\nAccelerator().mixed_precision") == "ranks 0-1: 'no'\n"


def test_a_prepared_model_trains_on_after_a_call_that_failed(book):
    book.run("""
        %%accelerate
        torch.manual_seed(0)
        net = torch.nn.Linear(4, 1)
        net, sgd = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        def step():
            sgd.zero_grad()
            accelerator.backward(net(torch.full((2, 4), rank + 1.0)).sum())
            sgd.step()
            return [round(float(w.abs().sum()), 4) for w in net.parameters()]
        first, calls = step(), []
        handle = net.register_forward_hook(lambda *_: calls.append(1))
    """)
    for how in (
        "if rank == 1: raise ValueError('bad')",
        "if rank == 0: net.module.weight.data += 1; 1/0",
    ):
        text = book.fails(f"%%accelerate\n{how}\nstep()")
        assert "failed:\n" in text
        reply = cell(book, "%%accelerate\ncalls.clear()\nstep()")
        assert reply.text.startswith("ranks 0-1: ["), reply.text
        html = reply.outputs[0]["data"]["text/html"]
        assert "the process group was made anew" in html
        assert book.run("%%accelerate\nlen(calls)") == "ranks 0-1: 1\n", "a user's hook stays"


def test_the_process_group_is_made_anew_however_the_call_before_ended(book):
    book.run("""
        from notebook_accel import notebook_launcher
        def fail():
            if rank == 1:
                1 // 0
            accelerator.wait_for_everyone()
        def refuse():
            raise MemoryError("no room")
        class Heavy:
            def __reduce__(self):
                return refuse, ()
        heavy, beside = Heavy(), 1
    """)
    works = "%%accelerate\nint(accelerator.reduce(torch.ones(1))), beside"
    assert book.run(works) == "ranks 0-1: (2, 1)\n"
    # One that only asks for names.
    book.run("%%accelerate\nlines = (number for number in range(3))")
    assert "generator" in book.fails("%accelerate pull lines")
    assert book.run(works) == "ranks 0-1: (2, 1)\n"
    # One for which no cell waits; the next one does. Its error is the newest.
    book.fails("%%accelerate\nif rank == 0: 1 // 0\naccelerator.wait_for_everyone()")
    book.run("run = notebook_launcher(fail, session=True, block=False)")
    assert "ZeroDivisionError" in typed(book, "%accelerate debug", "rank 1 (pdb) ", ["q"])
    # Nothing is sent; and what is sent is refused before it makes the group anew.
    assert "view=" in book.fails("notebook_launcher(fail, session=True, view='nothing')")
    book.run("beside = 2")
    assert "no room" in book.fails("%%accelerate\nheavy, beside")
    assert book.run(works) == "ranks 0-1: (2, 2)\n"


def test_an_interrupt_ends_a_cell_that_hangs_and_keeps_the_session(book):
    before = book.run("%%accelerate\npids")
    # As after eight seconds of silence.
    book.run("from notebook_accel.launch.control import hang")
    patience = "hang._SILENT_SECONDS = hang._AGAIN_SECONDS"
    book.run(f"usual = hang._SILENT_SECONDS, hang._AGAIN_SECONDS\n{patience} = 0.3")
    started = book.start("""
        %%accelerate
        import time
        if rank == 0:
            time.sleep(600)
        accelerator.wait_for_everyone()
    """)
    waits = r"rank 1 waits in barrier \(wait_for_everyone\) at Cell In\[\d+\], line 5"
    says = re.compile(f"the run hangs: {waits}")
    kernel = book.kernel
    assert kernel.listen_until(lambda: any(map(says.search, kernel.widgets)), seconds=SOON)
    book.interrupt()
    reply = book.finish(started)
    assert reply.status == "error"
    shown = [output["data"].get("text/html", "") for output in kernel.displays.values()]
    assert any(map(says.search, shown)), "the summary says it, too"
    book.run("hang._SILENT_SECONDS, hang._AGAIN_SECONDS = usual")
    assert "KeyboardInterrupt" in "\n".join(reply.traceback)
    assert book.run("%%accelerate\npids") == before
    assert book.run("%%accelerate\nint(accelerator.reduce(torch.ones(1)))") == "ranks 0-1: 2\n"


def test_a_cell_in_the_background_leaves_the_notebook_free(book, tmp_path):
    book.run(f"from pathlib import Path\ngo = Path({str(tmp_path / 'go')!r})")
    reply = cell(
        book,
        """
        %%accelerate --bg --pull late
        import time
        typed = "there"
        while not go.exists():
            time.sleep(0.01)
        late = rank + 5
        late
        """,
    )
    assert re.match(r"<Run .* of In\[\d+\]: (starting|running), 2 ranks>", values(reply)[-1])
    assert book.run("typed = 'here'\nprint('free')") == "free\n"
    status = book.run("%accelerate status")
    assert re.search(r"2 ranks: busy\nrank 0  pid \d+  busy\nrank 1  pid \d+  busy\n", status)
    # Cells of earlier tests may have waited, too.
    book.kernel.first.clear()
    queued = book.start("%%accelerate --bg\nlate + 1")
    is_told = lambda: re.search(r"waits for In\[\d+\], which runs", str(book.kernel.first))  # noqa: E731
    assert book.kernel.listen_until(is_told, seconds=SOON)
    # Meanwhile the kernel answers pages, so that clicks on the panel get through.
    assert book.kernel.answers_new_page(seconds=SOON)
    (tmp_path / "go").touch()
    assert re.match("<Run ", values(book.finish(queued))[-1])
    assert book.run("%%accelerate\nlate + 2") == "rank 0: 7\nrank 1: 8\n"
    assert book.run("print(late)") == "5\n"
    assert book.run("%%accelerate\ntyped") == "ranks 0-1: 'here'\n"
    book.run(
        "%%accelerate --bg --pull nowhere\n"
        "from IPython.display import HTML\ndisplay(HTML('<i>drawn meanwhile</i>'))"
    )
    assert book.run("%%accelerate\n1") == "ranks 0-1: 1\n"
    shown = [output["data"] for output in book.kernel.displays.values()]
    assert any("<i>drawn meanwhile</i>" in data.get("text/html", "") for data in shown)
    assert any("no `nowhere`" in data.get("text/plain", "") for data in shown)
    refusal = book.fails("next(one for one in Out.values() if hasattr(one, 'export')).export('x')")
    assert "--write script.py" in refusal
    assert any(
        "rank 0: 5\nrank 1: 6" in shown["data"].get("text/plain", "")
        for shown in book.kernel.displays.values()
    )


@pytest.mark.long
def test_a_cell_is_written_as_a_script_that_torchrun_runs(book, tmp_path):
    target, fresh = tmp_path / "train.py", tmp_path / "fresh.py"
    book.run("%accelerate restart -n 2")
    book.run("scale = 10\ndef scaled(value):\n    return value * scale")
    book.fails("%%accelerate\npartial = 1\npartial // 0")
    book.run("%%accelerate --ranks 1\nlonely = 1")
    book.run("%%accelerate\nown = torch.tensor(scaled(rank + 3), device=device)")
    shown = book.run(f"%%accelerate --write {target}\naccelerator.reduce(own).item(), world_size")
    others = r"In\[\d+\], which did not end well; In\[\d+\], which ran with --ranks"
    assert re.fullmatch(rf"wrote {target}, without {others}\nranks 0-1: \(70, 2\)\n", shown), shown
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", str(target)]
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    assert run(command, environment).count("(70, 2)") == 2
    assert "--write and --ranks" in book.run(f"%%accelerate --write {target} --ranks 0\n1")
    # A cell that has ranks of its own has nothing of the session.
    shown = book.run(
        f"%%accelerate --fresh -n 2 --write {fresh}\n"
        "'own' in globals(), scaled(accelerator.num_processes)"
    )
    assert shown == f"wrote {fresh}\nranks 0-1: (False, 20)\n"
    assert "1 // 0" in book.fails("%%accelerate --fresh\n1 // 0")
    assert book.run("%%accelerate\n'own' in globals()") == "ranks 0-1: True\n"
    assert "torch.tensor(" not in fresh.read_text()


def test_a_function_is_launched_on_the_warm_workers(book):
    book.run("%%accelerate\nweight, pids = 20, __import__('os').getpid()")
    text = book.run("""
        from notebook_accel import notebook_launcher
        weight = 1
        bias = 3
        %accelerate push weight
        def work(x):
            import os
            return os.getpid(), x * weight + bias
        run = notebook_launcher(work, (2,), session=True)
        print([value for _, value in run])
        %accelerate pull --rank 1 pids
        print(pids == run[1][0])
    """)
    assert "[5, 5]\nTrue\n" in text
    assert "without session=True" in book.fails("run.export('x.py')")
    assert book.run("%%accelerate\nweight = 20") == ""
    assert book.value("[v for _, v in notebook_launcher(work, (2,), session=True)]") == [43, 43]
    text = book.fails("notebook_launcher(work, (2,), 3, session=True)")
    assert "the session was started with num_processes=2" in text


# ---- ends ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "damage",
    [
        "import sys\nsys.stdout = sys.stderr = None",
        "import sys\nsys.stdout.close()\nglobals().clear()\nx = 1",
        "import os, tempfile\nwith tempfile.TemporaryDirectory() as d: os.chdir(d)",
    ],
)
def test_a_session_outlives_what_a_cell_does_to_its_process(book, damage):
    book.run(f"%%accelerate\n{damage}")
    text = book.run(
        "%%accelerate\nimport os, sys\nclass Shown: pass\n"
        "print('printed')\nprint('error', file=sys.stderr)\nShown(), rank * world_size"
    )
    assert "rank 1: (<__main__.Shown at" in text
    logs = book.run("%accelerate logs")
    assert logs.count("] printed\n") == logs.count("] error\n") == 2
    book.run("%%accelerate\nos.chdir('/')")
    assert book.run("%%accelerate\nint(accelerator.reduce(torch.ones(1)))") == "ranks 0-1: 2\n"
    book.run("%accelerate restart")


def test_a_session_that_a_cell_has_broken_for_good_says_to_restart_it(book):
    book.run(
        "%%accelerate\nfrom notebook_accel.notebook.worker import RankShell\nRankShell.run = None"
    )
    assert "If each cell fails so: `%accelerate restart`" in book.fails("%%accelerate\n1")
    book.run("%accelerate restart")
    assert "`%accelerate restart`" not in book.fails("%%accelerate\n1/0")


def test_a_dead_rank_says_how_to_start_again(book):
    text = book.fails("""
        %%accelerate
        import os, signal
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        accelerator.wait_for_everyone()
    """)
    assert "SIGKILL" in text
    assert text.endswith(
        "The session is over: `%accelerate restart` starts new ranks; the names of the old ones "
        "are lost"
    )
    text = book.fails("%%accelerate\n1")
    assert "rank 1 was killed by SIGKILL" in text
    assert "`%accelerate restart`" in text
    book.run("%accelerate restart")
    assert "The session is over" in book.fails("%%accelerate\nimport os\nos._exit(3)")
    # "broken" until the last process is gone.
    eventually(
        lambda: "session of 2 ranks: ended" in book.run("%accelerate status"),
        within=30,
        what="the session has ended",
    )
    text = book.fails("%%accelerate\nworld_size")
    assert "rank 0 ended with exit code 3" in text
    assert "`%accelerate restart`" in text
    assert "`%accelerate restart`" in book.fails("%accelerate start")
    book.run("%accelerate restart")
    assert book.run("%%accelerate\nworld_size, 'x' in globals()") == "ranks 0-1: (2, False)\n"


def test_the_session_ends_with_its_kernel(book):
    others = {process.pid for process in book.others()}
    assert len(others) >= 3
    os.kill(book.pid, signal.SIGKILL)
    eventually(lambda: not book.others(), within=SOON, what="every process of the session ended")

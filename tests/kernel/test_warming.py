"""A kernel that fetches the launcher has its template started, and its first launch is quick."""

from tests.interpreters import run_script
from tests.kernel.notebooks import SLOW
from tests.waiting import eventually


def test_fetching_the_launcher_starts_the_template_once(notebook):
    notebook.run("import notebook_accel")
    assert notebook.others() == []
    notebook.run("from notebook_accel import notebook_launcher")
    # It has no environment to be known by before it is another program than its kernel.
    eventually(notebook.others, within=SLOW, what="the template is there")
    (template,) = notebook.others()
    notebook.run("from notebook_accel import notebook_launcher")
    notebook.run("from notebook_accel.launchers import notebook_launcher")
    notebook.run("%load_ext notebook_accel")
    assert notebook.others() == [template]
    notebook.run(
        """
        from notebook_accel.launch.template.handle import template
        import time
        while not template().is_ready:
            time.sleep(0.01)
        """
    )
    reply = notebook.finish(notebook.start("run = notebook_launcher(lambda: 1, (), 2)"))
    assert reply.status == "ok", reply.traceback
    # It waited for nothing, and so it did not say that it does.
    shown = [str(output) for output in notebook.kernel.first]
    assert not any("takes some seconds the first time" in text for text in shown), shown
    assert notebook.value("list(run), template().pid") == ([1, 1], template.pid)
    eventually(lambda: notebook.others() == [template], within=SLOW, what="the ranks have ended")


def test_a_script_starts_nothing_before_it_launches():
    code = """
import sys, psutil
from notebook_accel.notebook import warming
plain, was_imported = warming.warm_kernel, []
def warm():
    was_imported.append("notebook_accel.notebook.launcher" in sys.modules)
    plain()
warming.warm_kernel = warm
from notebook_accel import notebook_launcher
assert psutil.Process().children() == []
# A kernel's template imports while the kernel does.
assert was_imported == [False]
"""
    run_script(code)

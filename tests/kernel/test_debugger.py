"""A notebook whose debugger was attached before the first launch, as JupyterLab and VS Code do."""

import os
import sys

import psutil

from tests.engines.processes import gone
from tests.kernel.notebooks import SLOW, open_notebook
from tests.waiting import eventually


def ask_debugger(notebook, number, command, **arguments):
    """Send the kernel's debugger a command; gives its answer."""
    client = notebook.kernel.client
    request = {"type": "request", "seq": number, "command": command, "arguments": arguments}
    client.control_channel.send(client.session.msg("debug_request", request))
    return dict(client.control_channel.get_msg(timeout=SLOW)["content"])


def test_a_debugger_from_the_start_leaves_launches_as_they_are():
    with open_notebook() as notebook:
        names = {"clientID": "lab", "adapterID": "", "pathFormat": "path"}
        assert ask_debugger(notebook, 1, "initialize", **names)["success"]
        ask_debugger(notebook, 2, "attach")
        code = """
            from notebook_accel import notebook_launcher
            def train():
                import os
                return os.getppid()
            run = notebook_launcher(train, num_processes=2)
            print("ended", len(set(run.results)))
            """
        assert "ended 1" in notebook.run(code)
        notebook.run("notebook_launcher(train, num_processes=2, block=False, detach=True).wait()")


def test_a_template_that_does_not_come_to_our_code_ends_with_its_kernel(tmp_path):
    # As under a debugger of a kind that nobody knows yet.
    stuck = tmp_path / "stuck"
    stuck.mkdir()
    (stuck / "sitecustomize.py").write_text("import time\ntime.sleep(1e6)\n")
    kernel = f"""
import os, sys, time
from notebook_accel.launch.template.handle import template
os.environ["PYTHONPATH"] = {str(stuck)!r}
print(template().pid, flush=True)
time.sleep(1e6)
"""
    environment = {**os.environ, "NOTEBOOK_ACCEL_WARM": "0"}
    process = psutil.Popen([sys.executable, "-c", kernel], stdout=-1, env=environment)
    with process.stdout as lines:
        template = int(lines.readline())
    process.kill()
    process.wait()
    eventually(lambda: gone([template]), within=SLOW, what="the template ended")

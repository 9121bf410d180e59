"""The job script of the docs: a JupyterLab whose notebooks train on the other nodes, too."""

import json
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path

import pytest
from jupyter_client.blocking.client import BlockingKernelClient

from tests.engines.processes import marked
from tests.engines.slurm import in_job
from tests.kernel.notebooks import MARK, SLOW
from tests.waiting import eventually

pytestmark = pytest.mark.timeout(400)

ROOT = Path(__file__).parents[2]
CELL = """
import os
from notebook_accel import Accelerator, notebook_launcher
def train():
    accelerator = Accelerator()
    print("rank", accelerator.process_index)
    return os.environ["SLURMD_NODENAME"], accelerator.num_processes
run = notebook_launcher(train, num_nodes=2, num_processes=1, devices="cpu")
print("results:", run.results, run.logs().split("\\n"))
"""


@pytest.mark.long
def test_a_notebook_of_the_docs_job_trains_on_both_nodes(tmp_path, monkeypatch):
    in_job(tmp_path, monkeypatch)
    mark = str(tmp_path)
    # As a person's own settings would: root starts no JupyterLab otherwise.
    (tmp_path / "jupyter_server_config.json").write_text('{"ServerApp": {"allow_root": true}}')
    environment = {
        **os.environ,
        MARK: mark,
        "PATH": os.pathsep.join(
            [str(tmp_path), str(Path(sys.executable).parent), os.environ["PATH"]]
        ),
        "PYTHONPATH": str(ROOT),
        "JUPYTER_CONFIG_DIR": str(tmp_path),
        "JUPYTER_RUNTIME_DIR": str(tmp_path),
        "JUPYTER_TOKEN": "token",
        "NOTEBOOK_ACCEL_RUNS": str(tmp_path / "runs"),
    }
    log = tmp_path / "slurm-77.out"
    with log.open("w") as out:
        job = subprocess.Popen(
            ["bash", str(ROOT / "docs/slurm-notebook.sbatch")],
            cwd=tmp_path,
            env=environment,
            stdout=out,
            stderr=out,
        )
    try:
        # The job says where the tunnel goes to, and JupyterLab that it is there.
        up = re.compile(r"ssh -L (\d+):127\.0\.0\.1:\1 .*(http://127\.0\.0\.1:\1/)lab", re.DOTALL)
        eventually(lambda: up.match(log.read_text()), within=SLOW, what="JupyterLab is up")
        found = up.match(log.read_text())
        assert trained(f"{found[2]}api/kernels?token=token", tmp_path) == (
            "results: [('localhost', 2), ('other', 2)] ['[rank 0] rank 0', '[rank 1] rank 1', '']"
        )
        job.send_signal(signal.SIGTERM)
        job.wait(SLOW)
        eventually(lambda: not marked(MARK, mark), within=SLOW, what="nobody is left")
    finally:
        for process in marked(MARK, mark):
            process.kill()
        job.wait()


def trained(kernels, folder):
    """What the cell prints in a new kernel of the server."""
    made = []

    def make():
        # It says that it is there a moment before it listens.
        request = urllib.request.Request(kernels, data=b"{}", method="POST")
        with suppress(urllib.error.URLError), urllib.request.urlopen(request) as reply:
            made.append(json.load(reply)["id"])
        return made

    eventually(make, within=SLOW, what="a kernel is made")
    (kernel,) = made
    client = BlockingKernelClient(connection_file=str(folder / f"kernel-{kernel}.json"))
    client.load_connection_file()
    client.start_channels(hb=False)  # on a busy machine a kernel that starts seems dead
    client.wait_for_ready(timeout=SLOW)
    said = []
    reply = client.execute_interactive(
        CELL, timeout=SLOW, output_hook=lambda m: said.append(m["content"].get("text", ""))
    )
    client.stop_channels()
    assert reply["content"]["status"] == "ok", reply["content"]
    return next(line for line in "".join(said).splitlines() if line.startswith("results"))

"""The job script of the docs: a JupyterLab whose notebooks train on the other nodes, too."""

import os
from pathlib import Path

import pytest

from tests.engines.slurm import in_job
from tests.interpreters import run
from tests.kernel.notebooks import open_notebook

SCRIPT = Path(__file__).parents[2] / "docs" / "slurm-notebook.sbatch"


def test_the_docs_job_says_where_the_tunnel_goes_and_starts_jupyterlab_there(tmp_path, monkeypatch):
    in_job(tmp_path, monkeypatch)
    (tmp_path / "jupyter").write_text('#!/bin/bash\necho "$@"\n')
    (tmp_path / "jupyter").chmod(0o755)
    tunnel, started = run(["bash", str(SCRIPT)], os.environ).splitlines()
    assert tunnel.startswith("ssh -L 20077:127.0.0.1:20077 ")
    assert started == "lab --no-browser --ip=127.0.0.1 --port=20077"


@pytest.mark.long
@pytest.mark.timeout(240)
def test_a_notebook_in_the_job_trains_on_both_nodes(tmp_path, monkeypatch):
    in_job(tmp_path, monkeypatch)
    with open_notebook({"NOTEBOOK_ACCEL_RUNS": str(tmp_path / "runs")}) as notebook:
        found = notebook.value("""
            import os
            from notebook_accel import Accelerator, notebook_launcher
            def train():
                accelerator = Accelerator()
                print("rank", accelerator.process_index)
                return os.environ["SLURMD_NODENAME"], accelerator.num_processes
            run = notebook_launcher(train, num_nodes=2, num_processes=1, devices="cpu")
            run.results, run.logs()
        """)
        assert found == ([("localhost", 2), ("other", 2)], "[rank 0] rank 0\n[rank 1] rank 1\n")
        notebook.expect(1, but=0, within=30)  # the kernel's template

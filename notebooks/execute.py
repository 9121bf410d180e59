"""Run a notebook without a browser; keep the executed copy, and a page of it.

    python notebooks/execute.py notebooks/01_quickstart.ipynb --out build/demo

writes ``01_quickstart.ipynb`` and ``01_quickstart.html`` there and prints what the last cell
printed. With ``--update`` the executed copy takes the place of the notebook itself.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING

import nbformat
from nbclient import NotebookClient
from nbconvert import HTMLExporter

if TYPE_CHECKING:
    from nbformat import NotebookNode

__all__ = ["execute", "export", "last_text", "main", "printed"]


def execute(path: Path, *, timeout: float = 600) -> NotebookNode:
    """The notebook with fresh outputs.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell failed.
    """
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(
        notebook,
        timeout=timeout,
        kernel_name="python3",
        record_timing=False,
        # A form sends hundreds of messages before the one that shows it. What comes later than this
        # after the end of its cell is dropped: by default after 4 seconds, and without an error.
        iopub_timeout=120,
        raise_on_iopub_timeout=True,
        # It warns of its connection, which no other machine can reach.
        extra_arguments=["--IPKernelApp.log_level=ERROR"],
        resources={"metadata": {"path": str(path.parent)}},
    ).execute()
    _forget_widgets(notebook)
    return notebook


def _forget_widgets(notebook: NotebookNode) -> None:
    """Drop widgets: no kernel has those of a file, and their outputs hold a text beside them."""
    notebook.metadata.pop("widgets", None)
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            output.get("data", {}).pop("application/vnd.jupyter.widget-view+json", None)
    notebook.metadata.kernelspec = {
        "display_name": "Python 3",
        "language": "python",
        "name": "python3",
    }
    notebook.metadata.language_info = {"name": "python"}


def export(notebook: NotebookNode, out: Path, name: str) -> list[Path]:
    """Write the notebook and its page (which loads nothing from elsewhere) to ``out``."""
    out.mkdir(parents=True, exist_ok=True)
    page, _ = HTMLExporter(require_js_url="", mathjax_url="").from_notebook_node(notebook)
    paths = [out / f"{name}.ipynb", out / f"{name}.html"]
    nbformat.write(notebook, paths[0])
    paths[1].write_text(page, encoding="utf-8")
    return paths


def last_text(notebook: NotebookNode) -> str:
    """What the last code cell printed."""
    return printed([cell for cell in notebook.cells if cell.cell_type == "code"][-1])


def printed(cell: NotebookNode) -> str:
    """What a code cell printed."""
    return "".join(o.text for o in cell.outputs if o.output_type == "stream")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("notebook", type=Path)
    parser.add_argument("--out", type=Path, default=Path("build/demo"))
    parser.add_argument("--update", action="store_true", help="replace the notebook itself")
    options = parser.parse_args()
    start = time.perf_counter()
    notebook = execute(options.notebook)
    seconds = time.perf_counter() - start
    if options.update:
        nbformat.write(notebook, options.notebook)
    for path in export(notebook, options.out, options.notebook.stem):
        print(f"wrote {path}")
    print(f"executed in {seconds:.0f} s")
    print(last_text(notebook), end="")


if __name__ == "__main__":
    main()

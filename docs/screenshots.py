"""Take the pictures of the live panel that the README shows: ``python -m docs.screenshots``.

A real run in a real JupyterLab: the quickstart notebook, with more epochs than it has.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import nbformat

from tests.conftest import find_chromium
from tests.notebook.kernels import INSTALLED, ROOT
from tests.notebook.lab import Lab, open_browser, open_lab

if TYPE_CHECKING:
    from playwright.sync_api import Browser

IMAGES = ROOT / "docs" / "images"
QUICKSTART = ROOT / "notebooks" / "01_quickstart.ipynb"
LAUNCH = "run = notebook_launcher(train, (DigitNet(),), num_processes=2)"
# More to see: smaller batches, and a line an epoch.
CHANGES = {
    "epochs=12": "epochs=40",
    "batch_size=32": "batch_size=4",
    "        accelerator.log(": (
        '        print(f"epoch {epoch + 1}: loss {loss.item():.4f}, accuracy {accuracy:.1%}")\n'
        "        accelerator.log("
    ),
}


def main() -> None:
    """Take one picture in each theme."""
    IMAGES.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory() as folder,
        open_lab(Path(folder), [INSTALLED]) as lab,
        open_browser(find_chromium() or "chromium") as browser,
    ):
        for theme in ("light", "dark"):
            take(lab, browser, theme)


def take(lab: Lab, browser: Browser, theme: str) -> None:
    """One picture: the cell that launches, while its run goes on."""
    notebook = nbformat.read(QUICKSTART, as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    position = next(i for i, cell in enumerate(cells) if "notebook_launcher(train" in cell.source)
    cells[position].source = LAUNCH
    for cell in cells:
        for before, after in CHANGES.items():
            cell.source = cell.source.replace(before, after)
    notebook.cells = cells[: position + 1]
    notebook.metadata["kernelspec"] = {"name": INSTALLED, "display_name": "Python 3"}
    nbformat.write(notebook, lab.folder / f"{theme}.ipynb")
    page = lab.open(browser, f"{theme}.ipynb")
    page.set_theme(theme)
    page.hide_sidebar()
    page.wait_until_idle()
    page.run_all()
    output = page.output(position)
    output.get_by_text("epoch 8", exact=True).first.wait_for(timeout=120_000)
    # In the middle of an epoch, where there is a rate and a time left.
    middle = (
        "() => { const v = document.querySelector('progress')?.value; return v > .4 && v < .8 }"
    )
    page.page.wait_for_function(middle, timeout=60_000)
    cell = page.panel.locator(".jp-Cell").nth(position)
    cell.screenshot(path=IMAGES / f"panel-{theme}.png")
    page.close()


if __name__ == "__main__":
    main()

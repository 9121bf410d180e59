"""The documentation site: ``make docs`` builds it into ``build/docs/``."""

from __future__ import annotations

import sys
from importlib.metadata import version as version_of
from pathlib import Path
from shutil import copytree, ignore_patterns, rmtree
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sphinx.application import Sphinx

HERE = Path(__file__).parent
# The package itself is installed; what is beside this file is not.
sys.path.insert(0, str(HERE))
from search_words import WORDS  # noqa: E402

# A copy, since Sphinx reads nothing outside of its folder, and follows no link to check links.
rmtree(HERE / "notebooks", ignore_errors=True)
copytree(HERE.parent / "notebooks", HERE / "notebooks", ignore=ignore_patterns(".*", "*.py"))

project = "notebook-accel"
author = "the developers of notebook-accel"
copyright = f"{author}. Apache-2.0"  # noqa: A001 (Sphinx's name for it)
release = version = version_of("notebook-accel")

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
    "directives",
]
exclude_patterns = ["images", "notebooks/data"]
templates_path = ["_templates"]

# ---- pages ------------------------------------------------------------------------------------

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

# ---- notebooks: shown as they are stored, which tests/test_notebooks.py watches ----------------

# `make docs ARGS='-D nb_execution_mode=cache'` runs those that have changed, for some minutes.
nb_execution_mode = "off"
nb_execution_cache_path = str(HERE.parent / "build" / "docs" / "notebooks")
nb_execution_excludepatterns = ["*tpu_colab.ipynb"]
nb_execution_timeout = 300
nb_execution_raise_on_error = True
nb_execution_show_tb = True
nb_merge_streams = True
# A notebook that was never run says no lexer for its magics.
suppress_warnings = ["misc.highlighting_failure"]
# No kernel is behind a page: it shows the summary beside a widget, and loads no script for widgets.
nb_ipywidgets_js: dict[str, dict[str, str]] = {}
nb_mime_priority_overrides = [("html", "application/vnd.jupyter.widget-view+json", None)]

# ---- the reference, from docstrings -----------------------------------------------------------

autosummary_generate = True
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autoclass_content = "both"
python_maximum_signature_line_length = 80
python_display_short_literal_types = True
toc_object_entries_show_parents = "hide"
napoleon_numpy_docstring = False
napoleon_use_ivar = True
# References to public names are checked: the inventories of Python and torch need a network.
nitpick_ignore_regex = [("py:.*", r"(?!notebook_accel\.\w+$).*")]

# ---- how it looks -----------------------------------------------------------------------------

html_theme = "pydata_sphinx_theme"
html_title = project
html_static_path = ["_static"]
html_search_scorer = str(HERE / "_static" / "search_order.js")
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
html_sidebars = {
    page: [] for page in ("index", "first-launch", "troubleshooting", "from-accelerate")
}
html_theme_options = {
    "logo": {"text": project},
    "navbar_align": "left",
    "navbar_persistent": ["search-button"],
    "header_links_before_dropdown": 7,
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": ["copyright"],
    "footer_end": [],
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
}


def _lead_into_the_site(_app: object, name: str, source: list[str]) -> None:
    """Have links of a notebook to files of the repository lead to the pages made of them."""
    if name.startswith("notebooks/"):
        source[0] = (
            source[0].replace("](../README.md", "](../index.md").replace("](../docs/", "](../")
        )


def _add_search_words(_app: object, name: str, source: list[str]) -> None:
    """Name a page in the index by the words that people use; who reads the file is spared them."""
    if name in WORDS:
        words = ", ".join(f"! {one}" for one in WORDS[name].split(", "))
        title, _, rest = source[0].partition("\n")
        source[0] = f"{title}\n\n```{{index}} {words}\n```\n{rest}"


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("source-read", _add_search_words)
    app.connect("source-read", _lead_into_the_site)

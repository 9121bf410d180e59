"""The search of the site leads to the right page, asked in the words that people use."""

import runpy
import subprocess
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import quote

import pytest

from tests.notebook.lab import open_browser

ROOT = Path(__file__).parents[1]
SPHINX = ROOT / "build" / "sphinx" / "bin" / "python"
pytestmark = [
    pytest.mark.browser,
    pytest.mark.long,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not SPHINX.exists(), reason="needs Sphinx: make docs"),
]

# By page: what people type who look for it.
WORDS = runpy.run_path(str(ROOT / "docs" / "search_words.py"))["WORDS"]


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The address of the site, built from the pages as they are now."""
    folder = tmp_path_factory.mktemp("site")
    command = [SPHINX, "-m", "sphinx", "--quiet", "-d", folder / "trees", ROOT / "docs", folder]
    subprocess.run(command, check=True, timeout=500)
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=folder)) as server:
        threading.Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def test_the_page_that_answers_is_among_the_first_three(site, chromium):
    questions = [(words, page) for page, asked in WORDS.items() for words in asked.split(", ")]
    missed = {}
    with open_browser(chromium) as browser:
        view = browser.new_page()
        for words, page in questions:
            view.goto(f"{site}search.html?q={quote(words)}")
            view.wait_for_function(
                "() => /found|did not/.test(document.querySelector('.search-summary')?.innerText)"
            )
            links = view.locator("ul.search > li > a:first-of-type")
            found = [link.get_attribute("href") or "" for link in links.all()[:3]]
            if not any(link.startswith(f"{page}.html") for link in found):
                missed[words] = found
    assert not missed

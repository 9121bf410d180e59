"""What an open page showed is added to the report of a browser test that failed."""

import pytest

from tests.notebook.lab import describe_pages


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if call.excinfo is not None and call.when == "call" and "browser" in item.keywords:
        for title, text in describe_pages():
            report.sections.append((title, text))
    return report

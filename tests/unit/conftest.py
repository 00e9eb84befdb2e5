"""After every test, no engine that it made has lost a page or holds one twice."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def check_integrity_of_made_engines() -> Iterator[None]:
    yield
    cases = sys.modules.get("tests.unit.runtime_cases")  # absent while no test has needed it
    while cases and cases.MADE_ENGINES:
        cases.MADE_ENGINES.pop().check_integrity()

"""The lane's process, and its counts at the end."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from fuzz_lane import Lane, cases


def pytest_report_header() -> str:
    seed = os.environ.get("CORTIQ_FUZZ_SEED")
    return f"fuzz: {cases()} cases of each kind, " + (f"CORTIQ_FUZZ_SEED={seed}" if seed else "the same in every run")


@pytest.fixture(scope="module")
def lane(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Lane]:
    made = Lane(lambda: tmp_path_factory.mktemp("fuzz"))
    yield made
    made.close()
    seen = ", ".join(f"{n} {what}" for what, n in made.counts.items())
    print(f"\n{request.node.name}: {seen}")

"""The lane's process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fuzz_lane import Lane


@pytest.fixture(scope="module")
def lane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lane]:
    made = Lane(lambda: tmp_path_factory.mktemp("fuzz"))
    yield made
    made.close()

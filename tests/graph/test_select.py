"""The rule by which the GraphRunner picks among producers, ahead of Python."""

from __future__ import annotations

import pytest

from coexec.graph.select import passed_last
from coexec.graph.tracegraph import EXTERNAL_VALUE, Producer

PASSED = {5: 0, 3: 1, 8: 2}
"""A path through nodes 5, 3 and 8."""


@pytest.mark.parametrize(
    ("allowed", "expected"),
    [
        ({(5, 0)}, (5, 0)),
        ({(5, 0), (3, 1)}, (3, 1)),
        ({(9, 0), (5, 0)}, (5, 0)),
        ({EXTERNAL_VALUE, (5, 0)}, (5, 0)),
        ({EXTERNAL_VALUE, (9, 0)}, EXTERNAL_VALUE),
        ({(9, 0)}, None),
        ({(3, 0), (3, 1)}, None),
        ({(3, 0), (3, 1), (8, 0)}, (8, 0)),
        ({(3, 0), (8, 1), (8, 0)}, None),
        ({(9, 0), (9, 1), (5, 0)}, (5, 0)),
    ],
)
def test_the_producer_passed_last_is_chosen_unless_outputs_of_one_node_compete(
    allowed: set[Producer], expected: Producer | None
) -> None:
    assert passed_last(allowed, PASSED) == expected

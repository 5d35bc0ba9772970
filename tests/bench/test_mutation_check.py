# SPDX-License-Identifier: Apache-2.0
"""The mutation check can still be run: its faults fit the sources. (The check takes an hour.)"""

from __future__ import annotations

import pytest

from mutation_check import suite_of
from mutation_faults import CPP, FAULTS, Fault


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_what_a_fault_replaces_is_found_once(fault):
    sound = (CPP / fault.file).read_text(encoding="utf-8")
    assert fault.plant(sound) != sound


def test_names_of_faults_differ():
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)


@pytest.mark.parametrize("text", ["", "b", "a a"])
def test_a_fault_that_does_not_fit_is_an_error(text):
    with pytest.raises(ValueError, match=r"has .a. [02] times"):
        Fault("name", "file", "a", "b").plant(text)


@pytest.mark.parametrize(
    ("failure", "suite"),
    [
        ("FAILED tests/core/test_request.py::test_x[tests/ops]", "tests/core"),
        ("ERROR tests/traces/test_traces.py", "tests/traces"),
        ("pytest does not end", "pytest"),
        ("[  FAILED  ] BlockPool.X", "tests/cpp"),
    ],
)
def test_a_failure_is_counted_for_its_suite(failure, suite):
    assert suite_of(failure) == suite

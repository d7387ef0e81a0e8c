"""Models that several tests share: each is made once in a session.

What they are made with is imported where it is needed: transformers takes seconds, and half of the tests here
do without.
"""

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.support.prepared import Prepared


@pytest.fixture(scope="session")
def prepare(tmp_path_factory: pytest.TempPathFactory) -> "Callable[[str], Prepared]":
    """Makes the model of a case or of a profile of types by its name."""
    from benchmarks.in_process import InProcessModel
    from tests.support.model_cases import CASES, PREDICTION_CASES
    from tests.support.prepared import Prepared
    from tests.support.reference_model import make_reference
    from tests.support.type_profiles import PROFILES

    @cache
    def made(name: str) -> Prepared:
        case = (CASES | PREDICTION_CASES | PROFILES)[name]
        reference = make_reference(tmp_path_factory.mktemp(name), case.shape, case.layout)
        return Prepared(reference, InProcessModel(reference.path))

    return made


@pytest.fixture
def prepared(prepare: "Callable[[str], Prepared]", request: pytest.FixtureRequest) -> "Prepared":
    """The model of the case that a test is parametrised with, indirectly."""
    return prepare(request.param)

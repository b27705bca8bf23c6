"""The conformance kit of the core, run on TurboQuant-RVQ.

A run of the kit takes most of a minute. Two configs are always held to it, the others with the slow tests.
"""

import pytest

from veloxquant.testing import MethodTests
from veloxquant_turboquant_rvq import TurboQuantRVQConfig

SHORTER = "fewer rows are left as they came after a rewind; only rows that a later call would have packed differ"
RECENT = {"trim_state": SHORTER, "trim_in_prompt": SHORTER, "speculative": SHORTER}


class TestDefault(MethodTests):
    """As it comes: two bits a key coordinate, values as they came, recent rows exact."""

    method = "turboquant_rvq"
    dense_config = TurboQuantRVQConfig(recent=60000)
    expected_failures = RECENT


class TestKeysAndValues(MethodTests):
    """Everything packed at once: rewinds are exact."""

    method = "turboquant_rvq"
    config = TurboQuantRVQConfig(bits=2, value_bits=4, recent=0)
    dense_config = TurboQuantRVQConfig(recent=60000, value_bits=4)


@pytest.mark.slow
class TestLaplace(MethodTests):
    """Two separate streams."""

    method = "turboquant_rvq"
    config = TurboQuantRVQConfig(codebook="laplace", bits=1, value_bits=2)
    dense_config = TurboQuantRVQConfig(codebook="laplace", recent=60000)
    expected_failures = RECENT


@pytest.mark.slow
class TestMatched(MethodTests):
    """Folded residuals, and no row as it came."""

    method = "turboquant_rvq"
    config = TurboQuantRVQConfig(codebook="matched", bits=2, value_bits=3, recent=0, sinks=0)
    dense_config = TurboQuantRVQConfig(codebook="matched", sinks=0, recent=60000)


@pytest.mark.slow
class TestMostBits(MethodTests):
    """The widest codes."""

    method = "turboquant_rvq"
    config = TurboQuantRVQConfig(bits=4, value_bits=8)
    dense_config = TurboQuantRVQConfig(bits=4, value_bits=8, recent=60000)
    expected_failures = RECENT

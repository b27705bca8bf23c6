"""The conformance kit of the core, run on both modes of A2ATS."""

from typing import ClassVar

import pytest

from veloxquant.testing import MethodTests
from veloxquant_a2ats import A2ATSConfig

LOSSLESS = A2ATSConfig(allow_uncalibrated=True, window=10**6)


class TestCompress(MethodTests):
    """As it comes, with a random codebook."""

    method = "a2ats"
    config = A2ATSConfig(allow_uncalibrated=True)
    dense_config = LOSSLESS


@pytest.mark.slow
class TestCompressSmall(MethodTests):
    """A short window, fine sub-vectors with long codes, every token coded query-aware."""

    method = "a2ats"
    config = A2ATSConfig(
        allow_uncalibrated=True, window=16, sinks=2, sub_dim=4, codebook_bits=9, retrieval_fraction=1.0, far_position=64
    )
    dense_config = LOSSLESS


class TestRetrieve(MethodTests):
    """A fifth of the rows in a step."""

    method = "a2ats"
    config = A2ATSConfig(mode="retrieve", allow_uncalibrated=True, window=32)
    dense_config = A2ATSConfig(mode="retrieve", allow_uncalibrated=True, retrieval_fraction=1.0)


@pytest.mark.slow
class TestRetrievePerHead(MethodTests):
    """The union of what every query head chooses."""

    method = "a2ats"
    config = A2ATSConfig(mode="retrieve", allow_uncalibrated=True, window=16, sinks=2, per_head=True)
    dense_config: ClassVar = {"mode": "retrieve", "allow_uncalibrated": True, "window": 10**6}

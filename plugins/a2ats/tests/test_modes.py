"""What the core is told of A2ATS follows its mode."""

import pytest

import veloxquant
from veloxquant.attention import unroute
from veloxquant.testing.toys import tiny_llama


@pytest.mark.parametrize(
    ("options", "trim"),
    [
        ({"mode": "compress"}, "approximate"),
        ({"mode": "retrieve"}, "exact"),
        ({"mode": "retrieve", "window": 1}, "exact"),
    ],
)
def test_deep_rewinds_are_reported_as_what_they_are(options, trim):
    model = tiny_llama(head_dim=32)
    caches = veloxquant.make_prompt_cache(model, "a2ats", {"allow_uncalibrated": True, **options})
    unroute(model)
    assert {layer.trim for layer in veloxquant.report(caches).layers} == {trim}

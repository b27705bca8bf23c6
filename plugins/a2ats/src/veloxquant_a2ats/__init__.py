"""A2ATS for veloxquant: keys coded without their position, far tokens at one distance, codes that keep logits right."""

from veloxquant_a2ats.config import A2ATSConfig
from veloxquant_a2ats.rotation import far_query_rope

__all__ = ["A2ATSConfig", "far_query_rope"]

"""TurboQuant-RVQ for veloxquant: rotated keys and values, packed to a few bits a coordinate, every token kept."""

from veloxquant_turboquant_rvq.config import TurboQuantRVQConfig
from veloxquant_turboquant_rvq.store import TurboQuantRows

__all__ = ["TurboQuantRVQConfig", "TurboQuantRows"]

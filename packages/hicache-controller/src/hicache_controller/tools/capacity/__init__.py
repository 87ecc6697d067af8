"""Plan capacity: what each tier holds of a model's cache, how long, and what loading costs against recomputing."""

from .geometry import (
    CapacityError,
    ModelGeometry,
    attention_token_bytes,
    element_bytes,
    geometry_from_config,
    latent_token_bytes,
)
from .plan import (
    CapacityPlan,
    ExpectedHits,
    LoadTime,
    Tier,
    disk_prompt_bytes,
    expected_hits,
    parse_bytes,
    plan_capacity,
    trace_means,
)

__all__ = [
    "CapacityError",
    "CapacityPlan",
    "ExpectedHits",
    "LoadTime",
    "ModelGeometry",
    "Tier",
    "attention_token_bytes",
    "disk_prompt_bytes",
    "element_bytes",
    "expected_hits",
    "geometry_from_config",
    "latent_token_bytes",
    "parse_bytes",
    "plan_capacity",
    "trace_means",
]

"""Recommendation of a spec, or a recipe of specs by layer: KL predicted from gradients."""

from kvpact.callable_package import let_tell
from kvpact.recommend.base import Measured, RecipePlan, Recommendation, RecommendationError
from kvpact.recommend.budget import allocate, budget_bytes
from kvpact.recommend.files import write_recommendation
from kvpact.recommend.gradients import Sensitivity, measure_sensitivity
from kvpact.recommend.measure import Survey
from kvpact.recommend.run import plan, recommend, survey, verify

__all__ = [
    "Measured",
    "RecipePlan",
    "Recommendation",
    "RecommendationError",
    "Sensitivity",
    "Survey",
    "allocate",
    "budget_bytes",
    "measure_sensitivity",
    "plan",
    "recommend",
    "survey",
    "verify",
    "write_recommendation",
]

let_tell(__name__, recommend)

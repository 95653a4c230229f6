"""Which spec, or which recipe of specs by layer, suits a model: KL predicted from gradients."""

import sys
from types import ModuleType

from kvpact.recommend.allocate import allocate
from kvpact.recommend.base import Measured, Plan, Recommendation, RecommendationError
from kvpact.recommend.budget import budget_bytes
from kvpact.recommend.files import write_recommendation
from kvpact.recommend.gradients import measure_sensitivity
from kvpact.recommend.measure import Survey
from kvpact.recommend.run import plan, recommend, survey, verify
from kvpact.recommend.sensitivity import Sensitivity

__all__ = [
    "Measured",
    "Plan",
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


class _Package(ModuleType):
    """Lets ``kvpact.recommend(…)`` be a call, as ``kvpact.evaluate(…)`` is."""

    __call__ = staticmethod(recommend)


sys.modules[__name__].__class__ = _Package

"""Which spec, or which recipe of specs by layer, suits a model: measured in one forward pass."""

from kvpact.recommend.allocate import allocate
from kvpact.recommend.base import Measured, Plan, Recommendation, RecommendationError
from kvpact.recommend.budget import budget_bytes
from kvpact.recommend.files import write_recommendation
from kvpact.recommend.run import plan, verify
from kvpact.recommend.statistics import ExactAttention
from kvpact.recommend.verdict import verdict_of

__all__ = [
    "ExactAttention",
    "Measured",
    "Plan",
    "Recommendation",
    "RecommendationError",
    "allocate",
    "budget_bytes",
    "plan",
    "verdict_of",
    "verify",
    "write_recommendation",
]

"""The engine: three ways to hold a Jacobian behind one operator."""

from tangents.jacobian.operator import Jacobian
from tangents.jacobian.plan import Plan

__all__ = ["Jacobian", "Plan"]

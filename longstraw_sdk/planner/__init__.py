"""Whether a GRPO group fits on a machine, how, and how long its step takes: from a config alone, without a device."""

from .plans import Machine, Plan, largest_prompt, plan
from .request import Options, PlanRequest, parse_size

__all__ = ["Machine", "Options", "Plan", "PlanRequest", "largest_prompt", "parse_size", "plan"]

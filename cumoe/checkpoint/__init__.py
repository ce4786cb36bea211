"""Experts of block-FP8 checkpoints, and their routing."""

from cumoe.checkpoint.config import MoeConfig
from cumoe.checkpoint.experts import Experts, Router, load_experts
from cumoe.checkpoint.routing import route
from cumoe.checkpoint.shards import open_checkpoint

__all__ = ["Experts", "MoeConfig", "Router", "load_experts", "open_checkpoint", "route"]

"""Adapters as PEFT saves them, read strictly: consumed whole, or refused by name."""

from adaptercache.checkpoint.options import ReadOptions
from adaptercache.checkpoint.reader import checkpoint_from_tensors, read_checkpoint
from adaptercache.checkpoint.weights import (
    Checkpoint,
    ExpertWeights,
    LoraWeights,
    Skipped,
    Weights,
)

__all__ = [
    "Checkpoint",
    "ExpertWeights",
    "LoraWeights",
    "ReadOptions",
    "Skipped",
    "Weights",
    "checkpoint_from_tensors",
    "read_checkpoint",
]

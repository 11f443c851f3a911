"""LoRA for a mixed batch, straight from the paged arena. Usable without the cache."""

from adaptercache.kernels.apply import add_lora
from adaptercache.kernels.segments import LoraBatch, rank_class_of
from adaptercache.kernels.stack import LoraStack
from adaptercache.kernels.warm import warmup

__all__ = ["LoraBatch", "LoraStack", "add_lora", "rank_class_of", "warmup"]

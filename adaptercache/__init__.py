"""adaptercache: a tiered LoRA adapter cache and memory manager for LLM serving."""

import logging

from adaptercache.adapter_files import AdapterFiles
from adaptercache.advice import Advice
from adaptercache.base_model import BaseModel
from adaptercache.cache import AdapterCache
from adaptercache.caps import Caps
from adaptercache.checkpoint import ReadOptions
from adaptercache.errors import (
    AdapterCacheError,
    AdapterInvalid,
    AdapterNotFound,
    AdapterUnsupported,
    CacheClosed,
    CapacityError,
    LoadFailed,
)
from adaptercache.held_folder import HeldFolder
from adaptercache.identity import AdapterKey, Digest
from adaptercache.layout import KVLayout, LoraLayout
from adaptercache.lease import Admission, Lease
from adaptercache.prefix import prefix_keys
from adaptercache.request import Request
from adaptercache.stats import Stats, Tier
from adaptercache.tiers.remote import DirectorySource, Source

logging.getLogger(__name__).addHandler(logging.NullHandler())  # what to print is yours to say

__all__ = [
    "AdapterCache",
    "AdapterCacheError",
    "AdapterFiles",
    "AdapterInvalid",
    "AdapterKey",
    "AdapterNotFound",
    "AdapterUnsupported",
    "Admission",
    "Advice",
    "BaseModel",
    "CacheClosed",
    "CapacityError",
    "Caps",
    "Digest",
    "DirectorySource",
    "HeldFolder",
    "KVLayout",
    "Lease",
    "LoadFailed",
    "LoraLayout",
    "ReadOptions",
    "Request",
    "Source",
    "Stats",
    "Tier",
    "prefix_keys",
]

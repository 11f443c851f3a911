"""For our tests and yours: sources that you control, adapters made up, and checks."""

from adaptercache.testing.adapters import random_adapter
from adaptercache.testing.consistency import check_consistent
from adaptercache.testing.contract import TierContract
from adaptercache.testing.device import any_device, held_weights
from adaptercache.testing.sources import FakeSource, FaultySource

__all__ = [
    "FakeSource",
    "FaultySource",
    "TierContract",
    "any_device",
    "check_consistent",
    "held_weights",
    "random_adapter",
]

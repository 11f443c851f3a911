"""For our tests and yours: sources that you control, adapters made up, and checks."""

from adaptercache.testing.adapters import random_adapter
from adaptercache.testing.consistency import check_consistent
from adaptercache.testing.contract import TierContract
from adaptercache.testing.sources import FakeSource, FaultySource

__all__ = ["FakeSource", "FaultySource", "TierContract", "check_consistent", "random_adapter"]

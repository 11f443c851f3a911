"""Ray Serve, imported once before any test: it warns of its own use of pydantic."""

import warnings
from importlib.util import find_spec

if find_spec("ray") is not None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import ray.serve  # noqa: F401
else:
    # test_fleet.py says why, for all
    collect_ignore = ["test_page.py", "test_replica.py", "test_router.py"]

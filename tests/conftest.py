"""Settings of the whole suite."""

from __future__ import annotations

import os

from hypothesis import settings

# No deadlines: a busy machine is no failure. The same examples on every CI run, new ones at every desk.
settings.register_profile("elastictrainer", deadline=None, derandomize=bool(os.environ.get("CI")))
settings.load_profile("elastictrainer")

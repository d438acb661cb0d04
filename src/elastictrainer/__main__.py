"""`python -m elastictrainer` is `elastictrainer`."""

from __future__ import annotations

import sys

from elastictrainer.cli import main

if __name__ == "__main__":
    sys.exit(main())

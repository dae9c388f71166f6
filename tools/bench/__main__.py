from __future__ import annotations

import sys

from tools.bench.runner import main

sys.exit(main())

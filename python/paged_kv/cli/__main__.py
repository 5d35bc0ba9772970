# SPDX-License-Identifier: Apache-2.0
"""``python -m paged_kv.cli``: the command where its script is not installed."""

from __future__ import annotations

import sys

from paged_kv.cli.main import main

sys.exit(main())

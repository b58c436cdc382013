"""Spark looks for formats in modules whose names begin with `pyspark_`; this one gives it `warren`.

It is imported by every lookup of an unknown format, so it must be cheap and must not fail: a failure would hide the formats
of all other packages, too.
"""

from __future__ import annotations

try:
    from warren.pipeline.source import WarrenSource as DefaultSource
except ImportError:  # no PySpark, or one without Python data sources
    __all__ = []
else:
    __all__ = ["DefaultSource"]

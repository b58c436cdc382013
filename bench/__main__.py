"""`python -m bench [--rows batch,single] [--repeat 5] [--size 1.0]`: measure, print, write `bench/results/`."""

from __future__ import annotations

import argparse
import sys

from bench import pipeline, rows
from bench.harness import Row, fdatasync_microseconds, write_report

ROWS = {**rows.ROWS, **pipeline.ROWS}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench")
    parser.add_argument("--rows", default=",".join(ROWS), help=f"of {', '.join(ROWS)}")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--size", type=float, default=1.0, help="a fraction of the full sizes, for a quick look")
    options = parser.parse_args()
    p50, p99 = fdatasync_microseconds()
    print(f"fdatasync p50 {p50:.0f} us, p99 {p99:.0f} us")
    found: list[Row] = []
    for name in options.rows.split(","):
        print(f"{name}", flush=True)
        for row in ROWS[name](options.repeat, options.size):
            print(f"  {row.name}: {row.figure} (target: {row.target}) {'ok' if row.holds else 'MISSED'}", flush=True)
            found.append(row)
    if options.size == 1.0:
        command = " ".join(["python -m bench", *sys.argv[1:]])
        print(f"written to {write_report(found, command, options.repeat, p50, p99)}")


if __name__ == "__main__":
    main()

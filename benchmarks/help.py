"""How long `launch --help` takes, from the start of the interpreter to the last line: the median of nine runs.

python benchmarks/help.py
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

RUNS = 9


def main() -> None:
    """Measure and print."""
    times = []
    for _ in range(RUNS):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-m", "launch.cli", "--help"], check=True, capture_output=True)
        times.append(time.perf_counter() - start)
    print(f"launch --help: {statistics.median(times):.2f} s (median of {RUNS}; {min(times):.2f} to {max(times):.2f})")


if __name__ == "__main__":
    main()

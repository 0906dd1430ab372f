"""What scheduling costs.

    python -m benchmarks.scheduling [--only sequences]

Reads as ratios; absolute figures belong to the machine.
"""

from __future__ import annotations

import argparse
import os
import sys

import psutil

from benchmarks.sequence_steps import measure_sequences


def main() -> int:
    """Run everything and print Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", choices=("sequences",), help="one part")
    parser.parse_args()
    print(f"{os.cpu_count()} cores, load {psutil.getloadavg()[0]:.1f}\n")
    measure_sequences()
    return 0


if __name__ == "__main__":
    sys.exit(main())

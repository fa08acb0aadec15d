"""Repeat one seed, or try many.

python -m tests.simulation SEED [--plant NAME] [--quiet]
python -m tests.simulation FIRST:END [--plant NAME] [--report]

With a plant, seeds are tried until one shows it by the words it must be found by; what else it breaks does not count.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from typing import Any

from .simulate import bury, simulate


def one(seed: int, plant: str | None, *, tell: bool) -> int:
    outcome = simulate(seed, plant=plant, tell=tell)
    finding = outcome.finding(plant) if plant else None
    for line in outcome.story:
        print(line)
    for violation in outcome.violations:
        print("VIOLATION", violation)
    if plant:
        print(f"{plant}: {'found by ' + finding if finding else 'not found'}")
    print(f"seed {seed}: {len(outcome.violations)} violations, history {outcome.digest}")
    return 1 if outcome.violations else 0


def many(seeds: range, plant: str | None, *, report: bool) -> int:
    """With a plant, until it is found; failures are then the seed that found it, and those before went astray."""
    seen: Counter[str] = Counter()
    failures: list[dict[str, Any]] = []
    astray = 0
    began = time.process_time()
    tried = 0
    for seed in seeds:
        outcome = simulate(seed, plant=plant)
        seen += outcome.seen
        tried += 1
        if report and tried % 500 == 0:
            print(f"seed {seed}: {len(failures)} of {tried} failed", file=sys.stderr, flush=True)
        violations = list(outcome.violations)
        if not violations:
            continue
        command = outcome.command(plant)
        if plant:
            finding = outcome.finding(plant)
            if finding is None:
                astray += 1
                if not report:
                    print(f"{command}: found it by nothing it must be found by: {violations}")
                continue
            violations = [finding]
        failures.append({"command": command, "violations": violations})
        if not report:
            print(f"{command}: {violations[0]}", flush=True)
        if plant:
            break
    each = (time.process_time() - began) / max(tried, 1)
    if report:
        summary = {"tried": tried, "failures": failures, "seen": seen, "cpu": each}
        print(json.dumps({**summary, "astray": astray}))
        return 0
    for name, count in sorted(seen.items()):
        print(f"{count:8} {name}")
    print(f"{len(failures)} of {tried} seeds failed; {each:.3f} s of CPU each")
    return 1 if failures else 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("seed", help="a number, or FIRST:END for many")
    parser.add_argument("--plant", help="a mistake to plant (see tests/simulation/plants.py)")
    parser.add_argument("--quiet", action="store_true", help="only what went wrong")
    parser.add_argument("--report", action="store_true", help="of many seeds: one JSON object")
    asked = parser.parse_args()
    first, _, end = asked.seed.partition(":")
    try:
        if end:
            return many(range(int(first), int(end)), asked.plant, report=asked.report)
        return one(int(first), asked.plant, tell=not asked.quiet)
    finally:
        bury()


sys.exit(main())

"""Repeat one seed, or try many: ``python -m tests.simulation SEED[:END] [--plant NAME] [--quiet]``."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

from .simulate import simulate


def one(seed: int, plant: str | None, *, tell: bool) -> int:
    outcome = simulate(seed, plant=plant, tell=tell)
    for line in outcome.story:
        print(line)
    for violation in outcome.violations:
        print("VIOLATION", violation)
    print(f"seed {seed}: {len(outcome.violations)} violations, history {outcome.digest}")
    return 1 if outcome.violations else 0


def many(seeds: range, plant: str | None) -> int:
    seen: Counter[str] = Counter()
    failed = 0
    began = time.perf_counter()
    for seed in seeds:
        outcome = simulate(seed, plant=plant)
        seen += outcome.seen
        if outcome.violations:
            failed += 1
            print(f"{outcome.command(plant)}: {outcome.violations[0]}", flush=True)
    each = (time.perf_counter() - began) / len(seeds)
    for name, count in sorted(seen.items()):
        if not name.startswith("log "):
            print(f"{count:8} {name}")
    print(f"{failed} of {len(seeds)} seeds failed; {each:.3f} s each")
    return 1 if failed else 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("seed", help="a number, or FIRST:END for many")
    parser.add_argument("--plant", help="a mistake to plant (see tests/simulation/plants.py)")
    parser.add_argument("--quiet", action="store_true", help="only what went wrong")
    asked = parser.parse_args()
    first, _, end = asked.seed.partition(":")
    if end:
        return many(range(int(first), int(end)), asked.plant)
    return one(int(first), asked.plant, tell=not asked.quiet)


sys.exit(main())

"""python -m differential: many programs against both brokers, and a table of what was found.

    python -m differential --programs 200 --seed 1
    python -m differential --programs 1 --seed 1 --first 17     # the program of that number alone

The exit code is 1 when there is a difference that accepted.py does not explain.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator

from differential.accepted import ACCEPTED, IGNORED_HEADERS
from differential.compare import Difference, Side, run, shrink, source
from differential.handshakes import ACCEPTED_HANDSHAKES, HANDSHAKES, compare_handshakes
from differential.programs import CLIENT_METHODS, Program, make
from differential.rabbit import NoRabbitError, running_rabbit, version
from warren.testing import running_broker

_PATIENT_SECONDS = 0.1  # a difference has to be there when both were given that much time


@contextlib.contextmanager
def both_brokers(settle_seconds: float = 0.01) -> Iterator[tuple[Side, Side]]:
    with running_broker() as broker, running_rabbit() as port:
        warren, rabbit = Side("Warren", broker.port, settle_seconds), Side("RabbitMQ", port, settle_seconds)
        yield warren, rabbit
        warren.close()
        rabbit.close()


def replay(program: Program) -> None:
    """Run one program, and show everything that both brokers said."""
    with both_brokers(_PATIENT_SECONDS) as (warren, rabbit):
        for step in program:
            print(step.source())
            ours, theirs = warren.do(step), rabbit.do(step)
            for place in sorted(ours.keys() | theirs.keys()):
                if ours.get(place) == theirs.get(place):
                    print(f"  {place}: {ours[place]}")
                else:
                    print(f"! {place}\n    Warren:   {ours.get(place)}\n    RabbitMQ: {theirs.get(place)}")


def search(programs: int, seed: int, first: int, shrink_seconds: float) -> int:
    started = time.monotonic()
    found: dict[str, Difference] = {}
    times: Counter[str] = Counter()
    accepted: Counter[str] = Counter()
    flaky = steps = 0
    with both_brokers() as (warren, rabbit):
        for number in range(first, first + programs):
            program = make(f"{seed} {number}")
            steps += len(program)
            difference = run(program, warren, rabbit)
            if difference is None:
                continue
            if difference.accepted is None:
                difference = _again(difference, warren, rabbit)
                if difference is None:
                    flaky += 1
                    continue
            if difference.accepted is not None:
                accepted[difference.accepted] += 1
                continue
            times[difference.kind] += 1
            if difference.kind in found:
                continue
            smallest = shrink(difference, warren, rabbit, shrink_seconds)
            found[difference.kind] = smallest
            print(f"\nprogram {number}: {difference.kind}")
            print("\n".join(smallest.lines()))
            print(source(smallest), flush=True)
        warren.reset()
        rabbit.reset()
        handshakes = compare_handshakes(warren.port, rabbit.port)
        sent, seen = Counter(rabbit.sent), rabbit.seen
    print(
        f"\n{programs} programs, {steps} steps, seed {seed}, RabbitMQ {version()}, {time.monotonic() - started:.0f} s"
    )
    print("\nmethods that a client may send, and how often they were:")
    for name in CLIENT_METHODS:
        print(f"  {name:<28}{sent[name] or 'NOT COVERED'}")
    print("\nwhat RabbitMQ sent, and was compared:")
    for name in sorted(seen):
        print(f"  {name:<40}{seen[name]}")
    print("\naccepted differences:")
    for header, reason in IGNORED_HEADERS.items():
        print(f"  header {header}: {reason}")
    for rule in ACCEPTED:
        print(f"  {rule.name} ({accepted[rule.name]} programs): {rule.reason}")
    for name, reason in ACCEPTED_HANDSHAKES.items():
        print(f"  handshake, {name}: {reason}")
    print(f"\n{len(HANDSHAKES)} handshakes, {len(handshakes)} of them different")
    for name, (ours, theirs) in handshakes.items():
        print(f"  {name}\n    Warren:   {ours}\n    RabbitMQ: {theirs}")
    print(f"\ndifferences that went away when both brokers were given more time: {flaky}")
    print(f"differences: {len(found)} kinds in {times.total()} programs")
    for kind, count in times.most_common():
        print(f"  {count:>4}  {kind}")
    return 1 if found or handshakes else 0


def _again(difference: Difference, warren: Side, rabbit: Side) -> Difference | None:
    """The same, with patience: a machine that was busy is no difference."""
    quick = warren.settle_seconds
    warren.settle_seconds = rabbit.settle_seconds = _PATIENT_SECONDS
    try:
        return run(difference.program, warren, rabbit)
    finally:
        warren.settle_seconds = rabbit.settle_seconds = quick


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m differential", description=__doc__.partition("\n")[0])
    parser.add_argument("--programs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="number of the first program")
    parser.add_argument("--shrink-seconds", type=float, default=30.0)
    chosen = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that RabbitMQ is stopped on the way out
    try:
        return search(chosen.programs, chosen.seed, chosen.first, chosen.shrink_seconds)
    except NoRabbitError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())

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
from typing import Any

from differential import alarms
from differential.accepted import ACCEPTED, IGNORED_HEADERS
from differential.compare import PATIENT_SECONDS, Difference, Side, run, run_patiently, shrink, source
from differential.handshakes import ACCEPTED_HANDSHAKES, HANDSHAKES, compare_handshakes
from differential.programs import CLIENT_METHODS, Program, make
from differential.rabbit import NoRabbitError, Rabbit, running_rabbit, version
from differential.tour import ELSEWHERE, NEVER_SENT, TOUR
from warren.amqp.methods import BY_NAME
from warren.testing import RunningBroker, running_broker


@contextlib.contextmanager
def both_brokers() -> Iterator[tuple[RunningBroker, Rabbit]]:
    with running_broker() as broker, running_rabbit() as rabbit:
        yield broker, rabbit


@contextlib.contextmanager
def both_sides(broker: RunningBroker, rabbit: Rabbit, settle_seconds: float = 0.01) -> Iterator[tuple[Side, Side]]:
    sides = Side("Warren", broker.port, settle_seconds), Side("RabbitMQ", rabbit.port, settle_seconds)
    yield sides
    for side in sides:
        side.close()


def replay(program: Program) -> None:
    """Run one program, and show everything that both brokers said."""
    with both_brokers() as brokers, both_sides(*brokers, PATIENT_SECONDS) as (warren, rabbit):
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
    all_programs: dict[str, Program] = dict(TOUR)
    all_programs.update({f"program {number}": make(f"{seed} {number}") for number in range(first, first + programs)})
    with both_brokers() as brokers, both_sides(*brokers) as (warren, rabbit):
        for name, program in all_programs.items():
            steps += len(program)
            difference = run(program, warren, rabbit)
            if difference is None:
                continue
            if difference.accepted is None:
                difference = run_patiently(difference.program, warren, rabbit)
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
            print(f"\n{name}: {difference.kind}")
            print("\n".join(smallest.lines()))
            print(source(smallest), flush=True)
        warren.reset()
        rabbit.reset()
        handshakes = compare_handshakes(warren.port, rabbit.port)
        alarmed = compare_alarms(*brokers)
        sent, seen = Counter(rabbit.sent), rabbit.seen
    for name in ELSEWHERE:
        seen[name] += name not in ("connection.blocked", "connection.unblocked") or name in dict(alarmed[1])
    print(
        f"\n{len(TOUR)} programs by hand, {programs} generated, {steps} steps, seed {seed}, RabbitMQ {version()}, "
        f"{time.monotonic() - started:.0f} s"
    )
    missed = _show_coverage(sent, seen)
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
    if alarmed[0] != alarmed[1]:
        print(f"\nan alarm is told differently\n    Warren:   {alarmed[0]}\n    RabbitMQ: {alarmed[1]}")
    print(f"\ndifferences that went away when both brokers were given more time: {flaky}")
    print(f"differences: {len(found)} kinds in {times.total()} programs")
    for kind, count in times.most_common():
        print(f"  {count:>4}  {kind}")
    return 1 if found or handshakes or missed or alarmed[0] != alarmed[1] else 0


def compare_alarms(broker: RunningBroker, rabbit: Rabbit) -> tuple[list[Any], list[Any]]:
    def set_alarm(is_set: bool) -> None:
        broker.call(lambda: broker.broker.vhosts["/"].set_alarm("memory", is_set))

    return alarms.said(broker.port, set_alarm), alarms.said(rabbit.port, rabbit.set_memory_alarm)


def _show_coverage(sent: Counter[str], seen: Counter[str]) -> list[str]:
    """How often each method was sent and compared. Those that never were, and can be."""
    print("\nmethods that a client may send, and how often they were:")
    for name in CLIENT_METHODS:
        print(f"  {name:<28}{sent[name] or 'NOT COVERED'}")
    print("\nwhat RabbitMQ sent, and was compared:")
    for name in sorted(seen):
        print(f"  {name:<40}{seen[name]}")
    answers = [name for name in BY_NAME if name not in CLIENT_METHODS and name not in NEVER_SENT]
    missed = [name for name in CLIENT_METHODS if not sent[name]] + [name for name in answers if not seen[name]]
    total = len(CLIENT_METHODS) + len(answers)
    print(f"\nmethods covered: {total - len(missed)} of {total}{', not ' if missed else ''}{', '.join(missed)}")
    for name, reason in NEVER_SENT.items():
        print(f"  {name} is none of them: {reason}")
    return missed


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

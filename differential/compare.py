"""One program against both brokers, step by step, and what they answered side by side.

Rules:

1. After a step both brokers are given the time to finish it: every channel makes a round trip, then every queue is asked
   for its counts through a channel beside the program's, until twice in a row nothing changed.
2. What is compared is normalised: error texts, names that a broker makes up and times are left out; confirms are the sets
   of numbers that were confirmed and refused; deliveries are in order for each consumer.
3. A program ends at its first difference: after that the two are not in the same state any more.
4. Delivery tags of consumers of one channel depend on which queue is faster. Where only that differs the program ends, and
   it is no difference.
"""

from __future__ import annotations

import contextlib
import datetime
import re
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

from differential.accepted import IGNORED_HEADERS, explain
from differential.programs import EXCHANGES, QUEUES, Program, Step
from differential.wire import METHOD, Event, Lost, Wire, frame
from warren.amqp.methods import BY_NAME

Observation = dict[str, Any]  # "connection 0 channel 1: answers" and the like -> what was seen there

_SIDE_CHANNEL = 900  # of every connection of a program: to ask for its exclusive queues
PATIENT_SECONDS = 0.1  # a difference has to be there when both were given that much time
_ANSWER_SECONDS = 3.0
_MOST_ROUNDS = 40
_MADE_UP = re.compile(r"amq\.(?:gen|ctag)-[-\w]+|amq\.rabbitmq\.reply-to\.[-\w.+/=]+")
_CLOSES = ("channel.close", "connection.close", "lost")


@dataclass
class _ChannelState:
    confirming: bool = False
    published: int = 0
    settled: set[int] = field(default_factory=set)  # of those
    waiting: list[int] = field(default_factory=list)  # delivery tags that the client has not settled
    gets_no_ack: bool = False  # the last basic.get
    no_ack: set[str] = field(default_factory=set)  # consumers whose deliveries need no ack


class Side:
    """A program on one of the two brokers."""

    def __init__(self, name: str, port: int, settle_seconds: float = 0.01) -> None:
        self.name = name
        self.settle_seconds = settle_seconds
        self.sent: list[str] = []  # names of methods
        self.seen: Counter[str] = Counter()  # what was there to compare
        self.port = port
        self._observer = Wire(port)
        self._observer.open_channel(1)
        self._wires: dict[int, Wire] = {}
        self._states: dict[tuple[int, int], _ChannelState] = {}
        self._names: dict[str, str] = {}
        self._bound: list[dict[str, Any]] = []  # exchanges to exchanges

    def close(self) -> None:
        self.reset()
        self._observer.drop()

    # -- between programs --------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """As it was before any program."""
        for wire in self._wires.values():
            self.sent += wire.sent
            wire.drop()
        self._wires.clear()
        self._states.clear()
        generated = [name for name in self._names if name.startswith("amq.gen-")]
        self._names.clear()
        until = time.monotonic() + 10
        for queue in (*QUEUES, "missing", *generated):
            while not self._ask("queue.delete", queue=queue) and time.monotonic() < until:
                time.sleep(0.01)  # exclusive to a connection that is just going
        for exchange in (*EXCHANGES, "missing"):
            self._ask("exchange.delete", exchange=exchange)
        for arguments in self._bound:  # those between exchanges of every vhost are still there
            self._ask("exchange.unbind", **arguments)
        self._bound.clear()

    def _ask(self, name: str, **arguments: Any) -> Event | None:
        """On the observer's own channel; None where that was an error."""
        return _ask(self._observer, 1, name, arguments)

    # -- a step ------------------------------------------------------------------------------------------------------

    def do(self, step: Step) -> Observation:
        wire = self._wires.get(step.connection)
        if wire is None or wire.closed:
            wire = self._connect(step.connection)
        where = (step.connection, step.channel)
        if step.channel and not step.bare and step.channel not in wire.open_channels and step.method != "drop":
            wire.open_channel(step.channel)
            self._states[where] = _ChannelState()
        resolved = self._resolve(step, self._states.setdefault(where, _ChannelState()))
        if resolved is None:
            return {}
        step = resolved
        marks = {number: len(one.events) for number, one in self._wires.items()}
        was_open = {number: set(one.open_channels) for number, one in self._wires.items()}
        start = len(wire.events)
        self._send(wire, step)
        self._await_answer(wire, step, start)
        self._await_confirms(wire, where, start)
        counts = self._settle()
        seen: Observation = {}
        for number, one in self._wires.items():
            self._observe(number, one.events[marks[number] :], seen)
            for channel in was_open[number] - one.open_channels:
                self._states.pop((number, channel), None)
        seen.update(counts)
        return seen

    @staticmethod
    def _resolve(step: Step, state: _ChannelState) -> Step | None:
        """With a number for its delivery tag, and what it will do to the deliveries that wait."""
        if step.method == "basic.consume" and step.arguments.get("no_ack"):
            state.no_ack.add(step.arguments.get("consumer_tag", ""))
        elif step.method == "basic.get":
            state.gets_no_ack = bool(step.arguments.get("no_ack"))
        elif step.method.startswith("basic.recover") and step.arguments.get("requeue"):
            state.waiting.clear()
        tag = step.arguments.get("delivery_tag", 0)
        if isinstance(tag, str):
            if not state.waiting:
                return None
            place = {"oldest": 0, "second": min(1, len(state.waiting) - 1), "newest": -1}[tag]
            tag = state.waiting[place]
            step = replace(step, arguments={**step.arguments, "delivery_tag": tag})
        if step.method in ("basic.ack", "basic.nack", "basic.reject"):
            multiple = step.arguments.get("multiple")
            state.waiting = [one for one in state.waiting if one != tag and not (multiple and (one < tag or not tag))]
        return step

    def _connect(self, number: int) -> Wire:
        if number in self._wires:
            self.sent += self._wires[number].sent
        wire = self._wires[number] = Wire(self.port)
        wire.open_channel(_SIDE_CHANNEL)
        wire.events.clear()
        for where in [where for where in self._states if where[0] == number]:
            del self._states[where]
        return wire

    def _send(self, wire: Wire, step: Step) -> None:
        state = self._states.setdefault((step.connection, step.channel), _ChannelState())
        if step.method == "exchange.bind":
            self._bound.append({name: value for name, value in step.arguments.items() if name != "nowait"})
        if step.method == "drop":
            wire.drop()
        elif step.method == "raw":
            wire.write(frame(METHOD, step.channel, step.arguments["payload"]))
        elif step.method == "frame":
            wire.write(frame(step.arguments["kind"], step.channel, step.arguments["payload"]))
        elif step.method == "basic.publish":
            wire.publish(step.channel, step.body, step.properties, step.times, **step.arguments)
            if state.confirming:
                state.published += step.times
        else:
            wire.send(step.channel, step.method, **step.arguments)

    @staticmethod
    def _await_answer(wire: Wire, step: Step, start: int) -> None:
        answers = {f"{step.method}-ok"} | ({"basic.get-empty"} if step.method == "basic.get" else set())
        if not any(answer in BY_NAME for answer in answers) or step.arguments.get("nowait") or wire.closed:
            return

        def is_answer(event: Event) -> bool:
            return event.name in answers or event.name in _CLOSES

        with contextlib.suppress(Lost):
            wire.wait(is_answer, _ANSWER_SECONDS, start)

    def _await_confirms(self, wire: Wire, where: tuple[int, int], start: int) -> None:
        state = self._states.get(where)
        until = time.monotonic() + _ANSWER_SECONDS
        while state is not None and state.confirming and where[1] in wire.open_channels:
            settled = set(state.settled)
            for event in wire.events[start:]:
                if event.channel == where[1] and event.name in ("basic.ack", "basic.nack"):
                    settled |= _numbers(event, settled)
            if len(settled) >= state.published or time.monotonic() > until:
                return
            wire.read(until - time.monotonic())

    # -- waiting until it is done ------------------------------------------------------------------------------------

    def _settle(self) -> Observation:
        last: tuple[Observation, int] | None = None
        for _ in range(_MOST_ROUNDS):
            for wire in self._wires.values():
                for channel in sorted(wire.open_channels - {_SIDE_CHANNEL}):
                    if channel in wire.open_channels:  # still: an error may come at any time
                        self._round_trip(wire, channel)
            now = (self._counts(), sum(len(wire.events) for wire in self._wires.values()))
            if now == last:
                break
            last = now
            time.sleep(self.settle_seconds)
            for wire in self._wires.values():
                wire.read()
        assert last is not None
        return last[0]

    @staticmethod
    def _round_trip(wire: Wire, channel: int) -> None:
        """Everything that was sent on the channel has been seen by the broker. access.request changes nothing."""
        if _ask(wire, channel, "access.request", {}) is None and channel in wire.open_channels:
            wire.events.append(Event(channel, "no answer", {}))

    def _counts(self) -> Observation:
        """Of every queue that a program may have made; of the exchanges, whether they are there."""
        counts: Observation = {}
        for name in (*QUEUES, *(name for name in self._names if name.startswith("amq.gen-"))):
            counts[f"queue {self._names.get(name, name)}"] = self._count(name)
        return counts

    def _count(self, queue: str) -> tuple[int, int] | None:
        """Messages and consumers; None: there is no such queue."""
        askers = [(self._observer, 1)]
        askers += [(wire, _SIDE_CHANNEL) for wire in self._wires.values() if not wire.closed]
        for wire, channel in askers:
            mark = len(wire.events)
            answer = _ask(wire, channel, "queue.declare", {"queue": queue, "passive": True})
            if answer is not None:
                return answer.arguments["message_count"], answer.arguments["consumer_count"]
            code = _forget_close(wire, channel, mark)
            if code != 405:
                return None
        return None

    # -- what was seen -----------------------------------------------------------------------------------------------

    def _observe(self, number: int, events: list[Event], seen: Observation) -> None:
        ended = any(event.name in ("connection.close", "connection.close-ok") for event in events)
        for event in events:
            if event.channel == _SIDE_CHANNEL or (event.name == "lost" and ended):
                continue
            self.seen[event.name] += 1
            place = f"connection {number} channel {event.channel}"
            state = self._states.setdefault((number, event.channel), _ChannelState())
            if event.name in ("basic.ack", "basic.nack"):
                numbers = _numbers(event, state.settled)
                state.settled |= numbers
                seen.setdefault(f"{place}: {'confirmed' if event.name == 'basic.ack' else 'refused'}", set()).update(
                    numbers
                )
            elif event.name == "basic.deliver":
                tag = self._plain(event.arguments["consumer_tag"])
                if tag not in state.no_ack:
                    state.waiting.append(event.arguments["delivery_tag"])
                seen.setdefault(f"{place}: deliveries to {tag}", []).append(self._message(event))
                seen.setdefault(f"{place}: tags", []).append((tag, event.arguments["delivery_tag"]))
            elif event.name == "basic.cancel":
                seen.setdefault(f"{place}: cancelled", set()).add(self._plain(event.arguments["consumer_tag"]))
            else:
                if event.name == "confirm.select-ok":
                    state.confirming = True
                elif event.name == "basic.get-ok" and not state.gets_no_ack:
                    state.waiting.append(event.arguments["delivery_tag"])
                seen.setdefault(f"{place}: answers", []).append(self._answer(event))

    def _answer(self, event: Event) -> tuple[Any, ...]:
        if event.properties is not None:
            tag = event.arguments.get("delivery_tag", 0)
            count = event.arguments.get("message_count", event.arguments.get("reply_code"))
            return (event.name, tag, count, *self._message(event))
        arguments = {
            name: self._plain(value)
            for name, value in event.arguments.items()
            if name not in ("reply_text", "channel_id", "cluster_id")
        }
        return (event.name, arguments)

    def _message(self, event: Event) -> tuple[Any, ...]:
        arguments = event.arguments
        properties = self._plain(event.properties)
        headers = properties.get("headers")
        if isinstance(headers, dict):
            for ignored in IGNORED_HEADERS:
                headers.pop(ignored, None)
            self.seen["(messages with x-death)"] += "x-death" in headers
            for death in headers.get("x-death") or ():
                if isinstance(death, dict) and isinstance(death.get("time"), datetime.datetime):
                    death["time"] = "a time"
        place = (arguments["exchange"], self._plain(arguments["routing_key"]))
        return (event.body, arguments.get("redelivered"), place, properties)

    def _plain(self, value: Any) -> Any:
        """Without names that the broker made up."""
        if isinstance(value, str):
            return _MADE_UP.sub(lambda found: self._made_up(found.group()), value)
        if isinstance(value, dict):
            return {name: self._plain(inner) for name, inner in value.items()}
        if isinstance(value, list):
            return [self._plain(inner) for inner in value]
        return value

    def _made_up(self, name: str) -> str:
        kind = name.split("-")[0]
        return self._names.setdefault(name, f"{kind}#{sum(known.startswith(kind) for known in self._names) + 1}")


def _numbers(event: Event, settled: set[int]) -> set[int]:
    """The publishes that a confirm is about."""
    tag = event.arguments["delivery_tag"]
    if event.arguments["multiple"]:
        return {number for number in range(1, tag + 1) if number not in settled}
    return {tag}


def _ask(wire: Wire, channel: int, name: str, arguments: dict[str, Any]) -> Event | None:
    """A question beside the program: its answer leaves no trace. None: an error closed the channel."""
    start = len(wire.events)
    wire.send(channel, name, **arguments)
    wire.sent.pop()
    answer = f"{name}-ok"

    def is_answer(event: Event) -> bool:
        return (event.channel == channel and event.name in (answer, "channel.close")) or event.name in _CLOSES[1:]

    try:
        found = wire.wait(is_answer, _ANSWER_SECONDS, start)
    except Lost:
        return None
    if found.name == answer:
        wire.events.remove(found)
        return found
    if channel in (1, _SIDE_CHANNEL) and found.name == "channel.close" and name != "access.request":
        wire.open_channel(channel)
        wire.sent.pop()
    return None


def _forget_close(wire: Wire, channel: int, mark: int) -> int:
    """The code with which the channel was just closed; it leaves no trace."""
    code = 0
    for event in wire.events[mark:]:
        if event.channel == channel and event.name in ("channel.close", "channel.open-ok"):
            code = event.arguments.get("reply_code", code)
            wire.events.remove(event)
    return code


@dataclass
class Difference:
    """Where the two brokers part."""

    program: Program  # up to and with the step
    ours: Observation
    theirs: Observation
    accepted: str | None = None  # the rule of accepted.py that explains it

    def lines(self) -> list[str]:
        shown = []
        for place in sorted(self.ours.keys() | self.theirs.keys()):
            ours, theirs = self.ours.get(place), self.theirs.get(place)
            if ours != theirs:
                shown += [f"  {place}", f"    Warren:   {ours}", f"    RabbitMQ: {theirs}"]
        return shown

    @property
    def kind(self) -> str:
        """Two differences of one kind are probably one fault: the step's method and the places."""
        places = sorted(
            re.sub(r"connection \d+ channel \d+: |#?\d+", "", place)
            for place in self.ours.keys() | self.theirs.keys()
            if self.ours.get(place) != self.theirs.get(place)
        )
        step = self.program[-1]
        codes = [
            answer[1].get("reply_code")
            for side in (self.ours, self.theirs)
            for place, answers in side.items()
            if place.endswith(": answers")
            for answer in answers
            if answer[0] in ("channel.close", "connection.close")
        ]
        return f"{step.method} {codes or ''} {', '.join(dict.fromkeys(places))}"


def run(program: Program, warren: Side, rabbit: Side) -> Difference | None:
    """Both from a clean start; the first difference."""
    warren.reset()
    rabbit.reset()
    for position, step in enumerate(program):
        ours, theirs = warren.do(step), rabbit.do(step)
        if ours == theirs:
            continue
        if _without_tags(ours) == _without_tags(theirs):
            rabbit.seen["(programs that ended by rule 4)"] += 1
            return None
        done = program[: position + 1]
        return Difference(done, ours, theirs, explain(done, ours, theirs))
    return None


def run_patiently(program: Program, warren: Side, rabbit: Side) -> Difference | None:
    """The same, with more time for each step: a machine that was busy is no difference."""
    quick = warren.settle_seconds
    warren.settle_seconds = rabbit.settle_seconds = PATIENT_SECONDS
    try:
        return run(program, warren, rabbit)
    finally:
        warren.settle_seconds = rabbit.settle_seconds = quick


def _without_tags(seen: Observation) -> Observation:
    return {place: what for place, what in seen.items() if not place.endswith(": tags")}


def shrink(difference: Difference, warren: Side, rabbit: Side, seconds: float = 60.0) -> Difference:
    """A shorter program with a difference of the same kind: steps are left out, many at once and then one by one."""
    until = time.monotonic() + seconds
    smallest = difference
    size = max(1, len(smallest.program) // 2)
    while True:
        before = len(smallest.program)
        at = before - 1 - size  # the last step is the one that differs
        while at > -size and time.monotonic() < until:
            start = max(at, 0)
            program = smallest.program[:start] + smallest.program[at + size :]
            found = run(program, warren, rabbit) if at + size > 0 else None
            if found is not None and found.kind == difference.kind and found.accepted == difference.accepted:
                smallest = found
            at -= size
        if time.monotonic() >= until or (size == 1 and len(smallest.program) == before):
            break
        size = max(1, size // 2)
    return smallest


def source(difference: Difference) -> str:
    """The program as a file that runs it again."""
    steps = "".join(f"        {step.source()},\n" for step in difference.program)
    return (
        "from differential.__main__ import replay\nfrom differential.programs import Step\n\n"
        f"replay(\n    [\n{steps}    ]\n)\n"
    )

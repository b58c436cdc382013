"""RPC with direct reply-to: ask and get the answer on the same channel, without a queue for the answers.

warren serve &
python examples/broker_rpc.py
"""

from __future__ import annotations

import os
import threading
import uuid

import pika

URL = os.environ.get("AMQP_URL", "amqp://guest:guest@localhost/")
REPLY_TO = "amq.rabbitmq.reply-to"  # a name that stands for: to this channel


def serve(requests: int) -> None:
    """Answer so many requests: the n-th Fibonacci number."""
    with pika.BlockingConnection(pika.URLParameters(URL)) as connection:
        channel = connection.channel()
        channel.queue_declare("fibonacci", auto_delete=True)
        channel.basic_qos(prefetch_count=1)
        for done, (method, request, body) in enumerate(channel.consume("fibonacci"), start=1):
            first, second = 0, 1
            for _ in range(int(body)):
                first, second = second, first + second
            answer = pika.BasicProperties(correlation_id=request.correlation_id)
            channel.basic_publish("", request.reply_to, b"%d" % first, answer)
            channel.basic_ack(method.delivery_tag)
            if done == requests:
                break
        channel.cancel()


class Fibonacci:
    """The other side: call it."""

    def __init__(self) -> None:
        self._connection = pika.BlockingConnection(pika.URLParameters(URL))
        self._channel = self._connection.channel()
        self._answers: dict[str, int] = {}
        # Both sides declare what they need: whoever comes first makes the queue, and no request goes into the void.
        self._channel.queue_declare("fibonacci", auto_delete=True)
        # Listen first, and without acks; then ask, on the same channel.
        self._channel.basic_consume(REPLY_TO, self._on_answer, auto_ack=True)

    def _on_answer(self, channel: object, method: object, properties: pika.BasicProperties, body: bytes) -> None:
        self._answers[properties.correlation_id] = int(body)

    def __call__(self, n: int) -> int:
        call = str(uuid.uuid4())
        request = pika.BasicProperties(reply_to=REPLY_TO, correlation_id=call)
        self._channel.basic_publish("", "fibonacci", b"%d" % n, request)
        while call not in self._answers:
            self._connection.process_data_events(time_limit=1)
        return self._answers.pop(call)

    def close(self) -> None:
        self._connection.close()


def main() -> None:
    server = threading.Thread(target=serve, args=(10,))
    server.start()
    fibonacci = Fibonacci()
    print(", ".join(str(fibonacci(n)) for n in range(10)))
    fibonacci.close()
    server.join()


if __name__ == "__main__":
    main()

"""A broker for tests: real sockets, real AMQP, ready in milliseconds.

In a test, by the pytest plugin that comes with Warren:

    def test_orders(warren_broker):
        connection = pika.BlockingConnection(pika.URLParameters(warren_broker.url))

or by hand:

    with warren.testing.running_broker() as broker: ...
"""

from warren.testing.running import RunningBroker, running_broker

__all__ = ["RunningBroker", "running_broker"]

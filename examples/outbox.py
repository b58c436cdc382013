"""A transactional outbox: orders move from queue to queue, each step once, also if the process dies between two.

    python examples/outbox.py data/

A transaction publishes to two queues and acks the message that it came from. All of it is one record of the journal:
after a crash either everything happened or nothing, and then the order is taken again.
"""

from __future__ import annotations

import json
import sys

import warren


def place(store: warren.Store, number: int, amount: int) -> None:
    """An order enters with its own id, so that whoever takes it from here can tell it from another."""
    store.queue("orders").publish(
        json.dumps({"order": number, "amount": amount}).encode(),
        content_type="application/json",
        message_id=f"order-{number}",
    )


def ship(store: warren.Store, order: warren.Message) -> None:
    """One order becomes a parcel and an invoice, or stays an order."""
    content = json.loads(order.body)
    with store.transaction() as tx:
        tx.publish("parcels", json.dumps({"for": content["order"]}).encode())
        tx.publish("invoices", json.dumps({"for": content["order"], "amount": content["amount"]}).encode())
        tx.ack(order)
        if content["amount"] < 0:
            raise ValueError(f"order {content['order']} has a negative amount")  # nothing of the block happens


def main(directory: str) -> None:
    with warren.open(directory) as store:
        orders, parcels, invoices = (store.queue(name) for name in ("orders", "parcels", "invoices"))
        rejected = store.queue("rejected")
        for number, amount in enumerate([10, 20, -5, 40]):
            place(store, number, amount)
        while (order := orders.get()) is not None:
            try:
                ship(store, order)
            except ValueError as error:
                print(f"rejected: {error}")
                with store.transaction() as tx:
                    tx.publish("rejected", order.body, headers={"reason": str(error)})
                    tx.ack(order)
        print(f"{len(parcels)} parcels, {len(invoices)} invoices, {len(rejected)} rejected, {len(orders)} orders left")


if __name__ == "__main__":
    main(sys.argv[1])

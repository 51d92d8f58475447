"""From Kafka into NATS: reads a topic from its end, and publishes each value to a stream, without waiting for its word.

What it cannot do: it repeats or loses events when it restarts, and a client that was away finds its place by a sequence
number of NATS alone, for as long as the stream keeps what it missed. Arguments: bootstrap, topic, port of NATS.
"""

from __future__ import annotations

import json
import socket
import sys

from confluent_kafka import Consumer, TopicPartition

STREAM = {"name": "events", "subjects": ["events.>"], "storage": "file", "max_age": 600_000_000_000}


def main() -> None:
    bootstrap, topic, port = sys.argv[1:]
    hub = socket.create_connection(("127.0.0.1", int(port)))
    made = json.dumps(STREAM)
    hub.sendall(b'CONNECT {"verbose":false}\r\nSUB made 1\r\n')
    hub.sendall(f"PUB $JS.API.STREAM.CREATE.events made {len(made)}\r\n{made}\r\n".encode())
    answer = b""
    while b"\r\nMSG made" not in answer or not answer.endswith(b"}\r\n"):
        answer += hub.recv(1 << 16)
    if b'"error"' in answer:
        raise SystemExit(answer.decode())
    settings = {"bootstrap.servers": bootstrap, "group.id": "bridge", "enable.auto.commit": False}
    consumer = Consumer({**settings, "fetch.wait.max.ms": 10})
    partitions = [TopicPartition(topic, p) for p in consumer.list_topics(topic, timeout=10).topics[topic].partitions]
    consumer.assign(
        [TopicPartition(topic, p.partition, consumer.get_watermark_offsets(p, timeout=10)[1]) for p in partitions]
    )
    consumer.consume(1, 0.5)
    print("ready", flush=True)
    while True:
        messages = consumer.consume(1000, 0.005) or consumer.consume(1, 1.0)
        parts = []
        for message in messages:
            value = message.value() or b""
            parts.append(b"PUB events.all %d\r\n%b\r\n" % (len(value), value))
        if parts:
            hub.sendall(b"".join(parts))


if __name__ == "__main__":
    main()

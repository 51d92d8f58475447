"""The bare read: a topic is read from its start and dropped."""

from __future__ import annotations

from confluent_kafka import Consumer, TopicPartition

from bench.peers.task import Watch, given


def opened(bootstrap: str, topic: str, group: str) -> Consumer:
    """Return a consumer of a whole topic, from its start."""
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": group, "enable.auto.commit": False})
    partitions = consumer.list_topics(topic, timeout=10).topics[topic].partitions
    consumer.assign([TopicPartition(topic, partition, 0) for partition in partitions])
    return consumer


def main() -> None:
    task = given()
    consumer, watch = opened(task.bootstrap, task.topic, "bare"), Watch()
    watch.begin()
    while watch.events < task.events:
        watch.batch(len(consumer.consume(10_000, timeout=0.1)), 0)
    watch.end()
    watch.tell()
    consumer.close()


if __name__ == "__main__":
    main()

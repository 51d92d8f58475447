"""The settings of what everything rests on: Kafka, Valkey and Spark. Cassandra's are in ``tag_settings``."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Annotated, Any, Self

from pydantic import Field, SecretStr, model_validator

from tailrace.config.tables import Properties
from tailrace.config.values import (
    Brokers,
    Count,
    CountOrZero,
    Delay,
    Duration,
    KafkaProperties,
    Memory,
    Pattern,
    Patterns,
    Section,
    SparkConf,
    Topic,
    ValkeyUrl,
    without_password,
)

_JAVA_ONLY = re.compile(r"sasl\.jaas\.config|ssl\.truststore\..*|ssl\.keystore\.type|.*\.class")


class Kafka(Section):
    """Where events come from."""

    bootstrap: Brokers = "127.0.0.1:9092"
    topics: Pattern | tuple[Topic, ...] = ".*"
    exclude: Patterns = ("__.*",)
    dead_letters: Topic = "tailrace.dead-letters"
    positions: Topic = "tailrace.positions"
    new_topic_partitions: Annotated[int, Field(ge=1, le=10_000)] = 4
    new_topic_replication: Annotated[int, Field(ge=1, le=32)] = 1
    poll: Duration = timedelta(seconds=1)
    properties: KafkaProperties = Properties()

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.dead_letters == self.positions:
            raise ValueError("two different topics for dead_letters and positions")
        return self

    def client(self) -> dict[str, Any]:
        """The properties of our own clients: librdkafka's, so without those that only Java knows."""
        given = {name: value for name, value in self.properties.items() if not _JAVA_ONLY.fullmatch(name)}
        return {"log.connection.close": False, **given, "bootstrap.servers": self.bootstrap}


class Valkey(Section):
    """Where the views rest. A password inside the url moves to ``password``, so that the url can be printed."""

    url: ValkeyUrl = "valkey://127.0.0.1:6379/0"
    password: SecretStr = SecretStr("")
    prefix: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,32}$")] = "tr"
    shards: Annotated[int, Field(ge=1, le=1024)] = 4
    timeout: Duration = timedelta(seconds=5)
    tail_length: Annotated[int, Field(ge=100)] = 10_000

    @model_validator(mode="before")
    @classmethod
    def _split(cls, given: Any) -> Any:
        if not isinstance(given, dict) or not isinstance(given.get("url"), str):
            return given
        url, inside = without_password(given["url"])
        if not inside:
            return given
        outside = given.get("password", "")
        if (outside.get_secret_value() if isinstance(outside, SecretStr) else outside) not in ("", inside):
            raise ValueError("one password: valkey.url and valkey.password hold different ones")
        return given | {"url": url, "password": inside}


class Spark(Section):
    """The engine of the pipeline."""

    master: Annotated[str, Field(pattern=r"^(local(\[.+\])?|local-cluster\[.+\]|spark://.+|yarn|k8s://.+)$")] = (
        "local[2,4]"
    )
    trigger: Delay = timedelta(milliseconds=100)
    max_records: Count = 200_000
    driver_memory: Memory = "2g"
    tasks: CountOrZero = 0
    jars: str = ""
    conf: SparkConf = Properties()
    checkpoint: str = ""

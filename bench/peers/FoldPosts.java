import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import com.fasterxml.jackson.databind.node.ArrayNode;
import com.fasterxml.jackson.databind.node.ObjectNode;
import java.time.Duration;
import java.util.Properties;
import java.util.concurrent.atomic.AtomicLong;
import org.apache.kafka.common.serialization.Serdes;
import org.apache.kafka.streams.KafkaStreams;
import org.apache.kafka.streams.KeyValue;
import org.apache.kafka.streams.StreamsBuilder;
import org.apache.kafka.streams.StreamsConfig;
import org.apache.kafka.streams.kstream.Consumed;
import org.apache.kafka.streams.kstream.Materialized;
import org.apache.kafka.streams.kstream.Produced;
import org.apache.kafka.streams.kstream.SessionWindows;
import org.apache.kafka.streams.kstream.Suppressed;

/**
 * Folding with Kafka Streams: session windows by the events' own times, emitted when they are closed; state in RocksDB
 * with changelog topics, exactly-once v2, which are its own answer to restarts.
 *
 * <p>What it cannot do: a longest wait, a largest count or size (a session that never rests is never emitted); tell which
 * events a fold holds. Its time moves with the events of a partition: if one falls silent, its last sessions stay open,
 * and are missing from the count. Arguments: bootstrap, topic, output, events, quiet ms, state folder, threads.
 */
public final class FoldPosts {
    private static final ObjectMapper JSON = new ObjectMapper();

    public static void main(String[] args) throws Exception {
        String topic = args[1], output = args[2];
        long events = Long.parseLong(args[3]);
        Duration quiet = Duration.ofMillis(Long.parseLong(args[4]));
        AtomicLong read = new AtomicLong(), folds = new AtomicLong(), first = new AtomicLong(), last = new AtomicLong();

        StreamsBuilder builder = new StreamsBuilder();
        builder.stream(topic, Consumed.with(Serdes.String(), Serdes.ByteArray()))
            .peek((key, value) -> {
                first.compareAndSet(0, System.nanoTime());
                read.incrementAndGet();
                last.set(System.nanoTime());
            })
            .groupByKey()
            .windowedBy(SessionWindows.ofInactivityGapWithNoGrace(quiet))
            .aggregate(
                () -> "",
                (key, value, names) -> merged(names, names(value)),
                (key, left, right) -> merged(left, right),
                Materialized.with(Serdes.String(), Serdes.String()))
            .suppress(Suppressed.untilWindowCloses(Suppressed.BufferConfig.unbounded()))
            .toStream()
            .map((window, names) -> {
                folds.incrementAndGet();
                last.set(System.nanoTime());
                return KeyValue.pair(window.key(), folded(window.key(), names));
            })
            .to(output, Produced.with(Serdes.String(), Serdes.ByteArray()));

        Properties settings = new Properties();
        settings.put(StreamsConfig.APPLICATION_ID_CONFIG, output);
        settings.put(StreamsConfig.BOOTSTRAP_SERVERS_CONFIG, args[0]);
        settings.put(StreamsConfig.STATE_DIR_CONFIG, args[5]);
        settings.put(StreamsConfig.NUM_STREAM_THREADS_CONFIG, args[6]);
        settings.put(StreamsConfig.PROCESSING_GUARANTEE_CONFIG, StreamsConfig.EXACTLY_ONCE_V2);
        settings.put(StreamsConfig.REPLICATION_FACTOR_CONFIG, 1);
        settings.put(StreamsConfig.consumerPrefix("auto.offset.reset"), "earliest");

        double before = cpuSeconds();
        try (KafkaStreams streams = new KafkaStreams(builder.build(), settings)) {
            streams.start();
            long deadline = System.nanoTime() + Duration.ofSeconds(120).toNanos();
            // All is read, and nothing more was emitted for a while: what is still open is open for good.
            while (System.nanoTime() < deadline
                && (read.get() < events || System.nanoTime() - last.get() < Duration.ofSeconds(2).toNanos())) {
                Thread.sleep(20);
            }
            streams.close(Duration.ofSeconds(10));
        }
        System.out.printf(
            "{\"events\": %d, \"folds\": %d, \"seconds\": %f, \"before\": %f}%n",
            read.get(), folds.get(), (last.get() - first.get()) / 1e9, before);
    }

    /** Names are kept as text with commas between, in the order in which they were first seen. */
    private static String names(byte[] value) {
        try {
            return String.join(",", (Iterable<String>) () -> metrics(value).fieldNames());
        } catch (RuntimeException error) {
            return "";
        }
    }

    private static JsonNode metrics(byte[] value) {
        try {
            return JSON.readTree(value).get("metrics");
        } catch (java.io.IOException error) {
            throw new IllegalArgumentException(error);
        }
    }

    private static String merged(String left, String right) {
        StringBuilder all = new StringBuilder(left);
        for (String name : right.split(",")) {
            if (!name.isEmpty() && !("," + all + ",").contains("," + name + ",")) {
                all.append(all.length() == 0 ? "" : ",").append(name);
            }
        }
        return all.toString();
    }

    private static byte[] folded(String account, String names) {
        ObjectNode node = JSON.createObjectNode().put("account_id", account);
        ArrayNode array = node.putArray("metrics");
        for (String name : names.split(",")) {
            array.add(name);
        }
        return node.toString().getBytes(java.nio.charset.StandardCharsets.UTF_8);
    }

    private static double cpuSeconds() {
        return ProcessHandle.current().info().totalCpuDuration().map(Duration::toMillis).orElse(0L) / 1000.0;
    }
}

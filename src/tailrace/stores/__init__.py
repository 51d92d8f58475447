"""Where things rest: the layout of Valkey and Kafka, with the writer and the reader of each structure side by side."""

// Binary messages of a session: a header in JSON, and arrays of times and values that begin at a multiple of eight.

/** Read a message: its header, in which each channel has ``times`` (nanoseconds, BigInt) and ``values``. */
export function readFrame(buffer) {
  const length = new DataView(buffer).getUint32(0, true);
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, length)));
  const begin = Math.ceil((4 + length) / 8) * 8;
  for (const channel of header.channels ?? []) {
    channel.times = new BigInt64Array(buffer, begin + channel.times, channel.n);
    channel.values = channel.v ?? new Float64Array(buffer, begin + channel.values, channel.n);
  }
  return header;
}

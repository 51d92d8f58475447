// Numbers and times as people read them.

/** Write a number as the configuration's C-style format says; three digits behind the point where it says nothing. */
export function written(value, format) {
  if (typeof value === "string") return value;
  if (!Number.isFinite(value)) return "–";
  const found = /%[-+ 0#]*\d*(?:\.(\d+))?([a-zA-Z])/.exec(format || "");
  if (!found) return String(Math.abs(value) < 1e9 ? +value.toFixed(3) : +value.toPrecision(6));
  const [, digits, kind] = found;
  if ("di".includes(kind)) return value.toFixed(0);
  if ("xX".includes(kind)) return Math.round(value).toString(16);
  if ("fF".includes(kind)) return value.toFixed(digits === undefined ? 6 : Math.min(20, +digits));
  return String(+value.toPrecision(6));
}

/** Write a time of day, of milliseconds since 1970. */
export function clock(ms, digits = 3) {
  const date = new Date(ms);
  const day = date.toTimeString().slice(0, 8);
  return digits ? `${day}.${String(date.getMilliseconds()).padStart(3, "0").slice(0, digits)}` : day;
}

/** Write a moment: the time of day, and the day if it is not today. */
export function moment(ms) {
  const date = new Date(ms);
  if (Number.isNaN(date.getTime())) return "";
  const today = date.toDateString() === new Date().toDateString();
  return today ? clock(ms, 0) : `${date.toLocaleDateString()} ${clock(ms, 0)}`;
}

/** Write how long it is between two times in nanoseconds: minutes, seconds and tenths. */
export function span(start, end) {
  const tenths = Number((BigInt(end) - BigInt(start)) / 100_000_000n);
  return `${Math.floor(tenths / 600)}:${((tenths % 600) / 10).toFixed(1).padStart(4, "0")}`;
}

/** Write how long ago something was. */
export function ago(ms) {
  const seconds = Math.max(0, Math.round((Date.now() - ms) / 1000));
  if (seconds < 120) return `${seconds} s ago`;
  return seconds < 7200 ? `${Math.round(seconds / 60)} min ago` : `${Math.round(seconds / 3600)} h ago`;
}

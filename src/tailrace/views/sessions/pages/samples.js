// The buffered samples of one parameter, in the order of time.

const FIRST_ROOM = 1024;

/** Times and values, in arrays that grow with what is kept. Times are milliseconds since a base. */
export class Samples {
  constructor() {
    this.times = new Float64Array(FIRST_ROOM);
    this.values = new Float64Array(FIRST_ROOM);
    this.begin = 0;
    this.end = 0;
  }

  get last() {
    return this.end > this.begin ? this.values[this.end - 1] : NaN;
  }

  /** Add samples; those that are older than what is there go to their place, and what is there already is not doubled. */
  add(times, values) {
    if (!times.length) return;
    this.#room(times.length);
    const last = this.end > this.begin ? this.times[this.end - 1] : -Infinity;
    const late = times.some((time, i) => time <= (i ? times[i - 1] : last));
    this.times.set(times, this.end);
    this.values.set(values, this.end);
    this.end += times.length;
    if (late) this.#sort();
  }

  /** Draw no line from here to what comes: something is missing in between. */
  cut() {
    if (this.end === this.begin || Number.isNaN(this.last)) return;
    this.#room(1);
    this.times[this.end] = this.times[this.end - 1];
    this.values[this.end++] = NaN;
  }

  /** Forget what is before a time, except the last of it: it may be what the parameter still is. */
  drop(before) {
    while (this.begin + 1 < this.end && this.times[this.begin + 1] < before) this.begin += 1;
  }

  /** Return the index of the first sample that is not before a time. */
  from(time) {
    let low = this.begin, high = this.end;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.times[middle] < time) low = middle + 1; else high = middle;
    }
    return low;
  }

  /** Return what was sampled last up to a time; NaN if nothing was. */
  at(time) {
    const after = this.from(time);
    const index = after < this.end && this.times[after] === time ? after : after - 1;
    return index >= this.begin ? this.values[index] : NaN;
  }

  #room(more) {
    if (this.end + more <= this.times.length) return;
    const held = this.end - this.begin;
    const size = held + more > this.times.length / 2 ? 2 * (held + more) : this.times.length;
    const times = new Float64Array(size), values = new Float64Array(size);
    times.set(this.times.subarray(this.begin, this.end));
    values.set(this.values.subarray(this.begin, this.end));
    [this.times, this.values, this.begin, this.end] = [times, values, 0, held];
  }

  #sort() {
    const order = Array.from({length: this.end - this.begin}, (_, i) => this.begin + i)
      .sort((a, b) => this.times[a] - this.times[b] || a - b);
    const times = order.map((i) => this.times[i]), values = order.map((i) => this.values[i]);
    let kept = 0;
    for (let i = 0; i < order.length; i++) {
      if (kept && times[i] === times[kept - 1] && values[i] === values[kept - 1]) continue;
      times[kept] = times[i];
      values[kept++] = values[i];
    }
    times.length = values.length = kept;
    this.begin = 0;
    this.times.set(times);
    this.values.set(values);
    this.end = kept;
  }
}

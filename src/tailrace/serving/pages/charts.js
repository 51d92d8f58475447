// Strip charts on canvas: the last seconds of one parameter each, drawn as the highest and lowest value of every pixel.

const FIRST_ROOM = 1024;

/** The samples of one parameter that are still shown, in the order of time. Times are milliseconds since a base. */
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

  /** Forget what is before a time. */
  drop(before) {
    while (this.begin < this.end && this.times[this.begin] < before) this.begin += 1;
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

/** Write a number as the configuration's C-style format says; three digits behind the point where it says nothing. */
export function written(value, format) {
  if (typeof value === "string") return value;
  if (!Number.isFinite(value)) return "–";
  const found = /%[-+ 0#]*\d*(?:\.(\d+))?([a-zA-Z])/.exec(format || "");
  if (!found) return String(+value.toFixed(3));
  const [, digits, kind] = found;
  if ("di".includes(kind)) return value.toFixed(0);
  if ("xX".includes(kind)) return Math.round(value).toString(16);
  if ("fF".includes(kind)) return value.toFixed(digits === undefined ? 6 : Math.min(20, +digits));
  return String(+value.toPrecision(6));
}

/** One chart: a card with a name, the current value and a canvas. */
export class Chart {
  constructor(parameter) {
    this.samples = new Samples();
    this.texts = [];
    this.numbers = new Map(); // of texts
    this.card = document.createElement("section");
    this.card.className = "card chart";
    this.card.innerHTML = '<div class="top"><span class="name"></span><span class="faint unit"></span>' +
      '<span class="number now">–</span></div><canvas></canvas>';
    this.now = this.card.querySelector(".now");
    this.canvas = this.card.querySelector("canvas");
    this.parameter = {};
    this.describe(parameter);
  }

  /** Take what is known of the parameter: its name, unit, format and limits. */
  describe(more) {
    this.parameter = {...this.parameter, ...more};
    const {name, unit, description, id} = this.parameter;
    this.card.querySelector(".name").textContent = name;
    this.card.querySelector(".unit").textContent = unit || "";
    this.card.title = [description, id].filter(Boolean).join(" · ");
  }

  /** Add samples; texts are drawn by their numbers. */
  add(times, values) {
    if (Array.isArray(values)) values = Float64Array.from(values, (value) => this.#number(value));
    this.samples.add(times, values);
  }

  #number(value) {
    const text = value === null ? "" : String(value);
    if (!this.numbers.has(text)) {
      this.numbers.set(text, this.texts.length);
      this.texts.push(text);
    }
    return this.numbers.get(text);
  }

  /** Draw what lies between two times. */
  draw(from, until, colours) {
    this.#say();
    const ratio = window.devicePixelRatio || 1;
    const width = Math.round(this.canvas.clientWidth * ratio), height = Math.round(this.canvas.clientHeight * ratio);
    if (!width || !height) return;
    if (this.canvas.width !== width || this.canvas.height !== height) {
      this.canvas.width = width;
      this.canvas.height = height;
    }
    const pen = this.canvas.getContext("2d");
    pen.clearRect(0, 0, width, height);
    this.#grid(pen, from, until, width, height, colours);
    if (this.texts.length) this.#words(pen, from, until, width, height, ratio, colours);
    else this.#line(pen, from, until, width, height, ratio, colours);
  }

  #say() {
    const last = this.samples.last;
    const value = this.texts.length ? (this.texts[last] ?? "–") : last;
    this.now.textContent = written(value, this.parameter.format);
    const {warn_min: low, warn_max: high} = this.parameter;
    this.card.classList.toggle("over", high > low && (last < low || last > high));
  }

  #grid(pen, from, until, width, height, colours) {
    pen.fillStyle = colours.grid;
    for (let at = Math.ceil(from / 5000) * 5000; at < until; at += 5000) {
      pen.fillRect(Math.round((at - from) / (until - from) * width), 0, 1, height);
    }
  }

  #bounds(first, end) {
    let low = Infinity, high = -Infinity;
    for (let i = first; i < end; i++) {
      const value = this.samples.values[i];
      if (value < low) low = value;
      if (value > high) high = value;
    }
    const {min, max} = this.parameter;
    if (max > min && low >= min && high <= max && high - low > (max - min) / 8) [low, high] = [min, max];
    if (!(high > low)) [low, high] = [low - 1, low + 1];
    return [low, high];
  }

  #line(pen, from, until, width, height, ratio, colours) {
    const first = Math.max(this.samples.begin, this.samples.from(from) - 1), end = this.samples.end;
    if (first >= end) return;
    const [low, high] = this.#bounds(first, end);
    const y = (value) => height - 2 - (value - low) / (high - low) * (height - 4);
    pen.strokeStyle = colours.trace;
    pen.lineWidth = 1.25 * ratio;
    pen.lineJoin = "round";
    pen.beginPath();
    let column = null, top = 0, bottom = 0, last = 0, joined = false;
    const flush = () => {
      if (column === null) return;
      if (joined) pen.lineTo(column, y(top)); else pen.moveTo(column, y(top));
      if (bottom !== top) pen.lineTo(column, y(bottom));
      if (last !== bottom) pen.lineTo(column, y(last));
      joined = true;
    };
    for (let i = first; i < end; i++) {
      const value = this.samples.values[i];
      const x = Math.round((this.samples.times[i] - from) / (until - from) * width);
      if (Number.isNaN(value)) {
        flush();
        column = null;
        joined = false;
      } else if (x === column) {
        if (value > top) top = value;
        if (value < bottom) bottom = value;
        last = value;
      } else {
        flush();
        column = x;
        top = bottom = last = value;
      }
    }
    flush();
    pen.stroke();
  }

  #words(pen, from, until, width, height, ratio, colours) {
    const first = Math.max(this.samples.begin, this.samples.from(from) - 1), end = this.samples.end;
    const {times, values} = this.samples;
    pen.font = `${12 * ratio}px system-ui, sans-serif`;
    pen.textBaseline = "middle";
    for (let i = first; i < end;) {
      let next = i + 1;
      while (next < end && values[next] === values[i]) next += 1;
      const x = Math.max(0, (times[i] - from) / (until - from) * width);
      const to = next < end ? (times[next] - from) / (until - from) * width : width;
      const text = this.texts[values[i]] ?? "";
      pen.fillStyle = colours.trace;
      pen.globalAlpha = 0.12 + 0.1 * (values[i] % 5);
      pen.fillRect(x, height * 0.2, Math.max(1, to - x - ratio), height * 0.6);
      pen.globalAlpha = 1;
      if (pen.measureText(text).width + 6 * ratio < to - x) {
        pen.fillStyle = colours.ink;
        pen.fillText(text, x + 3 * ratio, height / 2);
      }
      i = next;
    }
  }
}

/** Return the colours that the style sheet has at the moment. */
export function colours() {
  const style = getComputedStyle(document.documentElement);
  const of = (name) => style.getPropertyValue(`--${name}`).trim();
  return {trace: of("trace"), grid: of("grid"), ink: of("ink")};
}

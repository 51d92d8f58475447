// A strip chart on canvas: some seconds of one parameter, drawn as the highest and lowest value of every pixel.

import {Samples} from "/pages/samples.js";
import {written} from "/pages/writing.js";

const AXIS = 14; // pixels below the trace, for times
const MOST_TEXTS = 1_000;
const FONT = "10px system-ui, sans-serif";

/** One chart: a card with a name, the current value and a canvas. */
export class Chart {
  constructor(parameter) {
    this.samples = new Samples();
    this.texts = [];
    this.numbers = new Map(); // of texts
    this.card = document.createElement("section");
    this.card.className = "card chart";
    this.card.innerHTML = '<div class="top"><h2 class="name"></h2><span class="faint what"></span>' +
      '<span class="number now">–</span><span class="faint unit"></span></div><canvas role="img"></canvas>';
    this.now = this.card.querySelector(".now");
    this.canvas = this.card.querySelector("canvas");
    this.seen = false;
    this.parameter = {};
    this.describe(parameter);
  }

  /** Take what is known of the parameter: its name, unit, format and limits. */
  describe(more) {
    this.parameter = {...this.parameter, ...more};
    const {id, name, unit, format, description, min, max, warn_min: low, warn_max: high} = this.parameter;
    const say = (value) => written(value, format);
    const limits = max > min ? `${say(min)} to ${say(max)} ${unit || ""}`.trim() : "";
    const warns = high > low && (low > min || high < max) ? `warns outside ${say(low)} to ${say(high)}` : "";
    this.card.querySelector(".name").textContent = name;
    this.card.querySelector(".what").textContent = description || "";
    this.card.querySelector(".unit").textContent = unit || "";
    this.card.title = [description, id, limits, warns].filter(Boolean).join(" · ");
    this.canvas.setAttribute("aria-label", `Chart of ${this.card.title || name}`);
    this.text = [name, id, description, unit].join(" ").toLowerCase();
  }

  /** Add samples; texts are drawn by their numbers. */
  add(times, values) {
    if (Array.isArray(values)) values = Float64Array.from(values, (value) => this.#number(value));
    this.samples.add(times, values);
  }

  #number(value) {
    const text = value === null ? "" : Array.isArray(value) ? value.map((each) => written(each)).join(" ") : String(value);
    if (!this.numbers.has(text)) {
      if (this.texts.length >= MOST_TEXTS) {
        [this.samples, this.texts] = [new Samples(), []];
        this.numbers.clear();
      }
      this.numbers.set(text, this.texts.length);
      this.texts.push(text);
    }
    return this.numbers.get(text);
  }

  /** Draw a stretch of time, with marks of what happened in it. */
  draw(shown, marks, colours) {
    this.#say(shown.cursor);
    const ratio = window.devicePixelRatio || 1;
    const width = this.canvas.clientWidth, height = this.canvas.clientHeight;
    if (!width || !height) return;
    if (this.canvas.width !== Math.round(width * ratio) || this.canvas.height !== Math.round(height * ratio)) {
      this.canvas.width = Math.round(width * ratio);
      this.canvas.height = Math.round(height * ratio);
    }
    const pen = this.canvas.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, width, height);
    pen.font = FONT;
    const first = Math.max(this.samples.begin, this.samples.from(shown.from) - 1);
    const end = Math.max(first, this.samples.from(shown.until));
    const place = {
      pen, colours, width, height: height - AXIS, first, end: Math.min(this.samples.end, end + 1),
      x: (time) => (time - shown.from) / (shown.until - shown.from) * width,
    };
    this.#grid(place, shown.ticks(width), height);
    this.#marks(place, marks, shown);
    if (this.texts.length) this.#words(place);
    else this.#line(place);
    if (shown.cursor !== null) {
      pen.fillStyle = colours.ink;
      pen.fillRect(Math.round(place.x(shown.cursor)), 0, 1, place.height);
    }
  }

  #say(cursor) {
    const value = cursor === null ? this.samples.last : this.samples.at(cursor);
    const {warn_min: low, warn_max: high, format} = this.parameter;
    const worded = this.texts.length > 0;
    const over = !worded && high > low && (value > high ? "↑ " : value < low ? "↓ " : "");
    this.now.textContent = (over || "") + (worded ? this.texts[value] ?? "–" : written(value, format));
    this.card.classList.toggle("over", Boolean(over));
  }

  #grid({pen, colours, x, width, height}, ticks, bottom) {
    pen.textBaseline = "alphabetic";
    pen.textAlign = "center";
    for (const {at, label} of ticks) {
      pen.fillStyle = colours.grid;
      pen.fillRect(Math.round(x(at)), 0, 1, height);
      pen.fillStyle = colours.faint;
      const half = pen.measureText(label).width / 2;
      if (x(at) >= half && x(at) + half <= width) pen.fillText(label, x(at), bottom - 2);
    }
    pen.textAlign = "left";
  }

  /** What is important goes through the whole chart, with its code; the rest is a tick at the foot. */
  #marks({pen, colours, x, height}, marks, shown) {
    for (const {at, priority, code} of marks) {
      if (at < shown.from || at > shown.until) continue;
      const important = priority === "high" || priority === "medium";
      pen.fillStyle = priority === "high" ? colours.bad : important ? colours.mark : colours.faint;
      pen.fillRect(Math.round(x(at)), important ? 0 : height - 4, 1, important ? height : 4);
      if (important && code) pen.fillText(code, Math.round(x(at)) + 3, 9);
    }
  }

  #bounds(first, end) {
    let low = Infinity, high = -Infinity;
    for (let i = first; i < end; i++) {
      const value = this.samples.values[i];
      if (value < low) low = value;
      if (value > high) high = value;
    }
    if (!(high >= low)) return null;
    const {min, max} = this.parameter;
    if (max > min && low >= min && high <= max && high - low > (max - min) / 8) [low, high] = [min, max];
    return high > low ? [low, high] : [low - 1, low + 1];
  }

  #line({pen, colours, width, height, first, end, x}) {
    const bounds = this.#bounds(first, end);
    if (!bounds) return;
    const [low, high] = bounds;
    const y = (value) => height - 2 - (value - low) / (high - low) * (height - 4);
    this.#warnings(pen, colours, width, height, bounds, y);
    pen.strokeStyle = colours.trace;
    pen.lineWidth = 1.25;
    pen.lineJoin = "round";
    pen.beginPath();
    let column = null, top = 0, bottom = 0, last = 0, joined = false;
    const flush = () => {
      if (column === null) return;
      if (joined) pen.lineTo(column, y(top)); else pen.moveTo(column, y(top));
      if (bottom !== top) pen.lineTo(column, y(bottom));
      else if (!joined) pen.lineTo(column + 0.5, y(top));
      if (last !== bottom) pen.lineTo(column, y(last));
      joined = true;
    };
    for (let i = first; i < end; i++) {
      const value = this.samples.values[i];
      const at = Math.round(x(this.samples.times[i]));
      if (Number.isNaN(value)) {
        flush();
        column = null;
        joined = false;
      } else if (at === column) {
        if (value > top) top = value;
        if (value < bottom) bottom = value;
        last = value;
      } else {
        flush();
        column = at;
        top = bottom = last = value;
      }
    }
    flush();
    pen.stroke();
    this.#label(pen, colours, written(high, this.parameter.format), 10);
    this.#label(pen, colours, written(low, this.parameter.format), height - 2);
  }

  /** The limits that it warns of, as far as they lie in the chart. */
  #warnings(pen, colours, width, height, [low, high], y) {
    const {warn_min: least, warn_max: most} = this.parameter;
    if (!(most > least)) return;
    pen.fillStyle = colours.warn;
    for (const [limit, edge] of [[least, height], [most, 0]]) {
      if (limit <= low || limit >= high) continue;
      pen.globalAlpha = 0.1;
      pen.fillRect(0, Math.min(y(limit), edge), width, Math.abs(edge - y(limit)));
      pen.globalAlpha = 0.8;
      for (let x = 0; x < width; x += 8) pen.fillRect(x, Math.round(y(limit)), 4, 1);
      pen.globalAlpha = 1;
    }
  }

  #label(pen, colours, text, y) {
    pen.globalAlpha = 0.75;
    pen.fillStyle = colours.card;
    pen.fillRect(0, y - 9, pen.measureText(text).width + 3, 11);
    pen.globalAlpha = 1;
    pen.fillStyle = colours.faint;
    pen.fillText(text, 0, y);
  }

  #words({pen, colours, width, height, first, end, x}) {
    const {times, values} = this.samples;
    pen.textBaseline = "middle";
    for (let i = first; i < end;) {
      let next = i + 1;
      while (next < end && values[next] === values[i]) next += 1;
      const left = Math.max(0, x(times[i]));
      const right = next < end ? Math.min(width, x(times[next])) : width;
      const text = this.texts[values[i]];
      if (text) {
        pen.fillStyle = colours.trace;
        pen.globalAlpha = 0.12 + 0.1 * (values[i] % 5);
        pen.fillRect(left, height * 0.2, Math.max(1, right - left - 1), height * 0.6);
        pen.globalAlpha = 1;
        pen.fillStyle = colours.ink;
        if (right - left > 10 && pen.measureText(text).width + 6 < right - left) pen.fillText(text, left + 3, height / 2);
      }
      i = next;
    }
  }
}

/** Return the colours that the style sheet has at the moment. */
export function colours() {
  const style = getComputedStyle(document.documentElement);
  const names = ["trace", "grid", "ink", "faint", "card", "warn", "bad", "mark"];
  return Object.fromEntries(names.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
}

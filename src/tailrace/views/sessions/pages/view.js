// The time window of all charts: it follows new samples, or stands still while a person looks at it.

import {clock} from "/pages/writing.js";

export const KEPT_MS = 130_000;

const STEPS_MS = [200, 500, 1_000, 2_000, 5_000, 10_000, 15_000, 30_000, 60_000];
const LABEL_PX = 62;

/** Invariant: while it follows, its end is near the newest sample; otherwise only the user moves it. */
export class View {
  /** `select` has the seconds that may be shown, `button` says whether it stands, `charts` is where it is pointed at. */
  constructor(select, button, charts) {
    this.select = select;
    this.button = button;
    this.edge = null;
    this.newest = null;
    this.zero = 0; // milliseconds since 1970 of time zero
    this.follows = true;
    this.pointed = null; // from 0, the left end, to 1
    button.addEventListener("click", () => this.follow(!this.follows));
    document.addEventListener("keydown", (event) => this.#key(event));
    charts.addEventListener("pointermove", (event) => this.#point(event));
    charts.addEventListener("pointerleave", () => { this.pointed = null; });
  }

  get span() {
    return 1000 * Number(this.select.value);
  }

  /** Return what is shown now: where it begins and ends, and the time that is pointed at, if one is. */
  shown() {
    const span = this.span, until = this.edge, from = until - span, written = new Map();
    const ticks = (width) => {
      if (!written.has(width)) written.set(width, this.#ticks(from, until, width));
      return written.get(width);
    };
    return {from, until, ticks, cursor: this.pointed === null ? null : from + this.pointed * span};
  }

  /** Go on for some milliseconds, or to the newest sample if nothing more comes. */
  advance(newest, elapsed, over) {
    this.newest = newest;
    if (!this.follows && this.edge !== null) return;
    // The right edge moves with the clock, and is pulled gently to where the newest sample is.
    const far = this.edge === null || Math.abs(this.edge - newest) > 2_000;
    const passed = Math.min(elapsed, 200); // a hidden page is not drawn
    this.edge = far || over ? newest : this.edge + passed + (newest - this.edge) * passed / 400;
  }

  /** Follow what comes, or stand still. */
  follow(yes) {
    this.follows = yes;
    this.button.textContent = yes ? "Pause" : "Go on";
  }

  /** Stand with a time in the middle. */
  show(time) {
    this.follow(false);
    this.edge = this.#within(time + this.span / 2);
  }

  move(ms) {
    if (this.newest === null) return;
    this.follow(false);
    this.edge = this.#within(this.edge + ms);
  }

  /** Show more (1) or less (-1) at once; what stands keeps its middle. */
  zoom(by) {
    const middle = this.edge - this.span / 2;
    const to = this.select.selectedIndex + by;
    if (to < 0 || to >= this.select.length) return;
    this.select.selectedIndex = to;
    this.select.dispatchEvent(new Event("change"));
    if (!this.follows) this.edge = this.#within(middle + this.span / 2);
  }

  /** Return the times to write under a chart of so many pixels. */
  #ticks(from, until, width) {
    const step = STEPS_MS.find((each) => each / (until - from) * width >= LABEL_PX) ?? STEPS_MS.at(-1);
    const found = [];
    for (let at = Math.ceil((from + this.zero) / step) * step - this.zero; at < until; at += step) {
      found.push({at, label: clock(Math.round(at + this.zero), step < 1_000 ? 1 : 0)});
    }
    return found;
  }

  #within(edge) {
    return Math.min(this.newest, Math.max(this.newest - KEPT_MS + this.span, edge));
  }

  #key(event) {
    if (event.ctrlKey || event.altKey || event.metaKey || event.target.closest("input, select, button, a, summary")) return;
    const acts = {
      " ": () => this.follow(!this.follows),
      ArrowLeft: () => this.move(-this.span / 4),
      ArrowRight: () => this.move(this.span / 4),
      End: () => this.follow(true),
      "+": () => this.zoom(-1),
      "-": () => this.zoom(1),
    };
    if (!acts[event.key]) return;
    event.preventDefault();
    acts[event.key]();
  }

  #point(event) {
    const canvas = event.target.closest("canvas");
    if (!canvas) {
      this.pointed = null;
      return;
    }
    const box = canvas.getBoundingClientRect();
    this.pointed = Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
    if (event.buttons & 1) this.move(-event.movementX / box.width * this.span);
  }
}

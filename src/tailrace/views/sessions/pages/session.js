// One live session: charts of the last seconds, current values, events; resumed after a lost connection.

import {Chart, colours} from "/pages/chart.js";
import {Choice} from "/pages/choice.js";
import {Events, rows} from "/pages/events.js";
import {readFrame} from "/pages/frames.js";
import {KEPT_MS, View} from "/pages/view.js";
import {clock, span} from "/pages/writing.js";

const PIXEL = "50ms"; // length of a cell of which the least and the greatest sample are sent
const SMOOTH_MS = 40, CALM_MS = 100; // between two drawings of a short and of a long window
const FIRST_WAIT_MS = 300;
const LONGEST_WAIT_MS = 8_000;
const FULL_PAST = 50; // parameters whose past is read completely; of more of them less is read
const SHORTEST_PAST_MS = 10_000;
const LOOK_MS = 2_000;
const SILENT_MS = 15_000; // silence after which the page asks for the session
const CLOSED = ["closed", "truncated", "failed"];

const identity = decodeURIComponent(location.pathname.replace(/^\/sessions\//, ""));
const address = `/v1/sessions/${encodeURIComponent(identity)}`;
const $ = (id) => document.getElementById(id);

const charts = new Map();
const parameters = new Map();
const view = new View($("window"), $("pause"), $("charts"));
const choice = new Choice($("filter"), $("window"), $("count"), () => [...charts.values()]);
const events = new Events($("events"), $("latest"), (at) => view.show(at));
const watched = new IntersectionObserver((entries) => {
  for (const entry of entries) entry.target.chart.seen = entry.isIntersecting;
}, {rootMargin: "80px"});
let json = {};
let range = null;
let link = "connecting";
let base = null; // first time seen, in nanoseconds; charts count milliseconds from it
let cursor = "";
let start = "-1m";
let newest = null;
let socket = null;
let heard = 0;
let drawn = 0;
let wait = FIRST_WAIT_MS;
let ended = false;
let known = false; // true if there is such a session
let complete = false; // true if its configuration is known
let shades = colours();
const counted = {frames: 0, samples: 0, gaps: 0, connections: 0}; // for tests of the page
window.counted = counted;

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { shades = colours(); });
$("note").querySelector("button").addEventListener("click", () => note(""));

/** Milliseconds since the base. A difference of two times fits into a number; a time does not. */
function since(time) {
  if (base === null) {
    base = time;
    view.zero = Number(base) / 1e6;
  }
  return Number(time - base) / 1e6;
}

function note(text) {
  $("note").firstElementChild.textContent = text;
  $("note").hidden = !text;
}

/** Show what is known: what an update leaves out, or calls unknown, stays. */
function showSession(update) {
  json = {...json, ...Object.fromEntries(Object.entries(update).filter(([, value]) => value !== null))};
  $("title").textContent = document.title = json.identifier || identity;
  $("state").textContent = json.state;
  $("state").className = `state ${json.state}`;
  rows($("details"), [["identity", identity], ...Object.entries(json.details ?? {}).map(([k, v]) => [k, said(v)])]);
}

function said(value) {
  return typeof value === "object" ? JSON.stringify(value) : String(value);
}

/** A range only grows; what comes from the past may have an older one. */
function showRange(told) {
  const [from, to] = told.map(BigInt);
  range = range ? [from < range[0] ? from : range[0], to > range[1] ? to : range[1]] : [from, to];
  $("range").textContent = span(...range);
}

function showLink() {
  $("link").textContent = linkText();
  $("link").className = link.startsWith("connecting") ? "lost" : "faint";
}

function linkText() {
  if (!view.follows && view.edge !== null) return `paused, at ${clock(view.zero + view.edge, 1)}; ${link}`;
  if (!["live", "catching up"].includes(link)) return link;
  if (newest === null) return known ? `${link}, and nothing came yet` : "waiting for the session";
  const behind = Math.max(0, Date.now() - view.zero - newest) / 1000;
  return behind < 60 || link !== "live" ? `${link}, ${behind.toFixed(1)} s behind the clock` : "live, and silent";
}

function chartOf(channel) {
  const key = `${channel.channel} ${channel.name}`;
  let chart = charts.get(key);
  if (!chart) {
    chart = new Chart({id: channel.name, name: channel.name, unit: channel.unit});
    chart.describe(parameters.get(channel.name) ?? {});
    chart.order = channel.channel;
    chart.card.chart = chart;
    charts.set(key, chart);
    const after = [...$("charts").children].find((card) => card.chart.order > chart.order);
    $("charts").insertBefore(chart.card, after ?? null);
    watched.observe(chart.card);
    choice.apply();
  }
  return chart;
}

function showFrame(frame) {
  if (frame.id) cursor = frame.id;
  if (frame.event) return showControl(frame);
  counted.frames += 1;
  if (frame.json) {
    showSession(frame.json);
    if (!known) describe();
  }
  if (frame.range) showRange(frame.range);
  for (const channel of frame.channels ?? []) {
    const times = Float64Array.from(channel.times, since);
    counted.samples += times.length;
    const chart = chartOf(channel);
    chart.add(times, channel.values);
    newest = times.reduce((a, b) => Math.max(a, b), newest ?? -Infinity);
    chart.samples.drop(newest - KEPT_MS);
  }
  if (frame.events?.length) events.add(frame.events, since);
  if (newest !== null) events.drop(newest - KEPT_MS);
}

function showControl(frame) {
  switch (frame.event) {
    case "gap":
    case "dropped":
      counted.gaps += 1;
      for (const chart of charts.values()) chart.samples.cut();
      note(`${frame.event === "gap" ? "A part is missing" : "This page was too slow: a part was left out"} ` +
        `(${frame.reason}), from ${entry(frame.from)} to ${entry(frame.to)}. ${counted.gaps} in all.`);
      break;
    case "caught-up":
      link = "live";
      break;
    case "life":
      note("The session was opened again under the same name.");
      describe();
      break;
    case "end":
      ended = true;
      link = `over: ${frame.reason}`;
      break;
    case "problem":
      note(frame.detail ?? frame.title ?? "The service has a problem.");
  }
}

/** Ids of entries begin with the time at which they were written; those of records in Kafka do not. */
function entry(id) {
  const found = /^(\d{12,14})-/.exec(id);
  return found ? clock(Number(found[1]), 1) : id === "0-0" ? "the start" : id;
}

function connect() {
  const query = new URLSearchParams({pixel: PIXEL, ...(cursor ? {after: cursor} : {from: start})});
  socket = new WebSocket(`${location.origin.replace(/^http/, "ws")}${address}/live?${query}`);
  socket.binaryType = "arraybuffer";
  socket.onopen = () => {
    counted.connections += 1;
    wait = FIRST_WAIT_MS;
    link = "catching up";
    heard = Date.now();
  };
  socket.onmessage = (message) => {
    heard = Date.now();
    showFrame(typeof message.data === "string" ? JSON.parse(message.data) : readFrame(message.data));
  };
  socket.onclose = (closed) => {
    if (ended) return;
    link = `connecting again${closed.reason ? ` (${closed.reason})` : ""}`;
    setTimeout(connect, wait);
    wait = Math.min(2 * wait, LONGEST_WAIT_MS);
  };
}

function draw(now) {
  requestAnimationFrame(draw);
  const pause = Math.min(CALM_MS, Math.max(SMOOTH_MS, view.span / 300)); // about the time of a pixel
  if (now - drawn < pause || newest === null) return;
  view.advance(newest, now - drawn, ended);
  drawn = now;
  const shown = view.shown();
  for (const chart of charts.values()) if (chart.seen) chart.draw(shown, events.marks, shades);
}

/** Ask what the session and its parameters are. Returns what the service says; nothing if it does not answer. */
async function describe() {
  let answer, told;
  try {
    answer = await fetch(address);
    told = await answer.json();
  } catch {
    return; // the connection says so
  }
  if (!answer.ok) {
    if (!known) note(told.detail ?? answer.statusText);
    return;
  }
  if (!known) note("");
  [known, complete] = [true, told.complete];
  showSession({...told.json, state: told.state});
  for (const channel of told.channels ?? []) {
    for (const parameter of channel.parameters ?? []) parameters.set(parameter.id, parameter);
  }
  for (const chart of charts.values()) chart.describe(parameters.get(chart.parameter.id) ?? {});
  if (told.range) {
    showRange(told.range);
    const past = Math.max(SHORTEST_PAST_MS, KEPT_MS * Math.min(1, FULL_PAST / parameters.size));
    start = String(BigInt(told.range[1]) - BigInt(Math.round(past)) * 1_000_000n); // also of a session that is over
  }
  return told;
}

/** See whether a session that is over began again, and whether a connection that is silent is one. */
async function look() {
  setTimeout(look, LOOK_MS);
  const silent = ["live", "catching up"].includes(link) && Date.now() - heard > SILENT_MS;
  if (!ended && !silent && (complete || !known)) return;
  const told = await describe();
  if (!told) return;
  if (ended && !CLOSED.includes(told.state)) {
    ended = false;
    connect();
  } else if (silent && Date.now() - heard > SILENT_MS && told.range && since(BigInt(told.range[1])) > newest + SILENT_MS) {
    socket.close();
  }
}

requestAnimationFrame(draw);
setInterval(showLink, 250);
setTimeout(look, LOOK_MS);
await describe();
connect();

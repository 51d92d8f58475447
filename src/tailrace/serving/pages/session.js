// One session while it goes on: charts of the last seconds, current values, events; resumed where it was cut off.

import {Chart, colours} from "/pages/charts.js";
import {readFrame} from "/pages/frames.js";

const KEPT_MS = 65_000;
const PIXEL = "50ms"; // of so long a time the least and the greatest sample are sent
const FRAME_MS = 40;
const FIRST_WAIT_MS = 300;
const LONGEST_WAIT_MS = 8_000;
const SHOWN_EVENTS = 200;

const identity = decodeURIComponent(location.pathname.replace(/^\/sessions\//, ""));
const address = `/v1/sessions/${encodeURIComponent(identity)}`;
const $ = (id) => document.getElementById(id);

const charts = new Map();
const latest = new Map();
const parameters = new Map();
let json = {};
let range = null;
let link = "connecting";
let base = null; // the first time that was seen, in nanoseconds: what is shown is counted from it, in milliseconds
let cursor = "";
let start = "-1m";
let newest = null;
let edge = null;
let drawn = 0;
let wait = FIRST_WAIT_MS;
let ended = false;
let missing = false; // whether the note says that there is no session
let shades = colours();
const counted = {frames: 0, samples: 0, gaps: 0, connections: 0}; // for whoever looks at the page from outside
window.counted = counted;

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { shades = colours(); });

/** Milliseconds since the base. A difference of two times fits into a number; a time does not. */
function since(time) {
  base ??= time;
  return Number(time - base) / 1e6;
}

function clock(time) {
  const date = new Date(Number(time / 1_000_000n));
  return `${date.toLocaleTimeString([], {hour12: false})}.${String(date.getMilliseconds()).padStart(3, "0")}`;
}

function span(start, end) {
  const tenths = Number((end - start) / 100_000_000n);
  return `${Math.floor(tenths / 600)}:${((tenths % 600) / 10).toFixed(1).padStart(4, "0")}`;
}

function note(text) {
  $("note").textContent = text;
  $("note").hidden = !text;
}

function rows(list, pairs) {
  list.replaceChildren(...pairs.flatMap(([name, value]) => {
    const term = document.createElement("dt"), said = document.createElement("dd");
    [term.textContent, said.textContent] = [name, value];
    return [term, said];
  }));
}

/** Show what is known: what an update leaves out, or calls unknown, stays. */
function showSession(update) {
  json = {...json, ...Object.fromEntries(Object.entries(update).filter(([, value]) => value !== null))};
  $("title").textContent = document.title = json.identifier || identity;
  $("state").textContent = json.state;
  $("state").className = `state ${json.state}`;
  rows($("details"), [["identity", identity], ...Object.entries(json.details ?? {}).map(([k, v]) => [k, String(v)])]);
}

/** A range only grows; what comes from the past may have an older one. */
function showRange(told) {
  const [from, to] = told.map(BigInt);
  range = range ? [from < range[0] ? from : range[0], to > range[1] ? to : range[1]] : [from, to];
  $("range").textContent = span(...range);
}

function showLink() {
  if (link !== "live" || newest === null) {
    $("link").textContent = link;
    return;
  }
  const behind = Math.max(0, Date.now() - Number(base / 1_000_000n) - newest) / 1000;
  $("link").textContent = behind < 60 ? `live, ${behind.toFixed(1)} s behind the clock` : "live, and silent";
}

function showEvent(event) {
  const kind = event.description || event.code || `${event.app} ${event.id}`;
  const said = event.text || (event.values ?? []).join(" ");
  latest.set(kind, said);
  const item = document.createElement("li"), at = document.createElement("span"), text = document.createElement("span");
  item.className = event.priority ?? "";
  at.className = "faint number";
  [at.textContent, text.textContent] = [clock(BigInt(event.time)), said || kind];
  item.append(at, text);
  $("events").prepend(item);
  while ($("events").childElementCount > SHOWN_EVENTS) $("events").lastElementChild.remove();
}

function chartOf(channel) {
  const key = `${channel.channel} ${channel.name}`;
  let chart = charts.get(key);
  if (!chart) {
    chart = new Chart({id: channel.name, name: channel.name, unit: channel.unit});
    chart.describe(parameters.get(channel.name) ?? {});
    chart.order = channel.channel;
    charts.set(key, chart);
    const after = [...$("charts").children].find((card) => card.chart.order > chart.order);
    chart.card.chart = chart;
    $("charts").insertBefore(chart.card, after ?? null);
  }
  return chart;
}

function showFrame(frame) {
  if (frame.id) cursor = frame.id;
  if (frame.event) return showControl(frame);
  counted.frames += 1;
  if (frame.json) {
    showSession(frame.json);
    if (!parameters.size) describe();
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
  for (const event of frame.events ?? []) showEvent(event);
  if (frame.events?.length) rows($("latest"), [...latest]);
}

function showControl(frame) {
  switch (frame.event) {
    case "gap":
    case "dropped":
      counted.gaps += 1;
      note(`${frame.event === "gap" ? "A part is missing" : "This page was too slow: a part was left out"} ` +
        `(${frame.reason}), from ${frame.from} to ${frame.to}. ${counted.gaps} in all.`);
      break;
    case "life":
      note("The session was opened again under the same name.");
      break;
    case "end":
      ended = true;
      link = `over: ${frame.reason}`;
      break;
    case "problem":
      note(frame.detail ?? frame.title ?? "The service has a problem.");
  }
}

function connect() {
  const query = new URLSearchParams({pixel: PIXEL, ...(cursor ? {after: cursor} : {from: start})});
  const socket = new WebSocket(`${location.origin.replace(/^http/, "ws")}${address}/live?${query}`);
  socket.binaryType = "arraybuffer";
  socket.onopen = () => {
    counted.connections += 1;
    wait = FIRST_WAIT_MS;
    link = "live";
  };
  socket.onmessage = (message) => {
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
  if (now - drawn < FRAME_MS || newest === null) return;
  // The right edge moves with the clock, and is pulled gently to where the newest sample is.
  edge = edge === null || Math.abs(edge - newest) > 2_000 ? newest : edge + (now - drawn) + (newest - edge) * 0.1;
  if (ended) edge = newest;
  drawn = now;
  const from = edge - 1000 * Number($("window").value);
  for (const chart of charts.values()) {
    chart.draw(from, edge, shades);
  }
}

/** Ask what the session and its parameters are; say so if it is not there yet. */
async function describe() {
  try {
    const answer = await fetch(address);
    const told = await answer.json();
    if (!answer.ok) throw new Error(told.detail ?? answer.statusText);
    if (missing) note("");
    missing = false;
    showSession({...told.json, state: told.state});
    for (const channel of told.channels ?? []) {
      for (const parameter of channel.parameters ?? []) parameters.set(parameter.id, parameter);
    }
    for (const chart of charts.values()) chart.describe(parameters.get(chart.parameter.id) ?? {});
    if (told.range) {
      showRange(told.range);
      start = String(BigInt(told.range[1]) - BigInt(KEPT_MS) * 1_000_000n); // also of a session that is over
    }
  } catch (error) {
    missing = true;
    note(error.message);
  }
}

requestAnimationFrame(draw);
setInterval(showLink, 250);
await describe();
connect();

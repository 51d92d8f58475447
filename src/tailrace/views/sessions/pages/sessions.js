// The list of sessions, reloaded every two seconds. Rows are reused, so that focus and selection stay.

import {ago, moment, span} from "/pages/writing.js";

const EVERY_MS = 2_000;
const MOST = 500;
const $ = (id) => document.getElementById(id);
const shown = new Map();
let sessions = [];
let asked = 0;

/** Set a text only if it is another one. */
function set(element, text, name) {
  if (element.textContent !== text) element.textContent = text;
  if (name !== undefined && element.className !== name) element.className = name;
}

function made(session) {
  const row = document.createElement("tr"), link = document.createElement("a");
  link.href = `/sessions/${encodeURIComponent(session.identity)}`;
  for (const name of ["", "", "number", "number", "number", "faint"]) {
    const inside = document.createElement("span");
    inside.className = name;
    row.insertCell().append(inside);
  }
  row.cells[0].replaceChildren(link, document.createElement("small"));
  return row;
}

function fill(row, session) {
  const json = session.json ?? {}, name = json.identifier || session.identity;
  const [link, identity] = row.cells[0].children;
  const [, state, opened, lasts, updated, details] = [...row.cells].map((cell) => cell.firstElementChild);
  set(link, name);
  set(identity, name === session.identity ? "" : session.identity, "faint");
  set(state, session.state, `state ${session.state}`);
  set(opened, json.timestamp ? moment(Date.parse(json.timestamp)) : "");
  set(lasts, session.range ? span(...session.range) : "");
  set(updated, session.updated ? ago(Date.parse(session.updated)) : "");
  set(details, Object.entries(json.details ?? {}).map(([key, value]) =>
    `${key}: ${typeof value === "object" ? JSON.stringify(value) : value}`).join(" · "));
}

/** Those that are open come first, then those that were opened last. */
function order(a, b) {
  const opened = (session) => Date.parse(session.json?.timestamp) || 0;
  return (b.state === "open") - (a.state === "open") || opened(b) - opened(a) || (a.identity < b.identity ? -1 : 1);
}

function show() {
  const words = $("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
  const wanted = sessions.filter((session) => {
    const text = `${session.identity} ${JSON.stringify(session.json)}`.toLowerCase();
    return ["", session.state].includes($("states").value) && words.every((word) => text.includes(word));
  }).sort(order);
  const kept = new Set(wanted.map((session) => session.identity));
  for (const [identity, row] of shown) {
    if (kept.has(identity)) continue;
    row.remove();
    shown.delete(identity);
  }
  wanted.forEach((session, at) => {
    if (!shown.has(session.identity)) shown.set(session.identity, made(session));
    const row = shown.get(session.identity), there = $("rows").children[at];
    if (there !== row) $("rows").insertBefore(row, there ?? null);
    fill(row, session);
  });
  set($("count"), told(wanted.length));
}

function told(number) {
  if (!asked) return "";
  if (!sessions.length) return "There are none yet. The demo has some; docs/sessions.md says how to write them.";
  const all = sessions.length < MOST ? `${sessions.length}` : `the last ${MOST}`;
  return number < sessions.length ? `${number} of ${all}` : all;
}

async function look() {
  try {
    const answer = await fetch(`/v1/sessions?limit=${MOST}`);
    const body = await answer.json();
    if (!answer.ok) throw new Error(body.detail ?? answer.statusText);
    [sessions, asked] = [body.sessions, Date.now()];
    $("note").hidden = true;
    show();
  } catch (error) {
    const old = asked ? ` What is shown was so ${ago(asked)}.` : "";
    set($("note"), error instanceof TypeError ? `The service does not answer; trying again.${old}` : error.message);
    $("note").hidden = false;
  }
  setTimeout(look, EVERY_MS);
}

$("filter").addEventListener("input", show);
$("states").addEventListener("change", show);
look();

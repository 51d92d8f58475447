// The list of sessions, asked for again every two seconds.

const EVERY_MS = 2_000;
const $ = (id) => document.getElementById(id);

function ago(ms) {
  const seconds = Math.max(0, Math.round((Date.now() - ms) / 1000));
  if (seconds < 120) return `${seconds} s ago`;
  return seconds < 7200 ? `${Math.round(seconds / 60)} min ago` : `${Math.round(seconds / 3600)} h ago`;
}

function span(range) {
  if (!range) return "";
  const tenths = Number((BigInt(range[1]) - BigInt(range[0])) / 100_000_000n);
  return `${Math.floor(tenths / 600)}:${((tenths % 600) / 10).toFixed(1).padStart(4, "0")}`;
}

function cell(row, text, name = "") {
  const cell = row.insertCell();
  const inside = document.createElement("span");
  inside.className = name;
  inside.textContent = text;
  cell.append(inside);
  return cell;
}

function row(session) {
  const row = document.createElement("tr");
  const json = session.json ?? {};
  const link = document.createElement("a");
  link.href = `/sessions/${encodeURIComponent(session.identity)}`;
  link.textContent = json.identifier || session.identity;
  row.insertCell().append(link);
  cell(row, session.state, `state ${session.state}`);
  cell(row, json.timestamp ? new Date(json.timestamp).toLocaleTimeString([], {hour12: false}) : "", "number");
  cell(row, span(session.range), "number");
  cell(row, session.updated ? ago(Date.parse(session.updated)) : "", "number");
  cell(row, Object.entries(json.details ?? {}).map(([name, value]) => `${name}: ${value}`).join(" · "), "faint");
  return row;
}

async function look() {
  try {
    const answer = await fetch("/v1/sessions");
    const told = await answer.json();
    if (!answer.ok) throw new Error(told.detail ?? answer.statusText);
    $("rows").replaceChildren(...told.sessions.map(row));
    $("count").textContent = told.sessions.length ? "" : "There are none yet.";
    $("note").hidden = true;
  } catch (error) {
    $("note").textContent = error.message;
    $("note").hidden = false;
  }
  setTimeout(look, EVERY_MS);
}

look();

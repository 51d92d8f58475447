// Events: a list, the last of each kind, and marks for the charts.

import {clock} from "/pages/writing.js";

const SHOWN = 200;
const MARKS = 2_000;

/** Events of a session. `go` is called with the time of one that is chosen. */
export class Events {
  constructor(list, latest, go) {
    [this.list, this.latest, this.go] = [list, latest, go];
    this.kinds = new Map();
    this.marks = [];
  }

  /** Add events; `since` gives their times in milliseconds since the base. */
  add(events, since) {
    const items = events.map((event) => {
      const time = BigInt(event.time), at = since(time);
      const kind = event.description || event.code || `${event.app} ${event.id}`.trim();
      const said = event.text || (event.values ?? []).join(" ") || kind;
      this.kinds.set(kind, said);
      this.marks.push({at, priority: event.priority ?? "", code: event.code ?? ""});
      return this.#item(event.priority ?? "", clock(Number(time / 1_000_000n)), said, at);
    });
    this.list.prepend(...items.reverse().slice(0, SHOWN));
    while (this.list.childElementCount > SHOWN) this.list.lastElementChild.remove();
    rows(this.latest, [...this.kinds]);
  }

  /** Forget marks before a time. */
  drop(before) {
    if (this.marks.length > MARKS || this.marks[0]?.at < before) {
      this.marks = this.marks.filter((mark) => mark.at >= before).slice(-MARKS);
    }
  }

  #item(priority, time, text, at) {
    const item = document.createElement("li"), button = document.createElement("button");
    const when = document.createElement("span"), said = document.createElement("span");
    item.className = priority;
    when.className = "faint number";
    button.type = "button";
    button.title = "Show this time";
    button.addEventListener("click", () => this.go(at));
    [when.textContent, said.textContent] = [time, text];
    button.append(when, said);
    item.append(button);
    return item;
  }
}

/** Fill a list of names and what they say. */
export function rows(list, pairs) {
  list.replaceChildren(...pairs.flatMap(([name, value]) => {
    const term = document.createElement("dt"), said = document.createElement("dd");
    [term.textContent, said.textContent] = [name, value];
    return [term, said];
  }));
}

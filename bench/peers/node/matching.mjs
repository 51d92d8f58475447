// Matching with sift and with mingo: every query is asked about every event, one after the other.
//
// It reads a task from a file and prints one line of figures; both are as bench/peers/matching.py says, and so is how
// passes are made (bench/rounds.py). Both compile a query once, and keep no index over many.
//
// What they cannot do: their regexes are JavaScript's, which some patterns keep busy for ever; numbers are doubles. sift
// compares values of different types as JavaScript does, and has no $expr and no $bits….

import { readFileSync } from "node:fs";
import { Query } from "mingo";
import sift from "sift";

const ROUNDS = 3;

const ready = {
  sift: (query) => sift(query),
  mingo: (query) => {
    const asked = new Query(query);
    return (document) => asked.test(document);
  },
};

function once(match, events) {
  const cpu = process.cpuUsage();
  const began = performance.now();
  let matched = 0;
  for (const event of events) matched += match(event);
  const seconds = (performance.now() - began) / 1e3;
  const used = process.cpuUsage(cpu);
  return { matched, seconds, cpu: (used.user + used.system) / 1e6 };
}

function best(match, events, seconds) {
  let chosen = events.slice(0, 1);
  const taken = () => once(match, chosen).seconds;
  while (chosen.length < events.length && Math.min(taken(), taken()) < seconds / 8) {
    chosen = events.slice(0, 2 * chosen.length);
  }
  const passes = [];
  const until = performance.now() + seconds * 750;
  while (performance.now() < until || passes.length < ROUNDS) {
    passes.push(once(match, chosen));
    if (passes.at(-1).seconds > seconds) break;
  }
  return {
    events: chosen.length,
    matched: passes[0].matched,
    rate: chosen.length / Math.min(...passes.map((pass) => pass.seconds)),
    cpu: Math.min(...passes.map((pass) => pass.cpu)) / chosen.length,
  };
}

const task = JSON.parse(readFileSync(process.argv[2], "utf8"));
const began = performance.now();
const asked = task.queries.map(ready[task.engine]);
const build = (performance.now() - began) / 1e3;
const count = (document) => {
  let found = 0;
  for (const matches of asked) if (matches(document)) found += 1;
  return found;
};
const match = asked.length === 1 ? (document) => (asked[0](document) ? 1 : 0) : count;
const plain = best(match, task.events.map((event) => JSON.parse(event)), task.seconds);
const decoded = best((event) => match(JSON.parse(event)), task.events, task.seconds);
console.log(JSON.stringify({ build, plain, decoded }));

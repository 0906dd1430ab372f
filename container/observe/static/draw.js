// Shapes and words of the page: numbers in, text out. Touches neither the document nor the network.

export const SECONDS = 300; // what a chart shows, a unit of its width each
export const HEIGHT = 100; // of a chart
const WINDOW = 30; // seconds to a line of the table
const HEAT_SECONDS = [5, 30, 120, 600]; // since the last use; after the last of them a model is cold
const LETTER = 7.4; // pixels
const NOTHING = "\u2013";
const SPACE = "\u00a0"; // between a number and its unit
const STEPS = [1, 2, 3, 4, 5, 6, 8]; // of a chart's top, times a power of ten
const UNITS = ["B", "kB", "MB", "GB", "TB"];

export const CHARTS = [
  { key: "requests", title: "Requests", unit: "a second", series: [["succeeded", "answered"], ["failed", "failed"]] },
  { key: "latency", title: "Latency", unit: "ms, mean", series: [["compute_ms", "executing"], ["queue_ms", "in the queue"]] },
  { key: "cache", title: "Model cache", unit: "requests a second", series: [["hits", "hits"], ["misses", "misses"]] },
  { key: "waiting", title: "Waiting requests", unit: "", series: [["queued", "in a queue"], ["cold", "for their model"]] },
];

const sum = (values) => values.reduce((total, value) => total + (value ?? 0), 0);
const percent = (part, whole) => Math.round((100000 * part) / whole) / 1000;
export const count = (number) => number.toLocaleString("en-US");
const counted = (number, what) => `${count(number)} ${what}${number === 1 ? "" : "s"}`;
export const short = (name) => name.replace(/\.tar\.gz$/, "");

// ---- numbers for people

// Bytes: three digits that matter, powers of 1000.
export function size(number) {
  let [value, unit] = [number, 0];
  while (value >= 999.5 && unit < UNITS.length - 1) [value, unit] = [value / 1000, unit + 1];
  return `${value.toFixed(unit === 0 || value >= 99.95 ? 0 : value >= 9.995 ? 1 : 2)}${SPACE}${UNITS[unit]}`;
}

function whole(seconds) {
  for (const [unit, length, most] of [["s", 1, 120], ["min", 60, 120], ["h", 3600, 48]]) {
    if (seconds < length * most) return `${(seconds / length).toFixed(0)}${SPACE}${unit}`;
  }
  return `${(seconds / 86400).toFixed(0)}${SPACE}d`;
}

// How long something takes.
export function span(seconds) {
  if (seconds < 0.9995) return `${(seconds * 1000).toFixed(0)}${SPACE}ms`;
  return seconds < 9.95 ? `${seconds.toFixed(1)}${SPACE}s` : whole(seconds);
}

// How long ago something was; what is older is told less exactly.
export function ago(seconds) {
  if (seconds === null) return "never";
  return seconds < 1 ? "now" : `${whole(Math.floor(seconds))} ago`;
}

// How recently a model was used: 0 is hot, 4 is cold, and is evicted first.
export function heat(idle) {
  return idle === null ? HEAT_SECONDS.length : HEAT_SECONDS.filter((limit) => idle > limit).length;
}

// As much of a name as has room in so many pixels.
export function label(name, pixels) {
  const letters = Math.floor((pixels - 12) / LETTER);
  const text = short(name);
  if (text.length <= letters) return text;
  return letters > 3 ? `${text.slice(0, letters - 1)}\u2026` : "";
}

// ---- memory and models

export const place = (kind) => (kind === "host" ? "the host" : `GPU ${kind.slice(3)}`);

// The pieces of a budget's bar, from left to right: models, the rest, executions, and what loads were promised.
export function segments(memory) {
  const all = Math.max(memory.budget, memory.held + memory.uncharged + memory.reserved);
  const pieces = memory.bars.map((bar) => ({ ...bar, kind: "model" }));
  if (memory.rest.models) pieces.push({ kind: "rest", name: `${memory.rest.models} more`, bytes: memory.rest.bytes });
  if (memory.uncharged) pieces.push({ kind: "rest", name: "executions", bytes: memory.uncharged });
  if (memory.reserved) pieces.push({ kind: "reserved", name: "loading", bytes: memory.reserved });
  let at = 0;
  for (const piece of pieces) {
    Object.assign(piece, { x: percent(at, all), width: percent(piece.bytes, all) });
    at += piece.bytes;
  }
  return pieces;
}

// A budget in words.
export function held(memory) {
  const parts = { grown: "of it taken by executions", reserved: "promised to loads", in_flight: "of requests and responses on the way" };
  const more = Object.keys(parts).filter((key) => memory[key]).map((key) => `, ${size(memory[key])} ${parts[key]}`);
  return `${size(memory.held + memory.uncharged)} of ${size(memory.budget)} held by models${more.join("")}`;
}

// The budget of unpacked archives in words.
export function onDisk(disk) {
  const taken = `${size(disk.used)} of ${size(disk.budget)}, ${size(disk.archives)} of it by unpacked archives`;
  return `${taken}; ${counted(disk.evictions, "archive")} left for others`;
}

export const resident = (counts) => `${count(counts.resident)} of ${counted(counts.known, "model")}`;
export const failed = (counts) => (counts.failed ? `${count(counts.failed)} failed` : "");
export const matching = (counts, filter) => `${filter ? `${count(counts.matching)} of ` : ""}${count(counts.known)}`;

// The models without a row.
export function rest(others) {
  if (!others.models) return "";
  const taken = others.host + others.device;
  return `and ${counted(others.models, "model")} more${taken ? `, ${size(taken)} in all` : ""}`;
}

// Models with what their rows say; the largest has the longest bar, of the kind of memory that it takes more of.
export function rows(models, memory) {
  const shareOf = (model) => Math.max(0, ...memory.map(({ kind, budget }) => (model.held[kind] ?? 0) / budget));
  const largest = Math.max(0, ...models.map(shareOf)) || 1;
  return models.map((model) => {
    const parts = Object.entries(model.held).map(([kind, bytes]) => size(bytes) + (kind === "host" ? "" : ` on ${place(kind)}`));
    return { ...model, share: percent(shareOf(model), largest), memory: parts.join(" + ") || NOTHING, note: note(model) };
  });
}

// Below the name: why a model is not in memory, or what is not usual about one that is.
function note(model) {
  if (!model.versions.length) return model.reason;
  const unusual = model.pinned ? ["pinned"] : [];
  if (String(model.versions) !== "1") unusual.push(`version${model.versions.length === 1 ? "" : "s"} ${model.versions.join(", ")}`);
  return [...unusual, ...(model.reason ? [model.reason] : [])].join(", ");
}

// How far a load is, behind its model's name.
export function underWay(load) {
  return `for ${span(load.seconds)}${load.waiting ? `, ${counted(load.waiting, "request")} waiting` : ""}`;
}

// What happened to a model, behind its name.
export function happened(event) {
  const taken = [["host", ""], ["device", " of device memory"]].filter(([kind]) => event[kind]).map(([kind, where]) => size(event[kind]) + where).join(" and ");
  if (event.deed === "loaded") {
    const download = event.download_seconds ? `, after ${span(event.download_seconds)} of download` : "";
    return `loaded in ${span(event.seconds)}${download}: ${taken}`;
  }
  if (event.deed === "evicted") return `evicted for ${short(event.why)}: ${taken}`;
  if (event.deed === "unloaded") return `${event.why}: ${taken}`;
  return `failed to load${event.times > 1 ? ` (${count(event.times)} times)` : ""}: ${event.why}`;
}

// ---- charts

// The top of a chart: a round number over its highest second.
export function ceiling(history, chart) {
  const [first, second] = chart.series.map(([column]) => history[column]);
  const highest = Math.max(0, ...first.map((value, index) => (value ?? 0) + (second[index] ?? 0)));
  for (let power = chart.key === "latency" ? -2 : 0; ; power++) {
    for (const step of STEPS) if (Number(`${step}e${power}`) >= highest) return Number(`${step}e${power}`);
  }
}

// The outline of the sum of columns, a step a second, the last one at the right edge.
export function area(history, columns, top) {
  const values = history[columns[0]].map((_, index) => sum(columns.map((column) => history[column][index])));
  if (!values.some(Boolean)) return "";
  const steps = values.map((value) => `V${Math.round(HEIGHT * 10 * (1 - value / top)) / 10}h1`);
  return `M${SECONDS - values.length} ${HEIGHT}${steps.join("")}V${HEIGHT}z`;
}

// A stroke at the upper edge for every second in which something happened.
export function marks(values) {
  return values.map((value, index) => (value ? `M${SECONDS - values.length + index}.5 0v7` : "")).join("");
}

// A chart in words: at a second, or how things are, or were in all where a single second says little.
export function reading(history, chart, index = null) {
  const at = (column) => history[column][index ?? history[column].length - 1];
  if (chart.key === "cache") {
    const [hits, misses] = index === null ? [sum(history.hits), sum(history.misses)] : [at("hits"), at("misses")];
    if (!(hits + misses)) return "no requests";
    return `${((100 * hits) / (hits + misses)).toFixed(1)} % hits: ${count(hits)} hits, ${count(misses)} missed`;
  }
  if (!history.queued.length) return "nothing yet";
  if (chart.key === "latency") {
    if (at("compute_ms") === null) return "no requests";
    return `${(at("queue_ms") + at("compute_ms")).toFixed(2)} ms, ${at("queue_ms").toFixed(2)} ms of it in the queue`;
  }
  return chart.series.map(([column, name]) => `${count(at(column))} ${name}`).join(", ");
}

// The same as a short table: a row for every WINDOW seconds, newest first; times are means over requests.
export function windows(history) {
  const found = [];
  for (let end = history.hits.length; end > 0; end -= WINDOW) {
    const start = Math.max(end - WINDOW, 0);
    const part = Object.fromEntries(Object.entries(history).map(([name, values]) => [name, values.slice(start, end)]));
    const answered = sum(part.succeeded);
    const spent = sum(part.succeeded.map((times, index) => times * ((part.queue_ms[index] ?? 0) + (part.compute_ms[index] ?? 0))));
    const waiting = Math.max(...part.queued.map((queued, index) => queued + part.cold[index]));
    found.push([
      `${history.hits.length - start}${NOTHING}${history.hits.length - end}`,
      count(answered + sum(part.failed)),
      count(sum(part.failed)),
      answered ? (spent / answered).toFixed(2) : NOTHING,
      ...[sum(part.hits), sum(part.misses), waiting, sum(part.evictions)].map(count),
    ]);
  }
  return found;
}

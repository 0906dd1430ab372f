// Asks for the page's data once a second and fills the elements that the server wrote. Knows no address but that one.
// Whatever comes from outside (names of models, errors) becomes text and attributes, never markup.
// Shapes and words are those of drawing.py, so that nothing jumps when the first data come.
"use strict";

(() => {
  const SOURCE = document.currentScript.dataset.source;
  const EVERY = 1000; // milliseconds
  const HEIGHT = 100;
  const SECONDS = 300;
  const SPACE = "\u00a0"; // between a number and its unit
  const STEPS = [1, 2, 3, 4, 5, 6, 8]; // of a chart's top, times a power of ten
  const LETTER = 7.4; // pixels
  const HEAT = [5, 30, 120, 600];
  const byId = (id) => document.getElementById(id);
  const field = (parent, name) => parent.querySelector(`[data-field="${name}"]`);
  const count = (number) => number.toLocaleString("en-US");
  const counted = (number, what) => `${count(number)} ${what}${number === 1 ? "" : "s"}`;
  let view = null; // the data shown last
  let cursor = null; // seconds ago that the pointer is at, in every chart at once

  // ---- words

  const rounded = (number, digits) => Math.floor(number * 10 ** digits + 0.5) / 10 ** digits;
  const fixed = (number, digits = 0) => rounded(number, digits).toFixed(digits);

  function size(number) {
    const units = ["B", "kB", "MB", "GB", "TB"];
    let unit = 0;
    for (; number >= 999.5 && unit < units.length - 1; unit++) number /= 1000;
    return `${fixed(number, unit === 0 || number >= 99.95 ? 0 : number >= 9.995 ? 1 : 2)}${SPACE}${units[unit]}`;
  }

  const percent = (part, all) => `${rounded((100 * part) / all, 3)}%`;

  function whole(seconds) {
    for (const [unit, length, most] of [["s", 1, 120], ["min", 60, 120], ["h", 3600, 48]]) {
      if (seconds < length * most) return `${fixed(seconds / length)}${SPACE}${unit}`;
    }
    return `${fixed(seconds / 86400)}${SPACE}d`;
  }

  function span(seconds) {
    if (seconds < 0.9995) return `${fixed(seconds * 1000)}${SPACE}ms`;
    return seconds < 9.95 ? `${fixed(seconds, 1)}${SPACE}s` : whole(seconds);
  }

  function ago(seconds) {
    if (seconds === null) return "never";
    return seconds < 1 ? "now" : `${whole(Math.floor(seconds))} ago`;
  }

  const heat = (idle) => (idle === null ? HEAT.length : HEAT.filter((limit) => idle > limit).length);
  const short = (name) => name.replace(/\.tar\.gz$/, "");

  function label(name, pixels) {
    const letters = Math.floor((pixels - 12) / LETTER);
    const text = short(name);
    if (text.length <= letters) return text;
    return letters > 3 ? `${text.slice(0, letters - 1)}\u2026` : "";
  }

  function told(event) {
    const parts = [[event.host, ""], [event.device, " of device memory"]];
    const taken = parts.filter(([bytes]) => bytes).map(([bytes, where]) => size(bytes) + where).join(" and ");
    if (event.deed === "loaded") {
      const download = event.download_seconds ? `, after ${span(event.download_seconds)} of download` : "";
      return `loaded in ${span(event.seconds)}${download}: ${taken}`;
    }
    if (event.deed === "evicted") return `evicted for ${short(event.why)}: ${taken}`;
    if (event.deed === "unloaded") return `${event.why}: ${taken}`;
    return `failed to load${event.times > 1 ? ` (${count(event.times)} times)` : ""}: ${event.why}`;
  }

  function held(memory) {
    const loading = memory.reserved ? `, ${size(memory.reserved)} promised to loads` : "";
    return `${size(memory.held)} of ${size(memory.budget)} held by models${loading}`;
  }

  function onDisk(disk) {
    const taken = `${size(disk.used)} of ${size(disk.budget)}, ${size(disk.archives)} of it by unpacked archives`;
    return `${taken}; ${counted(disk.evictions, "archive")} left for others`;
  }

  // ---- elements

  function set(element, text) {
    if (element.textContent !== text) element.textContent = text;
  }

  function put(element, name, value) {
    if (element.getAttribute(name) !== String(value)) element.setAttribute(name, value);
  }

  // Make the keyed children of `parent` those of `items`, in their order, keeping elements whose key is there already.
  function reconcile(parent, template, items, key, fill) {
    const before = new Map([...parent.children].filter((each) => each.dataset.key).map((each) => [each.dataset.key, each]));
    let last = [...parent.children].filter((each) => !each.dataset.key).pop() || null;
    for (const item of items) {
      const name = key(item);
      let element = before.get(name);
      const fresh = element === undefined;
      if (fresh) {
        element = byId(template).content.querySelector("[data-key]").cloneNode(true);
        element.dataset.key = name;
      }
      before.delete(name);
      fill(element, item, fresh);
      const place = last ? last.nextElementSibling : parent.firstElementChild;
      if (place !== element) parent.insertBefore(element, place);
      last = element;
    }
    for (const gone of before.values()) gone.remove();
  }

  // ---- budgets

  function pieces(memory) {
    const all = memory.bars.map((bar) => ({ ...bar, kind: "model", look: `heat${heat(bar.idle)} ${bar.state.toLowerCase()}` }));
    if (memory.rest.models) all.push({ kind: "rest", name: `${memory.rest.models} more`, bytes: memory.rest.bytes });
    if (memory.reserved) all.push({ kind: "reserved", name: "loading", bytes: memory.reserved });
    return all;
  }

  function showMemory(memory) {
    const figure = document.querySelector(`[data-kind="${memory.kind}"]`);
    const bar = figure.querySelector(".bar");
    const pixels = bar.getBoundingClientRect().width;
    const all = Math.max(memory.budget, memory.held + memory.reserved);
    let at = 0;
    set(field(figure, "reading"), held(memory));
    put(bar, "aria-label", `${held(memory)}; the table below names the models`);
    reconcile(bar, "segment", pieces(memory), (piece) => `${piece.kind} ${piece.name}`, (svg, piece) => {
      put(svg, "class", `segment ${piece.kind} ${piece.look || ""}`.trim());
      put(svg, "x", percent(at, all));
      put(svg, "width", percent(piece.bytes, all));
      set(svg.querySelector("title"), `${piece.name}: ${size(piece.bytes)}`);
      set(svg.querySelector("text"), label(piece.name, (pixels * piece.bytes) / all));
      at += piece.bytes;
    });
  }

  // ---- charts

  function area(history, columns, top) {
    const length = history.queued.length;
    let path = `M${SECONDS - length} ${HEIGHT}`;
    let any = false;
    for (let index = 0; index < length; index++) {
      const value = columns.reduce((sum, column) => sum + (history[column][index] || 0), 0);
      any ||= value > 0;
      path += `V${rounded(HEIGHT - (HEIGHT * value) / top, 1)}h1`;
    }
    return any ? `${path}V${HEIGHT}z` : "";
  }

  function ceiling(history, columns, least) {
    const highest = Math.max(0, ...history.queued.map((_, index) => columns.reduce((sum, column) => sum + (history[column][index] || 0), 0)));
    for (let power = least; ; power++) {
      for (const step of STEPS) if (Number(`${step}e${power}`) >= highest) return Number(`${step}e${power}`);
    }
  }

  function reading(history, chart, index) {
    const at = (column) => history[column][index];
    const sum = (column) => (cursor === null ? history[column].reduce((whole, value) => whole + value, 0) : at(column));
    if (chart === "cache") {
      const [hits, misses] = [sum("hits"), sum("misses")];
      if (!(hits + misses)) return "no requests";
      return `${fixed((100 * hits) / (hits + misses), 1)} % hits: ${count(hits)} hits, ${count(misses)} missed`;
    }
    if (index < 0) return "nothing yet";
    if (chart === "latency") {
      if (at("compute_ms") === null) return "no requests";
      return `${fixed(at("queue_ms") + at("compute_ms"), 2)} ms, ${fixed(at("queue_ms"), 2)} ms of it in the queue`;
    }
    if (chart === "requests") return `${count(at("succeeded"))} answered, ${count(at("failed"))} failed`;
    return `${count(at("queued"))} in a queue, ${count(at("cold"))} for their model`;
  }

  function showCharts(history) {
    const length = history.queued.length;
    const index = cursor === null || cursor >= length ? length - 1 : length - 1 - cursor;
    for (const figure of document.querySelectorAll("[data-chart]")) {
      const chart = figure.dataset.chart;
      const columns = figure.dataset.columns.split(" ");
      const top = ceiling(history, columns, chart === "latency" ? -2 : 0);
      const words = reading(history, chart, index);
      put(field(figure, "both"), "d", area(history, columns, top));
      put(field(figure, "first"), "d", area(history, columns.slice(0, 1), top));
      set(field(figure, "top"), top.toLocaleString("en-US"));
      set(field(figure, "reading"), cursor === null ? words : `${cursor + 1} s ago: ${words}`);
      put(field(figure, "cursor"), "d", cursor === null ? "" : `M${SECONDS - cursor - 0.5} 0v${HEIGHT}`);
      const marks = field(figure, "evictions");
      if (marks) put(marks, "d", history.evictions.map((any, at) => (any ? `M${SECONDS - length + at}.5 0v7` : "")).join(""));
    }
  }

  function point(event) {
    const box = event.currentTarget.getBoundingClientRect();
    const second = Math.floor(((box.right - event.clientX) / box.width) * SECONDS);
    cursor = view && second >= 0 && second < view.history.queued.length ? second : null;
    if (view) showCharts(view.history);
  }

  function leave() {
    cursor = null;
    if (view) showCharts(view.history);
  }

  function showWindows(windows) {
    const cells = (each) => [
      `${each.from}–${each.to}`, count(each.requests), count(each.failed), each.latency_ms === null ? "–" : fixed(each.latency_ms, 2),
      count(each.hits), count(each.misses), count(each.waiting), count(each.evictions),
    ];
    byId("windows").tBodies[0].replaceChildren(...windows.map((each) => {
      const row = document.createElement("tr");
      for (const text of cells(each)) {
        const cell = row.insertCell();
        cell.className = "number";
        cell.textContent = text;
      }
      return row;
    }));
  }

  // ---- models, loads, events

  function note({ versions, pinned, reason }) {
    if (!versions.length) return reason;
    const unusual = pinned ? ["pinned"] : [];
    if (versions.length !== 1 || versions[0] !== 1) unusual.push(`version${versions.length === 1 ? "" : "s"} ${versions.join(", ")}`);
    if (reason) unusual.push(reason);
    return unusual.join(", ");
  }

  const shareOf = (model) => Math.max(0, ...view.memory.map((memory) => model[memory.kind] / memory.budget));

  function showRow(tr, model, largest) {
    const taken = [[model.host, ""], [model.device, " on devices"]].filter(([bytes]) => bytes);
    put(tr, "class", model.state.toLowerCase());
    set(field(tr, "name"), model.name);
    set(field(tr, "note"), note(model));
    put(field(tr, "note"), "title", note(model));
    set(field(tr, "state"), model.state.toLowerCase());
    set(field(tr, "memory"), taken.map(([bytes, where]) => size(bytes) + where).join(" + ") || "–");
    set(field(tr, "idle"), ago(model.idle));
    for (const name of ["hits", "misses", "failed", "leases", "waiting"]) set(field(tr, name), count(model[name]));
    const share = field(tr, "share");
    put(share, "class", `held heat${heat(model.idle)}`);
    put(share, "width", percent(shareOf(model), largest));
  }

  function showModels() {
    const { counts, rest } = view;
    const taken = rest.host + rest.device;
    const largest = Math.max(0, ...view.models.map(shareOf)) || 1;
    reconcile(byId("rows"), "row", view.models, (model) => model.name, (tr, model) => showRow(tr, model, largest));
    if (view.disk) set(byId("disk"), onDisk(view.disk));
    set(byId("resident"), `${count(counts.resident)} of ${counted(counts.known, "model")}`);
    set(byId("failed"), counts.failed ? `${count(counts.failed)} failed` : "");
    set(byId("matching"), byId("filter").value.trim() ? `${count(counts.matching)} of ${count(counts.known)}` : count(counts.known));
    set(byId("rest"), rest.models ? `and ${counted(rest.models, "model")} more${taken ? `, ${size(taken)} in all` : ""}` : "");
  }

  function showLoads() {
    set(byId("loads"), view.counts.loading ? count(view.counts.loading) : "nothing");
    reconcile(byId("loading").querySelector("ul"), "load", view.loading, (load) => load.name, (li, load) => {
      set(field(li, "name"), short(load.name));
      set(field(li, "told"), `for ${span(load.seconds)}${load.waiting ? `, ${counted(load.waiting, "request")} waiting` : ""}`);
    });
  }

  function showEvents(first) {
    const key = (event) => `${event.since} ${event.deed} ${event.name}`;
    reconcile(byId("events").querySelector("ol"), "happening", view.events, key, (li, event, fresh) => {
      if (fresh) {
        li.className = first ? event.deed : `${event.deed} new`;
        set(field(li, "name"), short(event.name));
      }
      set(field(li, "told"), told(event));
      put(li, "title", told(event));
      set(field(li, "when"), ago(Math.max(view.at - event.at, 0)));
    });
  }

  function show(data) {
    const first = view === null;
    view = data;
    set(byId("source"), data.source);
    set(byId("uptime"), `up ${span(data.uptime)}`);
    data.memory.forEach(showMemory);
    showCharts(data.history);
    showWindows(data.windows);
    showModels();
    showLoads();
    showEvents(first);
  }

  // ---- asking

  function live(on, text) {
    byId("live").className = on ? "on" : "off";
    set(byId("live"), text);
  }

  let asked = 0;
  async function ask() {
    const number = ++asked;
    const filter = byId("filter").value.trim();
    try {
      const answer = await fetch(`${SOURCE}?${new URLSearchParams(filter ? { filter } : {})}`, { cache: "no-store" });
      if (!answer.ok) throw new Error(`${answer.status}`);
      const data = await answer.json();
      if (number === asked) {
        show(data);
        live(true, "live");
      }
    } catch (error) {
      if (number === asked) live(false, "the server does not answer; trying again");
    }
  }

  let timer = 0;
  async function go() {
    clearTimeout(timer);
    if (!document.hidden) await ask();
    clearTimeout(timer);
    timer = setTimeout(go, EVERY);
  }

  document.addEventListener("visibilitychange", () => { if (!document.hidden) go(); });
  byId("filter").addEventListener("input", go);
  byId("filter").form.addEventListener("submit", (event) => { event.preventDefault(); go(); });
  for (const plot of document.querySelectorAll(".plot svg")) {
    plot.addEventListener("pointermove", point);
    plot.addEventListener("pointerleave", leave);
  }
  go();
})();

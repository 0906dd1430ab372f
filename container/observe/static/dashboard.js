// Asks for the data once a second and draws them. Elements that are shown already are kept and changed, so that what a
// person has opened, selected or points at stays. Names and errors come from outside: they become text and attributes.
import * as draw from "./draw.js";

const DATA = new URL("../data", import.meta.url);
const EVERY = 1000; // milliseconds
const KEY = "mme-key"; // of the session's storage, which ends with the tab
const SVG = new Set(["svg", "rect", "text", "path", "title"]);
const byId = (id) => document.getElementById(id);
const field = (parent, name) => parent.querySelector(`[data-field="${name}"]`);
let view = null; // what the server said last
let cursor = null; // seconds ago that the pointer is at, in every chart at once

// ---- elements

// A new element; children are elements and texts.
function el(tag, attributes = {}, ...children) {
  const made = SVG.has(tag) ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

const put = (id, text) => { if (byId(id).textContent !== text) byId(id).textContent = text; };
const named = (tag, name, text, attributes = {}) => el(tag, { "data-field": name, ...attributes }, text);

// Make the children of `element` the wanted ones. Those with a key are found again by it, so that they move and change
// instead of being drawn again. No attribute is taken away: whether details are open is for the person who opened them.
function update(element, wanted) {
  const before = new Map([...element.children].filter((each) => each.dataset.key).map((each) => [each.dataset.key, each]));
  let next = element.firstChild;
  for (const node of wanted) {
    const key = node.dataset?.key;
    const found = key ? before.get(key) : next;
    if (!found || found.nodeName !== node.nodeName || found.dataset?.key !== key) {
      if (key && view) node.dataset.fresh = "";
      element.insertBefore(node, next);
      continue;
    }
    before.delete(key);
    if (found === next) next = next.nextSibling;
    else element.insertBefore(found, next);
    if (node.nodeType === Node.ELEMENT_NODE) {
      for (const { name, value } of node.attributes) {
        if (found.getAttribute(name) !== value) found.setAttribute(name, value);
      }
      update(found, [...node.childNodes]);
    } else if (found.data !== node.data) found.data = node.data;
  }
  while (next) {
    const gone = next;
    next = next.nextSibling;
    gone.remove();
  }
}

// ---- parts of the page

function budget(memory) {
  const words = draw.held(memory);
  const pieces = draw.segments(memory).map((piece) => el(
    "svg",
    {
      class: `segment ${piece.kind}${piece.kind === "model" ? ` heat${draw.heat(piece.idle)} ${piece.state.toLowerCase()}` : ""}`,
      x: `${piece.x}%`, width: `${piece.width}%`, height: "100%", "data-key": `${piece.kind} ${piece.name}`, "data-name": piece.name,
    },
    el("title", {}, `${piece.name}: ${draw.size(piece.bytes)}`), el("rect", { width: "100%", height: "100%" }), el("text", { x: 7, y: "50%" }),
  ));
  return el(
    "figure", { class: "budget", "data-kind": memory.kind },
    el("figcaption", {}, el("b", {}, `On ${draw.place(memory.kind)}`), " ", named("span", "reading", words)),
    el("svg", { class: "bar", role: "img", "aria-label": `${words}; the table below names the models` }, el("rect", { class: "track", width: "100%", height: "100%" }), ...pieces),
  );
}

function row(model) {
  const number = (label, name, text) => named("td", name, text, { "data-label": label, class: "number" });
  const bar = el(
    "svg", { class: "share", "aria-hidden": "true" }, el("rect", { class: "track", width: "100%", height: "100%" }),
    el("rect", { class: `held heat${draw.heat(model.idle)}`, "data-field": "share", width: `${model.share}%`, height: "100%" }),
  );
  return el(
    "tr", { "data-key": model.name, class: model.state.toLowerCase() },
    el("th", { scope: "row" }, named("span", "name", model.name), " ", named("small", "note", model.note, { title: model.note })),
    el("td", { "data-label": "State" }, named("span", "state", model.state.toLowerCase(), { class: "state" })),
    el("td", { "data-label": "Memory", class: "memory" }, el("div", {}, bar, " ", named("span", "memory", model.memory))),
    named("td", "idle", draw.ago(model.idle), { "data-label": "Last use" }),
    number("Hits", "hits", draw.count(model.hits)), number("Misses", "misses", draw.count(model.misses)),
    number("Failed", "failed", draw.count(model.failed)), number("In use", "leases", draw.count(model.leases)),
    number("Waiting", "waiting", draw.count(model.waiting)),
  );
}

function item(key, attributes, mark, name, words) {
  return el("li", { "data-key": key, ...attributes }, mark, el("span", {}, named("b", "name", draw.short(name)), " ", named("span", "told", words)));
}

function happening(event, now) {
  const words = draw.happened(event);
  const when = named("span", "when", draw.ago(Math.max(now - event.at, 0)), { class: "when" });
  return item(`${event.since} ${event.deed} ${event.name}`, { class: event.deed, title: words }, when, event.name, words);
}

const loading = (load) => item(load.name, {}, el("span", { class: "spinner", "aria-hidden": "true" }), load.name, draw.underWay(load));

function figure(chart) {
  const legend = (name, text) => el("span", {}, el("i", { class: name }), text);
  const path = (name) => el("path", { class: name, "data-field": name, d: "" });
  const marked = chart.key === "cache";
  return el(
    "figure", { "data-chart": chart.key },
    el("figcaption", {}, el("b", {}, chart.title), " ", el("small", {}, chart.unit), " ", named("output", "reading", "")),
    el("div", { class: "plot" },
      el("svg", { viewBox: `0 0 ${draw.SECONDS} ${draw.HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": `${chart.title} over the last five minutes` },
        el("path", { class: "grid", d: `M60 0v100M120 0v100M180 0v100M240 0v100M0 50h${draw.SECONDS}` }),
        ...["second", "first", ...(marked ? ["evictions"] : []), "cursor"].map(path)),
      named("span", "top", "", { class: "top" })),
    el("p", { class: "axis", "aria-hidden": "true" }, el("span", {}, "5 min ago"), el("span", {}, "now")),
    el("p", { class: "legend" }, legend("first", chart.series[0][1]), legend("second", chart.series[1][1]), ...(marked ? [legend("evictions", "evictions")] : [])),
  );
}

// ---- the page

function show(next) {
  const filter = byId("filter").value.trim();
  const { counts, history } = next;
  put("source", next.source);
  put("uptime", `up ${draw.span(next.uptime)}`);
  put("resident", draw.resident(counts));
  put("failed", draw.failed(counts));
  put("matching", draw.matching(counts, filter));
  put("loads", counts.loading ? draw.count(counts.loading) : "nothing");
  put("rest", draw.rest(next.rest));
  byId("on-disk").hidden = !next.disk;
  put("disk", next.disk ? draw.onDisk(next.disk) : "");
  update(byId("budgets"), next.memory.map(budget));
  update(byId("loading-list"), next.loading.map(loading));
  update(byId("rows"), draw.rows(next.models, next.memory).map(row));
  update(byId("windows"), draw.windows(history).map((cells) => el("tr", {}, ...cells.map((cell) => el("td", { class: "number" }, cell)))));
  update(byId("happened"), next.events.map((event) => happening(event, next.at)));
  view = next;
  for (const chart of draw.CHARTS) {
    const drawn = document.querySelector(`[data-chart="${chart.key}"]`);
    const columns = chart.series.map(([column]) => column);
    const top = draw.ceiling(history, chart);
    field(drawn, "first").setAttribute("d", draw.area(history, [columns[0]], top));
    field(drawn, "second").setAttribute("d", draw.area(history, columns, top));
    field(drawn, "evictions")?.setAttribute("d", draw.marks(history.evictions));
    field(drawn, "top").textContent = draw.count(top);
  }
  for (const piece of document.querySelectorAll(".segment")) {
    piece.querySelector("text").textContent = draw.label(piece.dataset.name, piece.getBoundingClientRect().width);
  }
  showCursor();
}

function showCursor() {
  const { history } = view;
  const index = cursor === null ? -1 : history.queued.length - 1 - cursor;
  for (const chart of draw.CHARTS) {
    const drawn = document.querySelector(`[data-chart="${chart.key}"]`);
    const words = draw.reading(history, chart, index < 0 ? null : index);
    field(drawn, "reading").textContent = index < 0 ? words : `${cursor + 1} s ago: ${words}`;
    field(drawn, "cursor").setAttribute("d", index < 0 ? "" : `M${draw.SECONDS - cursor - 0.5} 0v${draw.HEIGHT}`);
  }
}

function point(event) {
  const box = event.currentTarget.getBoundingClientRect();
  cursor = Math.max(0, Math.floor(((box.right - event.clientX) / box.width) * draw.SECONDS));
  if (view) showCursor();
}

function leave() {
  cursor = null;
  if (view) showCursor();
}

// ---- asking

function live(on, text) {
  byId("live").className = on ? "on" : "off";
  put("live", text);
}

// Without a key that suffices there is nothing to show but the form that asks for one.
function askForKey(status) {
  const given = sessionStorage.getItem(KEY) !== null;
  sessionStorage.removeItem(KEY);
  byId("view").hidden = true;
  byId("key").hidden = false;
  const unknown = given ? "The server does not know this key." : "The server wants a key for statistics.";
  put("why", status === 403 ? "This key may not see statistics." : unknown);
  live(false, "");
}

let asked = 0;
async function ask() {
  const number = ++asked;
  const filter = byId("filter").value.trim();
  const key = sessionStorage.getItem(KEY);
  DATA.search = new URLSearchParams(filter ? { filter } : {});
  try {
    const answer = await fetch(DATA, { cache: "no-store", headers: key ? { Authorization: `Bearer ${key}` } : {} });
    if (number !== asked) return true;
    if (answer.status === 401 || answer.status === 403) {
      askForKey(answer.status);
      return false;
    }
    if (!answer.ok) throw new Error(`${answer.status}`);
    const next = await answer.json();
    if (number !== asked) return true;
    byId("key").hidden = true;
    byId("view").hidden = false;
    show(next);
    live(true, "live");
  } catch (error) {
    if (number === asked) live(false, "the server does not answer; trying again");
  }
  return true;
}

let timer = 0;
async function go() {
  clearTimeout(timer);
  const again = document.hidden || (await ask());
  clearTimeout(timer);
  if (again) timer = setTimeout(go, EVERY);
}

byId("charts").prepend(...draw.CHARTS.map(figure));
for (const plot of document.querySelectorAll(".plot svg")) {
  plot.addEventListener("pointermove", point);
  plot.addEventListener("pointerleave", leave);
}
byId("filter").value = new URLSearchParams(location.search).get("filter") ?? "";
byId("filter").addEventListener("input", go);
byId("filter").form.addEventListener("submit", (event) => { event.preventDefault(); go(); });
byId("key").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, byId("key").elements.key.value.trim());
  go();
});
document.addEventListener("visibilitychange", () => { if (!document.hidden) go(); });
go();

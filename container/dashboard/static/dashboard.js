// Asks for the page once a second and brings the elements that are shown up to it: shapes and words are the server's.
// Whatever comes from outside (names of models, errors) is text and attributes there, and stays so here.
"use strict";

(() => {
  const DATA = document.currentScript.dataset.source;
  const EVERY = 1000; // milliseconds
  const HEIGHT = 100;
  const SECONDS = 300;
  const LETTER = 7.4; // pixels
  const KEY = "mme-key"; // of the session's storage, which ends with the tab
  const byId = (id) => document.getElementById(id);
  const field = (parent, name) => parent.querySelector(`[data-field="${name}"]`);
  const readings = new Map(); // what each chart says while nobody points at it
  let history = null; // the numbers of the charts, while somebody does
  let cursor = null; // seconds ago that the pointer is at, in every chart at once

  // ---- elements

  // Make `element` what `wanted` is. Children with a key are found again by it, so that they move and change instead of
  // being drawn anew. No attribute is taken away: whether details are open is for the person who opened them.
  function update(element, wanted) {
    for (const { name, value } of wanted.attributes) {
      if (element.getAttribute(name) !== value) element.setAttribute(name, value);
    }
    const before = new Map([...element.children].filter((each) => each.dataset.key).map((each) => [each.dataset.key, each]));
    let next = element.firstChild;
    for (const node of [...wanted.childNodes]) {
      const key = node.dataset?.key;
      const found = key ? before.get(key) : next;
      if (!found || found.nodeName !== node.nodeName || found.dataset?.key !== key) {
        if (key && readings.size) node.dataset.fresh = "";
        element.insertBefore(node, next);
        continue;
      }
      before.delete(key);
      if (found === next) next = next.nextSibling;
      else element.insertBefore(found, next);
      if (node.nodeType === Node.ELEMENT_NODE) update(found, node);
      else if (found.data !== node.data) found.data = node.data;
    }
    while (next) {
      const gone = next;
      next = next.nextSibling;
      gone.remove();
    }
  }

  // As much of each name as its piece of a bar will have room for: the server does not know how wide the bar is.
  function label(piece) {
    const name = piece.dataset.key.replace(/^\S+ /, "").replace(/\.tar\.gz$/, "");
    const width = (piece.parentNode.getBoundingClientRect().width * parseFloat(piece.getAttribute("width"))) / 100;
    const letters = Math.floor((width - 12) / LETTER);
    const cut = letters > 3 ? `${name.slice(0, letters - 1)}\u2026` : "";
    piece.querySelector("text").textContent = name.length <= letters ? name : cut;
  }

  function show(page) {
    for (const part of [".where", "main"]) update(document.querySelector(part), page.querySelector(part));
    document.querySelectorAll(".segment").forEach(label);
    for (const figure of document.querySelectorAll("[data-chart]")) readings.set(figure, field(figure, "reading").textContent);
    showCursor();
  }

  // ---- one second of the charts

  const count = (number) => number.toLocaleString("en-US");

  function reading(chart, index) {
    const at = (column) => history[column][index];
    if (chart === "cache") {
      const [hits, misses] = [at("hits"), at("misses")];
      if (!(hits + misses)) return "no requests";
      return `${((100 * hits) / (hits + misses)).toFixed(1)} % hits: ${count(hits)} hits, ${count(misses)} missed`;
    }
    if (chart === "latency") {
      if (at("compute_ms") === null) return "no requests";
      return `${(at("queue_ms") + at("compute_ms")).toFixed(2)} ms, ${at("queue_ms").toFixed(2)} ms of it in the queue`;
    }
    if (chart === "requests") return `${count(at("succeeded"))} answered, ${count(at("failed"))} failed`;
    return `${count(at("queued"))} in a queue, ${count(at("cold"))} for their model`;
  }

  function showCursor() {
    const index = cursor === null || history === null ? -1 : history.queued.length - 1 - cursor;
    for (const [figure, words] of readings) {
      const told = index < 0 ? words : `${cursor + 1} s ago: ${reading(figure.dataset.chart, index)}`;
      field(figure, "reading").textContent = told;
      field(figure, "cursor").setAttribute("d", index < 0 ? "" : `M${SECONDS - cursor - 0.5} 0v${HEIGHT}`);
    }
  }

  function point(event) {
    const box = event.currentTarget.getBoundingClientRect();
    const entered = cursor === null;
    cursor = Math.max(0, Math.floor(((box.right - event.clientX) / box.width) * SECONDS));
    if (entered) go();
    else showCursor();
  }

  function leave() {
    cursor = history = null;
    showCursor();
  }

  // ---- asking

  function live(on, text) {
    byId("live").className = on ? "on" : "off";
    byId("live").textContent = text;
  }

  async function get(address) {
    const key = sessionStorage.getItem(KEY);
    const headers = key ? { Authorization: `Bearer ${key}` } : {};
    const answer = await fetch(address, { cache: "no-store", headers });
    if (answer.status === 401 || answer.status === 403) forget(answer.status);
    if (!answer.ok) throw new Error(`${answer.status}`);
    return answer;
  }

  // Without a key that suffices there is nothing to show but the form that asks for one.
  function forget(status) {
    const given = sessionStorage.getItem(KEY) !== null;
    sessionStorage.removeItem(KEY);
    if (!byId("key")) location.reload();
    else if (given) byId("why").textContent = status === 403 ? "This key may not see statistics." : "The server does not know this key.";
  }

  // The page that asks for a key becomes the one that it opens.
  function askForKey(form) {
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      sessionStorage.setItem(KEY, form.elements.key.value.trim());
      enter();
    });
    if (sessionStorage.getItem(KEY)) enter();
  }

  async function enter() {
    try {
      show(new DOMParser().parseFromString(await (await get("?")).text(), "text/html"));
    } catch (error) {
      return;
    }
    begin();
  }

  let asked = 0;
  async function ask() {
    const number = ++asked;
    const filter = byId("filter").value.trim();
    try {
      const page = await (await get(`?${new URLSearchParams(filter ? { filter } : {})}`)).text();
      const data = cursor === null ? null : await (await get(DATA)).json();
      if (number !== asked) return;
      if (data) history = data.history;
      show(new DOMParser().parseFromString(page, "text/html"));
      live(true, "live");
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

  function begin() {
    document.addEventListener("visibilitychange", () => { if (!document.hidden) go(); });
    byId("filter").addEventListener("input", go);
    byId("filter").form.addEventListener("submit", (event) => { event.preventDefault(); go(); });
    for (const plot of document.querySelectorAll(".plot svg")) {
      plot.addEventListener("pointermove", point);
      plot.addEventListener("pointerleave", leave);
    }
    go();
  }

  if (byId("key")) askForKey(byId("key"));
  else begin();
})();

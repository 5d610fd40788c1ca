/* What the console does in the browser: live updates, keyboard, copying, confirmation. Every page works without it. */

const one = (selector, within = document) => within.querySelector(selector);
const all = (selector, within = document) => [...within.querySelectorAll(selector)];
const root = document.documentElement;
root.classList.add("js");

// ---------------------------------------------------------------- replacing a part of the page in place

/* Makes `from` equal to `to`, and keeps the nodes: with them focus, selection, scroll positions and open details. Children with
   an id or data-key are found again at another place. */
function morph(from, to) {
  if (from.isEqualNode(to)) return;
  if (from.nodeType !== Node.ELEMENT_NODE) {
    if (from.data !== to.data) setText(from, to.data);
    return;
  }
  for (const { name } of [...from.attributes])
    if (!to.hasAttribute(name) && !keeps(from, name)) from.removeAttribute(name);
  for (const { name, value } of to.attributes)
    if (from.getAttribute(name) !== value && !keeps(from, name)) from.setAttribute(name, value);
  if (from.localName !== "textarea") morphChildren(from, to);
}

function keeps(element, name) {
  return name === "open" && /^(details|dialog)$/.test(element.localName);
}

const keyOf = (node) => node.nodeType === Node.ELEMENT_NODE ? node.id || node.dataset.key : undefined;

function morphChildren(from, to) {
  const byKey = new Map();
  for (const child of from.children) if (keyOf(child)) byKey.set(keyOf(child), child);
  const wanted = new Set([...to.children].map(keyOf));
  let next = from.firstChild;
  for (const child of [...to.childNodes]) {
    while (next && keyOf(next) && !wanted.has(keyOf(next))) next = removed(next);
    const key = keyOf(child);
    let match = key ? byKey.get(key) : next;
    if (match && (match.nodeType !== child.nodeType || match.nodeName !== child.nodeName || keyOf(match) !== key)) match = null;
    if (!match) from.insertBefore(document.importNode(child, true), next);
    else {
      if (match === next) next = next.nextSibling;
      else moveBefore(from, match, next);
      morph(match, child);
    }
  }
  while (next) next = removed(next);
}

function removed(node) {
  const next = node.nextSibling;
  node.remove();
  return next;
}

function moveBefore(parent, node, next) {
  const focused = node.contains(document.activeElement) ? document.activeElement : null;
  parent.insertBefore(node, next); // which takes the focus away
  if (focused) focused.focus({ preventScroll: true });
}

function setText(node, text) {
  const selection = getSelection();
  const { anchorNode, anchorOffset, focusNode, focusOffset } = selection;
  node.data = text; // which moves the ends of a selection in it to its beginning
  if (selection.rangeCount && (anchorNode === node || focusNode === node)) {
    const at = (end, offset) => end === node ? Math.min(offset, text.length) : offset;
    selection.setBaseAndExtent(anchorNode, at(anchorNode, anchorOffset), focusNode, at(focusNode, focusOffset));
  }
}

/* Replaces the live block. Space between its parts is left out: it means nothing, and hides which parts are the same. */
function replaceLive(content) {
  const block = one("#live");
  addStars(content);
  for (const parent of [block, content])
    for (const node of [...parent.childNodes]) if (node.nodeType === Node.TEXT_NODE && !node.data.trim()) node.remove();
  morphChildren(block, content);
}

/* The server renders the stars of favourites only: those of all topics would be a tenth of the page. */
function addStars(within) {
  for (const cell of all("#topics td.name:not(:has(.star))", within)) {
    const topic = cell.parentNode.dataset.key;
    const star = document.createElement("button");
    star.setAttribute("form", "prefer");
    Object.assign(star, { className: "star", name: "star", value: topic, ariaLabel: `Favourite: ${topic}`, ariaPressed: "false" });
    one("a", cell).after(star);
  }
}

function parsed(html) {
  const template = document.createElement("template");
  template.innerHTML = html;
  return template.content;
}

addStars(document);

// ---------------------------------------------------------------- live updates

const LONGEST_WAIT_S = 30;
const SILENCE_S = 45; // the server sends something every 15 seconds

const live = {
  block: one("#live[data-live]"), bar: one("#live-state"), source: null, failures: 0, lostAt: null, retry: 0, watchdog: 0,
  paused: sessionStorage.getItem("paused") === "yes",

  start() {
    this.stop();
    if (!this.block) return;
    if (this.paused) return this.show("paused", "Paused");
    if (document.hidden) return;
    if (!this.lostAt) this.show("wait", "Connecting");
    const path = location.pathname + location.search;
    const source = this.source = new EventSource(`${this.block.dataset.live}?path=${encodeURIComponent(path)}`);
    this.heard();
    source.addEventListener("open", () => this.up());
    source.addEventListener("beat", (event) => this.up(event));
    source.addEventListener("update", (event) => { this.up(event); replaceLive(parsed(event.data)); });
    source.addEventListener("again", () => this.start());
    source.addEventListener("end", (event) => { this.stop(); this.show("lost", event.data); });
    source.addEventListener("error", () => this.lost());
  },

  stop() {
    this.source?.close();
    this.source = null;
    clearTimeout(this.retry);
    clearTimeout(this.watchdog);
  },

  up(event) {
    const asOf = one("#as-of");
    if (asOf && event?.lastEventId) asOf.textContent = event.lastEventId;
    this.failures = 0;
    this.lostAt = null;
    this.show("live", "Live");
    this.heard();
  },

  heard() {
    clearTimeout(this.watchdog);
    this.watchdog = setTimeout(() => this.lost(), SILENCE_S * 1000);
  },

  async lost() {
    const url = this.source?.url;
    this.stop();
    this.lostAt ??= new Date();
    this.show("lost", `No connection since ${this.lostAt.toLocaleTimeString()}`);
    const wait_s = Math.min(LONGEST_WAIT_S, 2 ** this.failures++) * (0.75 + Math.random() / 2);
    this.retry = setTimeout(() => this.start(), wait_s * 1000);
    // EventSource does not tell the status of a refusal.
    const answer = await fetch(url, { method: "HEAD" }).catch(() => null);
    if (answer?.status === 503) this.show("lost", "Too many viewers: reload the page for new numbers");
    if (answer?.status === 401 || answer?.status === 403) this.show("lost", "Signed out: reload the page");
    if (answer?.status === 404) this.show("lost", "This no longer exists");
  },

  pause() {
    this.paused = !this.paused;
    sessionStorage.setItem("paused", this.paused ? "yes" : "no");
    this.lostAt = null;
    this.start();
    this.label();
  },

  label() {
    const button = one("#live-pause");
    if (button) button.textContent = this.paused ? "Resume" : "Pause";
  },

  show(state, text) {
    if (!this.bar) return;
    this.bar.hidden = false;
    this.bar.dataset.state = state;
    const shown = one(".text", this.bar);
    if (shown.textContent !== text) shown.textContent = text;
  },
};

document.addEventListener("visibilitychange", () => document.hidden ? live.stop() : live.start());
addEventListener("pagehide", () => live.stop());
addEventListener("pageshow", (event) => { if (event.persisted) live.start(); });
one("#live-pause")?.addEventListener("click", () => live.pause());
live.label();
live.start();

// ---------------------------------------------------------------- filter as you type

let typing = 0;
let asking = null;

async function applyFilter(form) {
  const query = new URLSearchParams([...new FormData(form)].filter(([, value]) => value));
  const url = `${form.getAttribute("action") || location.pathname}${query.size ? `?${query}` : ""}`;
  asking?.abort();
  asking = new AbortController();
  try {
    const answer = await fetch(url, { signal: asking.signal });
    const found = one("#live", new DOMParser().parseFromString(await answer.text(), "text/html"));
    if (!answer.ok || !found) throw new Error("not a page with a list");
    history.replaceState(null, "", url);
    replaceLive(found);
    live.start();
  } catch (error) {
    if (error.name !== "AbortError") form.submit();
  }
}

/* Stars and hidden topics: the answer is this page again, sorted anew. */
one("#prefer")?.addEventListener("submit", async (event) => {
  if (!one("#live")) return;
  event.preventDefault();
  const form = event.target;
  const answer = await fetch(form.action, { method: "POST", body: new URLSearchParams([...new FormData(form, event.submitter)]) }).catch(() => null);
  const found = answer?.ok && one("#live", parsed(await answer.text()));
  if (!found) return location.reload();
  replaceLive(found);
  live.start();
});

for (const form of all("form[data-filter]")) {
  form.addEventListener("input", () => {
    clearTimeout(typing);
    typing = setTimeout(() => applyFilter(form), 200);
  });
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    clearTimeout(typing);
    applyFilter(form);
  });
}

// ---------------------------------------------------------------- keyboard

const help = one("#help");
let prefix = -Infinity; // when g was pressed

function rows() {
  return all("main table tbody tr").filter((row) => one("a, button, summary", row) && row.offsetParent);
}

function moveRow(step) {
  const list = rows();
  const at = list.indexOf(document.activeElement.closest?.("tr"));
  const next = list[at < 0 ? (step > 0 ? 0 : list.length - 1) : Math.max(0, Math.min(list.length - 1, at + step))];
  if (!next) return;
  one("a, button, summary", next).focus({ preventScroll: true });
  next.scrollIntoView({ block: "nearest" });
}

function toggleTheme() {
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  const path = root.dataset.base || "/";
  document.cookie = `theme=${root.dataset.theme}; path=${path}; max-age=31536000; samesite=strict`;
}

let typedAhead = null; // while the palette is being loaded: its first characters

async function openPalette() {
  if (typedAhead !== null || one("dialog[open]")) return;
  typedAhead = "";
  const palette = await import(find.dataset.palette).catch(() => null);
  const typed = typedAhead;
  typedAhead = null;
  if (palette) palette.open(typed);
  else location.assign(find.href);
}

const find = one("#find");
const keys = {
  j: () => moveRow(1),
  k: () => moveRow(-1),
  "/": () => one("[data-search]") ? one("[data-search]").focus() : openPalette(),
  "?": () => help?.showModal(),
  p: () => live.block && live.pause(),
  d: toggleTheme,
  "[": () => one("a[rel=prev]")?.click(),
  "]": () => one("a[rel=next]")?.click(),
  u: () => all(".crumbs a").at(-1)?.click(),
};

document.addEventListener("keydown", (event) => {
  if (typedAhead !== null) {
    if (event.key.length === 1) typedAhead += event.key;
    return event.preventDefault();
  }
  if (event.key === "k" && (event.ctrlKey || event.metaKey) && !event.altKey && !event.shiftKey) {
    event.preventDefault();
    return openPalette();
  }
  const typed = event.target.closest?.("input, textarea, select, [contenteditable]");
  if (event.key === "Escape" && typed?.matches("[data-search]")) return typed.blur();
  if (typed || event.ctrlKey || event.metaKey || event.altKey || event.isComposing || one("dialog[open]")) return;
  let action = keys[event.key];
  if (event.timeStamp - prefix < 1500) action = () => one(`[data-go="${CSS.escape(event.key)}"]`)?.click();
  else if (event.key === "ArrowDown" && event.target.closest("tbody")) action = keys.j;
  else if (event.key === "ArrowUp" && event.target.closest("tbody")) action = keys.k;
  prefix = event.key === "g" && !action ? event.timeStamp : -Infinity;
  if (!action) return;
  event.preventDefault();
  action();
});
one("#show-help")?.addEventListener("click", () => help.showModal());
find?.addEventListener("click", (event) => {
  if (event.ctrlKey || event.metaKey || event.shiftKey) return; // another tab
  event.preventDefault();
  openPalette();
});
one("#theme")?.addEventListener("click", toggleTheme);

one(".navs [aria-current]")?.scrollIntoView({ block: "nearest", inline: "center" }); // on a phone

// ---------------------------------------------------------------- copying, confirmation

async function copy(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const area = document.createElement("textarea"); // plain http, other than on localhost
  area.value = text;
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}

document.addEventListener("click", async (event) => {
  const button = event.target.closest("[data-copy], [data-copy-from]");
  if (!button) return;
  const from = button.dataset.copyFrom;
  await copy(from ? one(from).textContent : button.dataset.copy);
  const before = button.textContent;
  button.textContent = "Copied";
  button.disabled = true;
  setTimeout(() => { button.textContent = before; button.disabled = false; }, 1200);
});

for (const input of all("input[data-confirm]")) {
  const buttons = all("button:not([type]), [type=submit]", input.form).filter((each) => !each.hasAttribute("formnovalidate"));
  const check = () => buttons.forEach((each) => { each.disabled = input.value.trim() !== input.dataset.confirm; });
  input.addEventListener("input", check);
  check();
}

document.addEventListener("submit", (event) => {
  if (event.target.method !== "post" || event.defaultPrevented) return;
  setTimeout(() => all("button:not([type]), [type=submit]", event.target).forEach((each) => { each.disabled = true; }));
});

// ---------------------------------------------------------------- values of charts under the pointer

const tip = document.createElement("div");
tip.className = "tip";
tip.hidden = true;
document.body.append(tip);

document.addEventListener("pointermove", (event) => {
  const svg = event.target.closest?.(".plot svg");
  tip.hidden = !svg;
  if (!svg) return;
  const box = svg.getBoundingClientRect();
  const lines = all("g[data-values]", svg).map((g) => [g.dataset.name, g.dataset.values.split(",")]);
  const last = lines[0][1].length - 1;
  const at = Math.max(0, Math.min(last, Math.round((event.clientX - box.left) / box.width * last)));
  const ago = (last - at) * svg.closest(".chart").dataset.step / 60;
  const time = ago ? `${ago.toLocaleString()} min ago` : "now";
  const format = (text) => text === "" ? "no answer" : Number(text).toLocaleString(undefined, { maximumFractionDigits: 1 });
  tip.textContent = [time, ...lines.map(([name, values]) => `${name}: ${format(values[at])}`)].join("\n");
  tip.style.left = `${Math.max(4, Math.min(innerWidth - tip.offsetWidth - 8, event.clientX + 14))}px`;
  tip.style.top = `${Math.max(4, event.clientY - tip.offsetHeight - 10)}px`;
});

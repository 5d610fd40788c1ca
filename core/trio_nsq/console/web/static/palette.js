/* Ctrl-K: the results of the page "Find" over any page, and the links of this page. Loaded when it is first used.
   The focus stays in the field, and aria-activedescendant names the option: the pattern "combobox" of ARIA. */

const WAIT_MS = 60;
const find = document.querySelector("#find");

const dialog = document.createElement("dialog");
dialog.id = "palette";
dialog.setAttribute("aria-label", "Find");
dialog.innerHTML = `<form method="dialog"><input type="text" role="combobox" aria-label="Find a topic, channel, node, page or action"
  aria-controls="palette-list" aria-expanded="false" aria-autocomplete="list" autocomplete="off" autocapitalize="off" spellcheck="false"
  maxlength="200" placeholder="Topic, channel, node, page or action"><button class="ghost">Close</button></form>
<ul id="palette-list" class="found" role="listbox" aria-label="Results"></ul><p class="visually-hidden" role="status"></p>`;
document.body.append(dialog);

const [input, list, status] = ["input", "ul", "[role=status]"].map((each) => dialog.querySelector(each));
let at = -1;
let timer = 0;
let asking = null;
let shown = null; // what was typed for the results in the list
let enters = false; // Enter was pressed before the results of what is typed were there

function links(within, kind) {
  return [...within].map((link) => ({ text: link.textContent.trim(), href: link.getAttribute("href"), kind: kind || link.nextElementSibling?.textContent }));
}

/* The buttons and tabs of the page below, whose text has all the typed words. */
function ofThisPage(typed) {
  const words = typed.toLowerCase().split(/\s+/).filter(Boolean);
  const here = links(document.querySelectorAll("main .actions > a, main .tabs > a:not([aria-current])"), "this page");
  return words.length ? here.filter(({ text }) => words.every((word) => text.toLowerCase().includes(word))) : here.slice(0, 8);
}

function show(entries) {
  const options = entries.map(({ text, kind, href }, number) => {
    const option = document.createElement("li");
    Object.assign(option, { id: `palette-${number}`, role: "option" });
    option.dataset.href = href;
    const [name, what] = [document.createElement("span"), document.createElement("span")];
    name.textContent = text;
    what.textContent = kind;
    what.className = "muted";
    option.append(name, what);
    return option;
  });
  list.replaceChildren(...options);
  input.setAttribute("aria-expanded", String(entries.length > 0));
  status.textContent = entries.length ? `${entries.length} results` : `Nothing matches “${input.value}”`;
  dialog.dataset.empty = entries.length ? "" : status.textContent;
  select(entries.length ? 0 : -1);
}

function select(number) {
  list.children[at]?.setAttribute("aria-selected", "false");
  at = number;
  const option = list.children[at];
  if (!option) return input.removeAttribute("aria-activedescendant");
  option.setAttribute("aria-selected", "true");
  input.setAttribute("aria-activedescendant", option.id);
  option.scrollIntoView({ block: "nearest" });
}

async function ask() {
  const typed = input.value;
  asking?.abort();
  asking = new AbortController();
  try {
    const answer = await fetch(`${find.href}?q=${encodeURIComponent(typed)}`, { signal: asking.signal });
    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
    const found = links(page.querySelectorAll("#found a"));
    const here = ofThisPage(typed).filter(({ href }) => !found.some((each) => each.href === href));
    show(typed ? [...here.slice(0, 3), ...found] : [...found, ...here]);
    shown = typed;
    if (enters) enter();
  } catch (error) {
    if (error.name !== "AbortError") location.assign(find.href);
  }
}

function go(option) {
  if (!option) return;
  dialog.close();
  location.assign(option.dataset.href);
}

/* Goes to the chosen option, but not to one for less than what is typed. */
function enter() {
  enters = input.value !== shown;
  if (!enters) return go(list.children[at]);
  clearTimeout(timer);
  ask();
}

input.addEventListener("input", () => {
  enters = false;
  clearTimeout(timer);
  timer = setTimeout(ask, WAIT_MS);
});
input.addEventListener("keydown", (event) => {
  if (event.isComposing) return;
  const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
  const count = list.children.length;
  if (step && count) select((at + step + count) % count);
  else if (event.key === "Enter") enter();
  else return;
  event.preventDefault();
});
list.addEventListener("click", (event) => go(event.target.closest("[role=option]")));
list.addEventListener("mousemove", (event) => {
  const option = event.target.closest("[role=option]");
  if (option) select([...list.children].indexOf(option));
});
dialog.addEventListener("click", (event) => event.target === dialog && dialog.close()); // beside it
dialog.addEventListener("close", () => { enters = false; });

export function open(typed) {
  input.value = typed;
  list.replaceChildren();
  shown = null;
  enters = false;
  dialog.showModal();
  input.focus();
  return ask();
}

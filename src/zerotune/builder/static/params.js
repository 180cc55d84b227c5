// Choice and parameters of optimizer and schedule, from the server's catalogue.

import { all, byId, el, fill, idOf, show } from "./dom.js";
import { take } from "./form.js";
import { changed, print, read, same, write } from "./state.js";

const DEFAULTS = { optimizer: "AdamW", scheduler: "WarmupLR" };
const OTHER = "…";
const lists = { optimizer: [], scheduler: [] };
let capabilities = {};
const GROUPS = {
  deepspeed: "DeepSpeed",
  torch: "torch.optim",
  package: "Optional packages",
  zerotune: "diffusers",
};

export function setCatalogue(catalogue) {
  lists.optimizer = catalogue.optimizers;
  lists.scheduler = catalogue.schedulers;
  for (const what of Object.keys(lists)) {
    byId(`${what}-type`).addEventListener("change", (event) => pick(what, event.target.value));
  }
}

const squash = (name) => String(name).toLowerCase().replace(/[^a-z0-9]/g, "");
const find = (what, name) => lists[what].find((entry) => entry.spellings.includes(squash(name)));

// Names that are typed, though the list may know them: what is shown then is the field.
const typedNames = new Set();

function pick(what, name) {
  typedNames.delete(what);
  if (name === OTHER) {
    typedNames.add(what);
    options(what);
    return byId(`${what}-name`).focus();
  }
  const before = find(what, read("config", `${what}.type`));
  const after = find(what, name);
  if (!name) write("config", what, undefined);
  else write("config", `${what}.type`, name);
  // An argument of the former that the next one lacks goes with it; one that nobody knows stays.
  const kept = new Set(after?.params.map((parameter) => parameter.name));
  for (const { name: parameter } of before?.params ?? []) {
    if (name && !kept.has(parameter)) write("config", `${what}.params.${parameter}`, undefined);
  }
  changed(null);
  refreshChoosers();
}

export function refreshChoosers({ typed = true } = {}) {
  for (const what of Object.keys(lists)) {
    options(what);
    parameters(what, typed);
  }
}

function options(what) {
  const select = byId(`${what}-type`);
  const written = read("config", `${what}.type`);
  const entry = written === undefined ? undefined : find(what, written);
  const chosen = entry ? entry.name : written === undefined ? "" : print(written);
  const none = `not set (${DEFAULTS[what]})`;
  const groups = [el("option", { value: "", text: none })];
  if (chosen && !entry) groups.push(el("option", { value: chosen, text: chosen }));
  for (const [family, label] of Object.entries(GROUPS)) {
    const members = lists[what].filter((each) => each.family === family);
    if (members.length) groups.push(el("optgroup", { label }, ...members.map(option)));
  }
  fill(select, ...groups, el("option", { value: OTHER, text: "another name…" }));
  select.value = typedNames.has(what) ? OTHER : chosen;
  show(byId(`${what}-other`), typedNames.has(what) || Boolean(chosen && !entry));
  byId(`${what}-about`).textContent = about(what, entry);
}

function option(entry) {
  const answer = capabilities[entry.name];
  const runs = !answer || answer.runs;
  return el("option", {
    value: entry.name,
    text: runs ? (answer?.missing ? `${entry.name} (${answer.missing} is not installed)` : entry.name) : `${entry.name} (cannot run here)`,
    disabled: !runs,
    title: answer?.reason,
  });
}

function about(what, entry) {
  if (!entry) return "";
  const answer = what === "optimizer" ? capabilities[entry.name] : undefined;
  const parts = [`${entry.summary}.`, ...entry.requires.map((need) => `Needs ${need}.`)];
  if (answer?.missing) parts.push(`${answer.missing} is not installed here: run pip install 'zerotune[optimizers]'.`);
  if (answer?.implementation) parts.push(`Run by ${answer.implementation}.`);
  // If the optimizer runs, messages report what it changes, next to the keys.
  if (answer?.reason && !answer.runs) parts.push(`Cannot run on this machine: ${answer.reason}.`);
  return parts.join(" ").replaceAll("..", ".");
}

const shapes = {};

// Switches are for few; those that are written are shown with the rest.
const isRare = (parameter) => parameter.optional || parameter.type === "bool";

// Keeps the text that is being typed, unless it is undone.
function parameters(what, typed) {
  const entry = find(what, read("config", `${what}.type`) ?? DEFAULTS[what]);
  const params = read("config", `${what}.params`);
  const written = params !== null && typeof params === "object" && !Array.isArray(params) ? params : {};
  const known = entry?.params ?? [];
  const names = known.map((parameter) => parameter.name);
  const foreign = Object.keys(written).filter((name) => !names.includes(name));
  const shape = [entry?.name, ...foreign];
  const more = byId(`${what}-more`);
  if (!same(shapes[what], shape)) {
    shapes[what] = shape;
    const [rare, usual] = [true, false].map((wanted) =>
      known.filter((parameter) => (isRare(parameter) && !(parameter.name in written)) === wanted));
    fill(byId(`${what}-params`),
      ...usual.map((parameter) => row(what, parameter)),
      ...foreign.map((name) => row(what, { name, range: "not a parameter of this class", choices: [], foreign: true })));
    fill(more.lastElementChild, ...rare.map((parameter) => row(what, parameter)));
    show(more, rare.length > 0);
  }
  for (const input of all("[data-param]", byId(`${what}-params`).parentElement)) {
    if (!typed || document.activeElement !== input) setValue(input, read("config", input.dataset.path));
  }
}

function setValue(input, value) {
  const text = value === undefined ? "" : print(value);
  if (input.tagName === "SELECT" && ![...input.options].some((each) => each.value === text)) {
    input.add(new Option(text, text));
  }
  input.value = text;
}

// DeepSpeed ignores arguments without a type, so the default type is written with them.
function onInput({ target }) {
  const [what] = target.dataset.path.split(".");
  if (target.value.trim() && read("config", `${what}.type`) === undefined) {
    write("config", `${what}.type`, DEFAULTS[what]);
  }
  take(target);
}

function control(id, path, parameter) {
  const standard = parameter.default ?? null;
  const properties = {
    id,
    "data-param": parameter.name,
    "data-store": "config",
    "data-path": path,
    "aria-describedby": `${id}-hint ${id}-messages`,
  };
  const words = parameter.type === "bool" ? ["true", "false"] : parameter.choices;
  if (words.length) {
    const nothing = parameter.optional || standard === null ? "not set" : `default: ${print(standard)}`;
    return el("select", { ...properties, onchange: onInput },
      el("option", { value: "", text: nothing }),
      ...words.map((word) => el("option", { value: word, text: word })));
  }
  return el("input", { ...properties, type: "text", autocomplete: "off", spellcheck: "false",
    "data-default": parameter.optional || standard === null ? "" : print(standard),
    oninput: onInput });
}

function row(what, parameter) {
  const path = `${what}.params.${parameter.name}`;
  const id = idOf(path);
  const remove = parameter.foreign
    ? el("button", { type: "button", class: "quiet", text: "remove", "aria-label": `Remove ${path}`,
        onclick: () => { write("config", path, undefined); changed(null); refreshChoosers(); } })
    : null;
  return el("div", { class: "field", "data-field": path },
    el("div", { class: "param-head" }, el("label", { for: id, text: parameter.name }), remove),
    control(id, path, parameter),
    el("p", { class: "hint", id: `${id}-hint`, text: hint(parameter) }),
    el("div", { class: "messages", id: `${id}-messages`, "data-messages": path }));
}

function hint(parameter) {
  if (parameter.type === "bool" || parameter.choices.length) return "";
  const standard = parameter.default ?? null;
  if (standard === null) return parameter.required ? `${parameter.range}; no default` : parameter.range;
  return `${parameter.range}; ${parameter.optional ? "" : "default "}${print(standard)}`;
}

export function setCapabilities(found) {
  const next = Object.fromEntries(found.map((each) => [each.name, each]));
  if (same(next, capabilities)) return;
  capabilities = next;
  const reasons = new Map();
  for (const { runs, reason, name } of found) {
    if (!runs) reasons.set(reason, [...(reasons.get(reason) ?? []), name]);
  }
  show(byId("optimizer-cannot"), reasons.size > 0);
  fill(byId("optimizer-reasons"), ...[...reasons].map(([reason, names]) =>
    el("li", {}, el("strong", { text: names.join(", ") }), `: ${reason}.`)));
  if (document.activeElement !== byId("optimizer-type")) options("optimizer");
  else byId("optimizer-about").textContent = about("optimizer", find("optimizer", byId("optimizer-type").value));
}

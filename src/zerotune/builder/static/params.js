// Optimizer and schedule: which, and with what. Both come from the server's catalogue.

import { all, byId, el, fill, idOf } from "./dom.js";
import { take } from "./form.js";
import { changed, print, read, same, write } from "./state.js";

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
const find = (what, name) =>
  lists[what].find((entry) => entry.name === name) ??
  lists[what].find((entry) => squash(entry.name) === squash(name));

function pick(what, name) {
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

export function refreshChoosers() {
  for (const what of Object.keys(lists)) {
    options(what);
    parameters(what);
  }
}

function options(what) {
  const select = byId(`${what}-type`);
  const written = read("config", `${what}.type`);
  const entry = written === undefined ? undefined : find(what, written);
  const chosen = entry ? entry.name : written === undefined ? "" : print(written);
  const none = what === "optimizer" ? "not written (AdamW)" : "none: constant learning rate";
  const groups = [el("option", { value: "", text: none })];
  if (chosen && !entry) groups.push(el("option", { value: chosen, text: chosen }));
  for (const [family, label] of Object.entries(GROUPS)) {
    const members = lists[what].filter((each) => each.family === family);
    if (members.length) groups.push(el("optgroup", { label }, ...members.map(option)));
  }
  fill(select, ...groups);
  select.value = chosen;
  byId(`${what}-about`).textContent = about(what, entry);
}

function option(entry) {
  const answer = capabilities[entry.name];
  const runs = !answer || answer.runs;
  return el("option", {
    value: entry.name,
    text: runs ? entry.name : `${entry.name} (cannot run here)`,
    disabled: !runs,
    title: answer?.reason,
  });
}

function about(what, entry) {
  if (!entry) return "";
  const answer = what === "optimizer" ? capabilities[entry.name] : undefined;
  const parts = [`${entry.summary}.`, ...entry.requires.map((need) => `Needs ${need}.`)];
  if (answer?.implementation) parts.push(`Run by ${answer.implementation}.`);
  if (answer?.reason) parts.push(`${answer.runs ? "Note" : "Cannot run here"}: ${answer.reason}.`);
  return parts.join(" ").replaceAll("..", ".");
}

const drawn = {};

function parameters(what) {
  const entry = find(what, read("config", `${what}.type`) ?? (what === "optimizer" ? "AdamW" : ""));
  const written = read("config", `${what}.params`);
  const known = entry?.params ?? [];
  const names = known.map((parameter) => parameter.name);
  const foreign = Object.keys(
    written !== null && typeof written === "object" && !Array.isArray(written) ? written : {},
  ).filter((name) => !names.includes(name));
  const shape = [entry?.name, ...foreign];
  if (!same(drawn[what], shape)) {
    drawn[what] = shape;
    fill(
      byId(`${what}-params`),
      ...known.map((parameter) => row(what, parameter)),
      ...foreign.map((name) => row(what, { name, range: "not an argument of it", foreign: true })),
    );
  }
  for (const input of all("[data-param]", byId(`${what}-params`))) {
    if (document.activeElement !== input) input.value = print(read("config", input.dataset.path));
  }
}

function row(what, parameter) {
  const path = `${what}.params.${parameter.name}`;
  const id = idOf(path);
  const standard = parameter.default ?? null;
  const input = el("input", {
    id,
    type: "text",
    autocomplete: "off",
    spellcheck: "false",
    "data-param": parameter.name,
    "data-store": "config",
    "data-path": path,
    "data-default": parameter.optional || standard === null ? "" : print(standard),
    "aria-describedby": `${id}-hint ${id}-messages`,
    oninput: () => take(input),
  });
  const remove = parameter.foreign
    ? el("button", { type: "button", class: "quiet", text: "remove", "aria-label": `Remove ${path}`,
        onclick: () => { write("config", path, undefined); changed(null); refreshChoosers(); } })
    : null;
  return el("div", { class: "field", "data-field": path },
    el("div", { class: "param-head" }, el("label", { for: id, text: parameter.name }), remove),
    input,
    el("p", { class: "hint", id: `${id}-hint`, text: hint(parameter) }),
    el("div", { class: "messages", id: `${id}-messages`, "data-messages": path }));
}

function hint(parameter) {
  const standard = parameter.default ?? null;
  if (standard === null) return parameter.required ? `${parameter.range}; no default` : parameter.range;
  return `${parameter.range}; ${parameter.optional ? "" : "default "}${print(standard)}`;
}

export function setCapabilities(found) {
  const next = Object.fromEntries(found.map((each) => [each.name, each]));
  if (same(next, capabilities)) return;
  capabilities = next;
  const cannot = found.filter((each) => !each.runs);
  fill(
    byId("optimizer-reasons"),
    ...cannot.map((each) => el("li", {}, el("strong", { text: each.name }), `: ${each.reason}.`)),
  );
  if (document.activeElement !== byId("optimizer-type")) options("optimizer");
  else byId("optimizer-about").textContent = about("optimizer", find("optimizer", byId("optimizer-type").value));
}


// Synchronises controls and state. The page declares which values a choice writes, and the server
// renders the arguments of the chosen optimizer and schedule.

import { all, byId, show } from "./dom.js";
import { changed, parse, print, read, same, state, write } from "./state.js";

const OTHER = "…";
const TYPED = ["value", "param", "path", "name"];

export function bind() {
  const listen = (type) => byId("form").addEventListener(type, ({ target }) => {
    const { kind, chooser } = target.dataset;
    if (chooser && type === "change") pick(target);
    else if (kind && TYPED.includes(kind) === (type === "input")) take(target);
  });
  for (const type of ["input", "change"]) listen(type);
  byId("form").addEventListener("click", ({ target }) => {
    if (!target.dataset.remove) return;
    write("config", target.dataset.remove, undefined);
    changed(null);
  });
}

// Lists in which another name was chosen, though the list may know it: what is shown then is the field.
const typedNames = new Set();
const parametersOf = (list, name) =>
  JSON.parse([...list.options].find((option) => option.value === name)?.dataset.params ?? "[]");

function pick(list) {
  const what = list.dataset.chooser;
  const name = list.value;
  typedNames.delete(what);
  if (name === OTHER) {
    typedNames.add(what);
    choosers();
    return byId(`${what}-name`).focus();
  }
  // An argument of the former that the next one lacks goes with it; one that nobody knows stays.
  const kept = parametersOf(list, name);
  for (const parameter of name ? parametersOf(list, list.dataset.chosen) : []) {
    if (!kept.includes(parameter)) write("config", `${what}.params.${parameter}`, undefined);
  }
  write("config", name ? `${what}.type` : what, name || undefined);
  list.dataset.chosen = name;
  changed(list);
}

// The lists after the server has rendered them.
export function choosers() {
  for (const list of all("[data-chooser]")) {
    const what = list.dataset.chooser;
    list.dataset.chosen = list.value;
    if (typedNames.has(what)) list.value = OTHER;
    show(byId(`${what}-other`), list.value === OTHER || "foreign" in list.selectedOptions[0].dataset);
  }
}

function take(control) {
  const { kind, store, path } = control.dataset;
  const [what] = path.split(".");
  // DeepSpeed ignores arguments without a type, so the default type is written with them.
  if (kind === "param" && control.value.trim() && read(store, `${what}.type`) === undefined) {
    write(store, `${what}.type`, byId(`${what}-type`).dataset.default);
  }
  const sets = kind === "choice" ? control.dataset.sets : control.selectedOptions?.[0]?.dataset.sets;
  if (sets) choose(JSON.parse(sets), store);
  else if (kind === "path") write(store, path, control.value.trim() || undefined);
  else write(store, path, kind === "value" && store === "setup" ? words(control) : parse(control.value));
  if (store === "setup" && path === "world_size" && state.launch.num_processes !== undefined) {
    write("launch", "num_processes", parse(control.value));
  }
  // Another memory size means another card.
  if (store === "setup" && path === "vram") write(store, "card", undefined);
  changed(control);
  refresh(control);
}

// The server parses setup values as they were typed ("24", "24 GB").
const words = (control) => control.value.trim() || undefined;

function choose(sets, store) {
  for (const [path, value] of Object.entries(sets)) {
    write(store, path, value === null ? undefined : value);
    const section = path.slice(0, path.lastIndexOf("."));
    if (value === "none" && same(read(store, section), { device: "none" })) {
      write(store, section, undefined);
    }
  }
}

// A choice is active if the form contains all its values; "off" is also active if nothing is set.
const OFF = [false, 0, "none", undefined];
const holds = (store, path, value) => {
  const written = read(store, path);
  if (value === null) return written === undefined || written === value;
  return same(written, value) || (written === undefined && OFF.includes(value));
};
const isChosen = (control) =>
  Object.entries(JSON.parse(control.dataset.sets)).every(([path, value]) =>
    holds(control.dataset.store, path, value),
  );

export function refresh(except = null) {
  for (const control of all("[data-kind][data-path]")) {
    if (control === except && document.activeElement === control) continue;
    const { kind, store, path } = control.dataset;
    const value = read(store, path);
    if (kind === "choice") control.checked = isChosen(control);
    else if (control.tagName === "SELECT") set(control, value, kind === "param" ? print(value) : JSON.stringify(value));
    else control.value = (kind === "path" || store === "setup") && typeof value === "string" ? value : print(value);
  }
}

// If nothing is set, an option stands for it; a value that the list lacks becomes an option.
function set(control, value, wanted) {
  control.querySelector("[data-foreign]")?.remove();
  const values = [...control.options].map((option) => option.value);
  const text = value === undefined ? (values.includes('""') ? '""' : "") : wanted;
  if (!values.includes(text)) {
    const option = new Option(text || "not set", text);
    option.dataset.foreign = "";
    control.add(option);
  }
  control.value = text;
}

// Shows in empty fields the values that will be used.
export function placeholders(effective) {
  for (const input of all("input[data-path][data-kind=value], input[data-kind=param]")) {
    const path = input.dataset.store === "setup" ? `setup.${input.dataset.path}` : input.dataset.path;
    const value = Object.hasOwn(effective, path) ? effective[path] : undefined;
    const nothing = input.dataset.default ?? "";
    input.placeholder = value === undefined || value === null ? nothing : `→ ${print(value)}`;
  }
}

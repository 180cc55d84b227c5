// Synchronises controls and state. The page declares which values a choice writes.

import { all, byId, show } from "./dom.js";
import { changed, parse, print, read, same, state, write } from "./state.js";

const DEVICE = "zero_optimization.";

export function bind() {
  for (const control of all("[data-kind][data-path]")) {
    const typed = ["value", "path", "name"].includes(control.dataset.kind);
    control.addEventListener(typed ? "input" : "change", () => take(control));
  }
}

export function take(control) {
  const { kind, store, path } = control.dataset;
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
    if (kind === "choice") control.checked = isChosen(control);
    else if (kind === "flag" || kind === "select") set(control, read(store, path));
    else control.value = text(kind, store, read(store, path));
  }
  reveal();
}

const text = (kind, store, value) =>
  (kind === "path" || store === "setup") && typeof value === "string" ? value : print(value);

function set(control, value) {
  control.querySelector("[data-foreign]")?.remove();
  // If nothing is set, select the option that stands for it.
  const empty = [...control.options].some((option) => option.value === '""') ? '""' : "";
  const wanted = value === undefined ? empty : JSON.stringify(value);
  if (![...control.options].some((option) => option.value === wanted)) {
    const option = new Option(wanted === "" ? "not set" : wanted, wanted);
    option.dataset.foreign = "";
    control.add(option);
  }
  control.value = wanted;
}

export const hasFrames = (family) => JSON.parse(byId("clip-families").content.textContent).includes(family);

function reveal() {
  const stage = read("config", `${DEVICE}stage`) ?? 0;
  const sentences = JSON.parse(byId("stage-sentences").content.textContent);
  byId("stage-sentence").textContent = sentences[stage]?.[1] ?? "zerotune chooses the stage when training starts.";
  show(byId("stage-3-note"), stage !== 3 && stage !== "auto");
  for (const folder of all(".nvme-folder")) {
    const section = folder.dataset.device.replace(/\.device$/, "");
    const used = read("config", `${section}.device`) === "nvme";
    show(folder, used || read("config", `${section}.nvme_path`) !== undefined);
  }
  show(byId("setup-frames").closest(".field"), hasFrames(read("setup", "family")));
  const adapted = read("setup", "lora") !== undefined && read("setup", "lora") !== "";
  show(byId("setup-base-dtype").closest(".field"), adapted || Boolean(read("setup", "base_dtype")));
  show(byId("machine-sizes"), read("setup", "this_machine") !== true);
  show(byId("machine-facts"), read("setup", "this_machine") === true);
}

// Shows in empty fields the values that will be used.
export function placeholders(effective) {
  for (const input of all("input[data-path][data-kind=value], input[data-param]")) {
    const path = input.dataset.store === "setup" ? `setup.${input.dataset.path}` : input.dataset.path;
    const value = Object.hasOwn(effective, path) ? effective[path] : undefined;
    const nothing = input.dataset.default ?? "";
    input.placeholder = value === undefined || value === null ? nothing : `→ ${print(value)}`;
  }
}

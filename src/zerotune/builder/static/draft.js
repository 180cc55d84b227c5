// What is not saved: whether there is any, and the copy that a reload of this tab finds again.
// Saved is what is in any file or template; what is not in the plan file comes back after a reload.

import { same, state } from "./state.js";

export const plan = { file: null, version: null };
let saved = "";
let inFile = "";
let key = "";

// The order of keys says nothing.
const sorted = (value) => value !== null && typeof value === "object" && !Array.isArray(value)
  ? Object.fromEntries(Object.keys(value).sort().map((name) => [name, sorted(value[name])]))
  : value;
const written = ({ config, launch }) => JSON.stringify(sorted({ config, launch }));

export const isUnsaved = () => written(state) !== saved;

export function begin(start) {
  plan.file = start.plan_file;
  plan.version = start.version;
  key = `zerotune ${location.pathname} ${start.plan_file ?? ""}`;
}

export function markSaved({ file = false } = {}) {
  saved = written(state);
  if (file) inFile = saved;
  keep();
}

export function keep() {
  try {
    sessionStorage.setItem(key, JSON.stringify({ state, saved, inFile, version: plan.version }));
  } catch {
    // Without storage, or with a full one, a reload begins with the file.
  }
}

// What this tab held before a reload; `pending` when it is not what the plan file was known to hold.
export function load() {
  try {
    const draft = JSON.parse(sessionStorage.getItem(key));
    return draft && { ...draft, pending: written(draft.state) !== draft.inFile };
  } catch {
    return null;
  }
}

// Goes on where a tab was; whether the plan file is another one since.
export function resume(draft) {
  const changed = !same(plan.version, draft.version);
  saved = draft.saved;
  inFile = draft.inFile;
  plan.version = draft.version;
  keep();
  return changed;
}

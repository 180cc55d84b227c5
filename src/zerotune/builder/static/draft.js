// Unsaved changes: detects them, and stores a copy that survives a reload of this tab. A form counts
// as saved if a file or template contains it; a reload restores what the plan file lacks.

import { same, state } from "./state.js";

export const plan = { file: null, version: null };
let saved = "";
let inFile = "";
let key = "";

// The order of keys has no meaning.
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

// This tab's form before a reload; `pending` if it differs from the plan file.
export function load() {
  try {
    const draft = JSON.parse(sessionStorage.getItem(key));
    return draft && { ...draft, pending: written(draft.state) !== draft.inFile };
  } catch {
    return null;
  }
}

// Continues from a stored draft; returns whether the plan file has changed since.
export function resume(draft) {
  const changed = !same(plan.version, draft.version);
  saved = draft.saved;
  inFile = draft.inFile;
  plan.version = draft.version;
  keep();
  return changed;
}

// What is not saved: whether there is any, and the copy that a reload of this tab finds again.

import { same, state } from "./state.js";

export const plan = { file: null, version: null };
let base = "";
let key = "";

// The order of keys says nothing.
const sorted = (value) => value !== null && typeof value === "object" && !Array.isArray(value)
  ? Object.fromEntries(Object.keys(value).sort().map((name) => [name, sorted(value[name])]))
  : value;
const written = ({ config, launch }) => JSON.stringify(sorted({ config, launch }));

export const isUnsaved = () => written(state) !== base;

export function begin(start) {
  plan.file = start.plan_file;
  plan.version = start.version;
  key = `zerotune ${location.pathname} ${start.plan_file ?? ""}`;
}

// What the form holds now is in a file, or was just read from one.
export function settled() {
  base = written(state);
  keep();
}

export function keep() {
  try {
    sessionStorage.setItem(key, JSON.stringify({ state, base, version: plan.version }));
  } catch {
    // Without storage, or with a full one, a reload begins with the file.
  }
}

// The draft of this tab: `unsaved` when it says something else than what it began with.
export function kept() {
  try {
    const draft = JSON.parse(sessionStorage.getItem(key));
    return draft && { ...draft, unsaved: written(draft.state) !== draft.base };
  } catch {
    return null;
  }
}

export function goOn(draft) {
  base = draft.base;
  const changed = !same(plan.version, draft.version);
  plan.version = draft.version;
  return changed;
}
